"""A runtime of this very process, watched without a server between."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from serai.runtime.errors import SeraiError
from serai.runtime.memory.attention import alternatives
from serai.runtime.monitor import acting
from serai.runtime.monitor.detail import SessionDetail, look
from serai.runtime.monitor.saying import say
from serai.runtime.monitor.source import About, Action, ActionRefused, Outcome
from serai.runtime.monitor.transcript import Passage
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

    async def about(self) -> About:
        config = self._runtime.facts.config
        return About() if config is None else About(alternatives(config, VALUE_BYTES))

    async def detail(self, session_id: str) -> SessionDetail | None:
        session = self._runtime.find(session_id)
        return None if session is None else await look(self._runtime, session, store=self._store)

    async def say(self, session_id: str, text: str) -> AsyncGenerator[Passage, None]:
        try:
            async with aclosing(say(self._runtime, session_id, text)) as pieces:
                async for piece in pieces:
                    yield piece
        except SeraiError as error:
            raise ActionRefused(str(error)) from error

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
