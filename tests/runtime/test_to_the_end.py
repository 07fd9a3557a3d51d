"""Cancelled callers come back only when the thread has: asyncio's own cancellation is no exception."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable

import anyio
import pytest

from serai.runtime.engine_thread import EngineThread
from serai.runtime.to_the_end import in_thread_to_the_end, in_thread_until_stopped

pytestmark = pytest.mark.anyio


class Slow:
    """Work on a thread that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()

    def __call__(self) -> int:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go_on.wait(timeout=10), "the test lets it end"
        self.ended = True
        return 7

    def end(self) -> None:
        self._go_on.set()


async def test_the_result_comes_back_and_so_does_an_error() -> None:
    assert await in_thread_to_the_end(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread_to_the_end(lambda: 1 // 0)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_task_ends_after_its_thread(times: int) -> None:
    """B105: a second cancellation while the first is being waited for changes nothing."""
    slow = Slow()
    task = asyncio.ensure_future(in_thread_to_the_end(slow))
    await slow.begun.wait()
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not task.done()
    slow.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.ended


async def test_a_cancelled_scope_lets_the_call_come_to_its_result() -> None:
    slow = Slow()
    results = []

    async def call() -> None:
        results.append(await in_thread_to_the_end(slow))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await slow.begun.wait()
        tasks.cancel_scope.cancel()
        slow.end()
    assert results == [7]


async def test_the_engine_thread_is_waited_for_too() -> None:
    thread, slow = EngineThread(), Slow()
    task = asyncio.ensure_future(thread.call(slow))
    await slow.begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    slow.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow.ended
    thread.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have ranks of their own on Linux only")
async def test_the_engine_ranks_behind_its_event_loop() -> None:
    thread = EngineThread()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    engine = await thread.call(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    thread.close()
    assert engine == min(own + 5, 19)


@pytest.mark.parametrize("kind", ["task", "scope"])
async def test_what_can_stop_early_is_told_of_a_cancellation_at_once_and_waited_for(kind: str) -> None:
    begun, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work(stopped: Callable[[], bool]) -> None:
        loop.call_soon_threadsafe(begun.set)
        while not stopped():
            pass
        ended.set()

    scope = anyio.CancelScope()

    async def call() -> None:
        with scope:
            await in_thread_until_stopped(work)

    task = asyncio.ensure_future(call())
    await begun.wait()
    if kind == "task":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        scope.cancel()
        await task
        assert scope.cancelled_caught
    assert ended.is_set()
