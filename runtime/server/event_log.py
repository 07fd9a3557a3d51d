"""The events of one response, kept for whoever attaches later."""

from collections import deque
from collections.abc import AsyncGenerator

import anyio

from serai.runtime.server.errors import invalid

MAX_LOG_BYTES = 8 << 20
"""A long reasoning of 30,000 tokens has about as many events of 200 bytes."""


class EventLog:
    """Grows until `end`. Beyond `MAX_LOG_BYTES` the oldest events are let go, and who asks for those is told."""

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._events: deque[bytes] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._first = 0
        self._ended = False
        self._changed = anyio.Event()

    @property
    def held_bytes(self) -> int:
        return self._bytes

    def add(self, line: bytes) -> None:
        """The next event, as it goes over the wire. Its place here is its sequence number."""
        self._events.append(line)
        self._bytes += len(line)
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= len(self._events.popleft())
            self._first += 1
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._wake()

    async def after(self, sequence: int) -> AsyncGenerator[bytes, None]:
        """The events after that sequence number, then each new one as it comes, to the end."""
        wanted = sequence + 1
        while True:
            if wanted < self._first:
                raise invalid(
                    "starting_after",
                    f"events up to {self._first - 1} are not kept any more; start after that, or get it whole",
                )
            while wanted - self._first < len(self._events):
                yield self._events[wanted - self._first]
                wanted += 1
                if wanted < self._first:
                    break
            else:
                if self._ended:
                    return
                await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
