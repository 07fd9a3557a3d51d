"""The border between two tokens of a stream, at which it can be held for a while."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class Border:
    """One stream's. Whoever asks for its next token passes it, unless it is held; who holds it waits for a token that
    was asked for before."""

    def __init__(self) -> None:
        self.is_passed = False  # a token that was asked for is not there yet, or the stream is just ending
        self._held: anyio.Event | None = None  # set when it isn't any more
        self._came: anyio.Event | None = None  # set when the token is there, for whoever waits to hold

    @property
    def is_held(self) -> bool:
        """Whether somebody holds it, or waits to."""
        return self._held is not None

    async def opened(self) -> None:
        """Wait until nobody holds it."""
        while self._held is not None:
            await self._held.wait()

    def asked(self) -> None:
        """A token is asked for; until `came` nobody can hold the stream."""
        self.is_passed = True

    def came(self) -> None:
        """The token is handed out, or will not come."""
        self.is_passed = False
        if self._came is not None:
            self._came.set()
            self._came = None

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Nobody passes it for the length of the block. It must not be held already."""
        held = self._held = anyio.Event()
        try:
            while self.is_passed:
                self._came = anyio.Event()
                await self._came.wait()
            yield
        finally:
            self._held = None
            held.set()
