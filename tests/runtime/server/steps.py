"""Steps of an engine let through one by one."""

import asyncio
import threading

import anyio

from serai.runtime.models.batch import Batch
from serai.runtime.scheduler import Limits


class Steps:
    """A hook before each step: it waits until the test lets it pass. Made in the test's event loop."""

    def __init__(self) -> None:
        self.limits = Limits(step_rows=2048, prefill_rows_beside_decode=2048)
        self.taken = 0
        self._loop = asyncio.get_running_loop()
        self._passes = threading.Semaphore(0)
        self._free = False
        self._waiting = anyio.Event()

    def __call__(self, batch: Batch) -> None:
        self.taken += 1
        if not self._free:
            self._loop.call_soon_threadsafe(self._waiting.set)
            assert self._passes.acquire(timeout=5), "the test lets steps pass"

    async def let(self, count: int) -> None:
        """Let `count` steps pass, each once it has come; returns when the next one waits."""
        for _ in range(count):
            await self.waits()
            self._waiting = anyio.Event()
            self._passes.release()
        await self.waits()

    async def waits(self) -> None:
        """Until a step waits to be let through."""
        with anyio.fail_after(5):
            await self._waiting.wait()

    def free(self) -> None:
        """Let all pass from now on."""
        self._free = True
        self._passes.release(1000)
