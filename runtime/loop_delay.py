"""How late the event loop runs what is due: the measure of whether anything blocks it."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

PERIOD_S = 0.01
KEPT = 1_000
"""Ten seconds of measurements."""


class LoopDelay:
    """Sleeps for short times and notes how much longer it took."""

    def __init__(self, kept: int | None = KEPT) -> None:
        """Keeps that many measurements, the latest; None for all."""
        self._delays_s: deque[float] = deque(maxlen=kept)

    def __len__(self) -> int:
        return len(self._delays_s)

    async def measure(self) -> None:
        """Runs until cancelled."""
        while True:
            due = anyio.current_time() + PERIOD_S
            await anyio.sleep_until(due)
            self._delays_s.append(anyio.current_time() - due)

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measures while the block runs."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.measure)
            yield
            tasks.cancel_scope.cancel()

    def p99_s(self) -> float:
        """The delay that one in a hundred exceeds; 0 before there is a measurement."""
        if not self._delays_s:
            return 0.0
        ordered = sorted(self._delays_s)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
