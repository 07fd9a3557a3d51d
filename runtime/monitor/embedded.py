"""The monitor on the terminal of a program that has sessions of its own: beside its work, for as long as one looks.

Logs go to the monitor's log meanwhile. Ctrl-C means what it means to the program; leaving with q ends the screen only.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from serai.runtime.monitor.app import Monitor
from serai.runtime.monitor.model import LogEntry, Model
from serai.runtime.monitor.source import Source
from serai.runtime.monitor.terminal import leave, watch_for_hangup
from serai.runtime.monitor.watcher import wall_clock


class LogEntries(logging.Handler):
    """Log records as lines of the monitor's log; safe from any thread."""

    def __init__(self, model: Model, clock: Callable[[], str] = wall_clock) -> None:
        super().__init__()
        self._model = model
        self._clock = clock

    def emit(self, record: logging.LogRecord) -> None:
        told = f"{record.name}: {self.format(record)}"
        self._model.log.append(LogEntry(self._clock(), record.levelname.lower(), detail=told))


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Give all records of the root logger to `handler` alone; what was there before is back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = [handler]
    try:
        yield
    finally:
        root.handlers[:] = before


class Screen:
    """One monitor over this process. `show` draws until the person or the program has enough."""

    def __init__(self, *, light: bool = False) -> None:
        self._light = light
        self._app: Monitor | None = None
        self._ended = False
        self._left = anyio.Event()

    @property
    def is_shown(self) -> bool:
        """Whether the terminal is the monitor's now."""
        return self._app is not None

    async def show(
        self, source: Source, *, left: Callable[[], None], session_id: str | None = None, notice: str = ""
    ) -> None:
        """Draw until `end`, or until the person leaves; then `left` is called with the terminal as it was before.

        With a `session_id` that session is open from the beginning. `notice` is the first thing said.
        """
        if not self._ended:
            self._app = app = Monitor(source, light=self._light, interrupted=_interrupt, opened=session_id)
            if notice:
                app.model.tell(notice)
                app.model.log.append(LogEntry(wall_clock(), "begun", detail=notice))
            watch_for_hangup(on_gone=self._gone)
            try:
                # A terminal must be put in order, whatever ends the program.
                with logging_to(LogEntries(app.model)), anyio.CancelScope(shield=True):
                    await app.run_async()
            finally:
                self._app = None
            if not self._ended:
                left()
        self._left.set()

    async def end(self) -> None:
        """Take the screen away and wait until it has gone; later calls of `show` do nothing."""
        self._ended = True
        if self._app is not None:
            self._app.exit()
            with anyio.CancelScope(shield=True):
                await self._left.wait()

    def _gone(self) -> None:
        if self.is_shown:
            leave()


def _interrupt() -> None:
    """Ctrl-C is a key to whoever reads keys; to the program it is this signal."""
    os.kill(os.getpid(), signal.SIGINT)
