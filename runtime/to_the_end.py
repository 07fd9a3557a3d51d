"""Waiting for what must not be left half way: a thread that writes into a state, or reads one about to be freed.

A shielded scope keeps anyio's cancellation out, but not asyncio's own (`Task.cancel`, `asyncio.timeout`), which would
let the caller go on, and free or reuse the memory, while the thread is still at it.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def to_the_end(done: "asyncio.Future[T]", when_cancelled: Callable[[], object] | None = None) -> T:
    """The future's result. Cancellation of the caller, of either kind, is delivered once the future has ended;
    `when_cancelled` is called at once, and may have it end early."""
    cancelled: asyncio.CancelledError | None = None
    while not done.done():
        try:
            with anyio.CancelScope(shield=when_cancelled is None or cancelled is not None):
                await asyncio.wait([done])
        except asyncio.CancelledError as error:
            cancelled = error
            if when_cancelled is not None:
                when_cancelled()
    if cancelled is not None:
        if not done.cancelled():
            done.exception()  # nobody else will ask for it
        raise cancelled
    return done.result()


async def in_thread_to_the_end(function: Callable[[], T]) -> T:
    """Run `function()` on a worker thread; comes back, even when cancelled, only after it has returned."""
    return await to_the_end(asyncio.ensure_future(anyio.to_thread.run_sync(function)))


async def in_thread_until_stopped(function: Callable[[Callable[[], bool]], T]) -> T:
    """As `in_thread_to_the_end`, for a function that can stop early: it is given what to ask whether it should."""
    stop = threading.Event()
    return await to_the_end(asyncio.ensure_future(anyio.to_thread.run_sync(function, stop.is_set)), stop.set)
