"""The other side of `http_source.py`, for whatever serves HTTP: JSON bodies and the lines of the event stream."""

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from serai.runtime.events import SessionEvent
from serai.runtime.monitor import acting
from serai.runtime.monitor.in_process import comparison_of
from serai.runtime.monitor.source import Action

if TYPE_CHECKING:
    from serai.checkpoints.store import Store
    from serai.runtime.runtime import Runtime

KEEP_ALIVE_S = 15.0
"""How long an event stream is silent before a comment says that it is alive; `http_source.QUIET_S` allows three."""


def status_body(runtime: "Runtime") -> dict[str, Any]:
    """For `GET /serai/status`."""
    return runtime.status().to_json()


def model_body(runtime: "Runtime") -> dict[str, Any]:
    """For `GET /serai/model`."""
    return {"comparison": [asdict(cost) for cost in comparison_of(runtime)]}


async def action_body(
    runtime: "Runtime",
    body: object,
    *,
    store: "Store | None" = None,
    cancel: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """For `POST /serai/actions`, whose parsed JSON is `body`. Raises errors of ours: `BadParameter` for a body that is
    no action, `ActionRefused` or the session's own error for one that was not done."""
    return (await acting.act(runtime, Action.from_json(body), store=store, cancel=cancel)).to_json()


async def export_file(runtime: "Runtime", session_id: str, path: Path, *, store: "Store | None") -> None:
    """For `GET /serai/sessions/ID/export`: writes the bundle to a new file of the server's own choice, to send."""
    await acting.export(runtime, session_id, path, store=store)


async def event_lines(runtime: "Runtime", *, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncGenerator[str, None]:
    """For `GET /serai/events`, as text/event-stream: for ever, until it is closed."""
    with runtime.watch() as watcher:
        yield ": watching\n\n"
        while True:
            event: SessionEvent | None = None
            with anyio.move_on_after(keep_alive_s):
                event = await watcher.get()
            yield ": keep\n\n" if event is None else event_line(event)


def event_line(event: SessionEvent) -> str:
    """One event of the stream."""
    return f"data: {json.dumps(asdict(event) | {'kind': event.kind.value})}\n\n"
