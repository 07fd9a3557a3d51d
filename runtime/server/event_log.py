"""The events of one response, kept for whoever attaches later."""

import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import anyio

from serai.runtime.server.errors import invalid

MAX_LOG_BYTES = 8 << 20
"""A long reasoning of 30,000 tokens has about as many events of 200 bytes."""


class EventLog:
    """Grows until `end`. Beyond `MAX_LOG_BYTES` the oldest events are let go, and who asks for those is told."""

    def __init__(self, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._events: deque[tuple[int, Mapping[str, Any]]] = deque()
        self._bytes = 0
        self._max_bytes = max_bytes
        self._first = 0
        self._ended = False
        self._changed = anyio.Event()

    @property
    def bytes(self) -> int:
        return self._bytes

    def add(self, told: Mapping[str, Any]) -> None:
        size = len(json.dumps(told))
        self._events.append((size, told))
        self._bytes += size
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= self._events.popleft()[0]
            self._first += 1
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._wake()

    async def after(self, sequence: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """The events after that sequence number, then each new one as it comes, to the end."""
        wanted = sequence + 1
        while True:
            if wanted < self._first:
                raise invalid(
                    "starting_after",
                    f"events up to {self._first - 1} are not kept any more; start after that, or get it whole",
                )
            while wanted - self._first < len(self._events):
                yield self._events[wanted - self._first][1]
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
