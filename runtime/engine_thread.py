"""The one thread that computes. Values go in and come out; the event loop never waits on anything but an event."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from serai.kernels.ranks import give_way
from serai.runtime.to_the_end import to_the_end

T = TypeVar("T")


class EngineThread:
    """Runs functions one after the other on a thread of its own.

    `call` can't be cancelled half way: the function's arrays must not change under it, so the caller's cancellation
    is delivered once the function has returned. Keep calls bounded (one step) and give long ones an abort flag.
    """

    def __init__(self, name: str = "serai-engine") -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a process that dies without closing the runtime isn't held up by an idle thread.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` on the engine thread and give back what it returns or raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def deliver(value: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(value)  # type: ignore[arg-type]  # None is a T when the function returns None
            else:
                done.set_exception(error)

        def job() -> None:
            try:
                value = function(*args)
            except BaseException as error:  # noqa: BLE001  # raised again where the call is awaited
                loop.call_soon_threadsafe(deliver, None, error)
            else:
                loop.call_soon_threadsafe(deliver, value, None)

        self._jobs.put(job)
        return await to_the_end(done)

    def close(self) -> None:
        """Let the thread end after the jobs it already has, and wait for it."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        give_way()
        while (job := self._jobs.get()) is not None:
            job()
