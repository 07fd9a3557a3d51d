"""A hook that stops the engine where a test wants it."""

import asyncio
import threading

import anyio


class Gate:
    """Stops the engine between layers of its n-th step until opened; `reached` tells the event loop that it stands."""

    def __init__(self, step: int) -> None:
        self.reached = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()
        self._steps_left = step

    def open(self) -> None:
        self._opened.set()

    def __call__(self, batch: object, layer: int) -> None:
        self._steps_left -= layer == 0
        if self._steps_left == 0 and layer == 0:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._opened.wait(timeout=10), "the test opens the gate"
