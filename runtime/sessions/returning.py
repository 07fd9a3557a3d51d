"""Sessions expected at a known time, by a tool's answer or at once, which are brought back into memory before it."""

import logging
from typing import Protocol

import anyio

from serai.runtime.errors import SeraiError

log = logging.getLogger(__name__)

EARLY_S = 1.0
"""How long before the expected answer: a state of a few hundred megabytes takes about as long to read."""


class Returns(Protocol):
    """What is needed of a session."""

    @property
    def id(self) -> str: ...

    async def come_back(self) -> None: ...


class Returning:
    """Keeps the times, of the loop's clock, and acts on them."""

    def __init__(self) -> None:
        self._expected: dict[str, tuple[float, Returns]] = {}
        self._changed = anyio.Event()

    def expect(self, session: Returns, in_s: float) -> None:
        """The session is needed again in so many seconds."""
        self._expected[session.id] = (anyio.current_time() + in_s, session)
        self._changed.set()

    def forget(self, session: Returns) -> None:
        self._expected.pop(session.id, None)

    async def run(self) -> None:
        """Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                self._changed = anyio.Event()
                next_s = min((at_s for at_s, _ in self._expected.values()), default=None)
                wait_s = None if next_s is None else next_s - EARLY_S - anyio.current_time()
                if wait_s is None or wait_s > 0:
                    with anyio.move_on_after(wait_s):
                        await self._changed.wait()
                    continue
                _, session = min(self._expected.values(), key=lambda one: one[0])
                self.forget(session)
                tasks.start_soon(_bring_back, session)  # a long replay keeps no other from coming back


async def _bring_back(session: Returns) -> None:
    try:
        await session.come_back()
    except SeraiError as error:
        # It stays cold; whoever uses it next meets the same error and can act on it.
        log.warning("session %s was not brought back ahead of time: %s", session.id, error)
