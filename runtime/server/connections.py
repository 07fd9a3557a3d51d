"""Connections as a server on a network must keep them: those that never come to ask are closed."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class BoundedConnection(H11Protocol):
    """One connection. A request whose head has not come whole `arrive_s` after its beginning is given up.

    Uvicorn bounds only the silence after a response; a client that sends a byte now and then would hold its socket for
    as long as it likes.
    """

    arrive_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._patience: asyncio.TimerHandle | None = None
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._asks:
            self._stop_waiting()
        elif self._patience is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _asks(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._patience = self.loop.call_later(self.arrive_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        self._patience = None
        if not self._asks and not self.transport.is_closing():
            self.transport.close()


def bounded_by(arrive_s: float) -> type[Any]:
    """The class of a server's connections, for `uvicorn.Config(http=...)`."""
    return type("Connection", (BoundedConnection,), {"arrive_s": arrive_s})
