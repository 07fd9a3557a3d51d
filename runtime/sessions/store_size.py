"""How many bytes the store's files take, known a little late: counting them asks its index, which is no work for the
event loop and none at all while nobody looks."""

import logging
from collections.abc import Callable

import anyio
import anyio.to_thread

from serai.checkpoints.errors import SeraiError

PERIOD_S = 2.0
"""The least time between two counts."""

log = logging.getLogger(__name__)


class StoreSize:
    """`count` runs in a worker thread; None when there is no store."""

    def __init__(self, count: Callable[[], int] | None, *, period_s: float = PERIOD_S) -> None:
        self._count = count
        self._period_s = period_s
        self._wanted = anyio.Event()
        self._last: int | None = None

    def last(self) -> int | None:
        """As of the latest count, and have it counted again. None without a store, and before the first count."""
        self._wanted.set()
        return self._last

    async def run(self) -> None:
        """Runs until cancelled."""
        if self._count is None:
            return
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            try:
                self._last = await anyio.to_thread.run_sync(self._count)
            except SeraiError as error:
                log.warning("the store could not be counted: %s", error)
            await anyio.sleep(self._period_s)
