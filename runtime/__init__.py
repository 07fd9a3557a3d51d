"""serai: long-lived agent sessions on Kimi-class hybrid models.

Start with `open_runtime`. A request's way through: `session` asks `driver`, which lets `scheduler.plan` choose and
`engine.step` compute (`models/kimi`, then the kernels, then `sampling`), and hands the token to the session's stream.

Names are loaded when first used: the command line's small commands need neither the kernels nor the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serai.runtime.memory.accounts import Quota
    from serai.runtime.models.open_model import Precision
    from serai.runtime.opening import open_runtime
    from serai.runtime.runtime import Runtime
    from serai.runtime.sampling.params import SamplingParams
    from serai.runtime.sessions.contents import Appended
    from serai.runtime.sessions.conversation import Chat
    from serai.runtime.sessions.generation import Completion, FinishReason, Generation, Token
    from serai.runtime.sessions.journal import Point
    from serai.runtime.sessions.session import Session
    from serai.runtime.status import Status

_HOMES = {
    "Appended": "sessions.contents",
    "Chat": "sessions.conversation",
    "Completion": "sessions.generation",
    "FinishReason": "sessions.generation",
    "Generation": "sessions.generation",
    "Point": "sessions.journal",
    "Precision": "models.open_model",
    "Quota": "memory.accounts",
    "Runtime": "runtime",
    "SamplingParams": "sampling.params",
    "Session": "sessions.session",
    "Status": "status",
    "Token": "sessions.generation",
    "open_runtime": "opening",
}

__all__ = [
    "Appended",
    "Chat",
    "Completion",
    "FinishReason",
    "Generation",
    "Point",
    "Precision",
    "Quota",
    "Runtime",
    "SamplingParams",
    "Session",
    "Status",
    "Token",
    "open_runtime",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
