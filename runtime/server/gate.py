"""Pausing at token borders: of the whole engine, and of one response."""

import anyio


class Gate:
    """Open until closed. Whoever waits holds everything as it is: nothing is lost and nothing runs."""

    def __init__(self) -> None:
        self._opened = anyio.Event()
        self._opened.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        if self._opened.is_set():
            self._opened = anyio.Event()

    def open(self) -> None:
        self._opened.set()

    async def wait(self) -> None:
        while not self._opened.is_set():
            await self._opened.wait()


class Gates:
    """The gates that one reply has to pass before each token."""

    def __init__(self, *gates: Gate) -> None:
        self._gates = gates

    @property
    def are_open(self) -> bool:
        return all(gate.is_open for gate in self._gates)

    async def wait(self) -> None:
        while not self.are_open:
            for gate in self._gates:
                await gate.wait()
