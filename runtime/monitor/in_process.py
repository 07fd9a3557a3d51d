"""A runtime of this very process, watched without a server between."""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from serai.runtime.errors import SeraiError
from serai.runtime.memory.attention import AttentionCost, alternatives
from serai.runtime.monitor import acting
from serai.runtime.monitor.source import Action, ActionRefused, Outcome
from serai.runtime.sessions.events import SessionEvent
from serai.runtime.status import Status

if TYPE_CHECKING:
    from serai.checkpoints.store import Store
    from serai.runtime.runtime import Runtime

VALUE_BYTES = 2
"""Other kinds of attention are compared with 16-bit values, as engines keep them."""


class InProcess:
    """`store` and `cancel` as for `acting.act`."""

    def __init__(
        self,
        runtime: "Runtime",
        *,
        store: "Store | None" = None,
        cancel: Callable[[str], bool] | None = None,
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._cancel = cancel

    @property
    def name(self) -> str:
        return "this process"

    async def status(self) -> Status:
        return self._runtime.status()

    async def comparison(self) -> tuple[AttentionCost, ...]:
        config = self._runtime.facts.config
        return () if config is None else alternatives(config, VALUE_BYTES)

    async def act(self, action: Action) -> Outcome:
        try:
            return await acting.act(self._runtime, action, store=self._store, cancel=self._cancel)
        except SeraiError as error:
            raise ActionRefused(str(error)) from error

    async def export(self, session_id: str, path: Path) -> Outcome:
        try:
            return await acting.export(self._runtime, session_id, path, store=self._store)
        except SeraiError as error:
            raise ActionRefused(str(error)) from error

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        with self._runtime.watch() as watcher:
            while True:
                yield await watcher.get()

    async def close(self) -> None:
        """The runtime is its owner's."""
