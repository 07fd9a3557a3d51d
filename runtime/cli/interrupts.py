"""What Ctrl-C does: the first one stops the work in an orderly way, the second one the process."""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType

import anyio
import typer
from anyio.abc import TaskStatus

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: int) -> int:
    """What shells expect of a process that a signal ended."""
    return 128 + number


def leave_at_once(number: int) -> None:
    """End the process without waiting for threads; what is durable is whole at every instant."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(number))


@contextmanager
def leaving_at_once(explanation: str) -> Iterator[None]:
    """Where no `Interrupt` watches: a signal ends the process, saying why there is nothing to resume."""

    def leave(number: int, frame: FrameType | None) -> None:
        typer.echo(f"\nserai: {explanation}", err=True)
        leave_at_once(number)

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """Which signal came, if any. Work under `stops` is cancelled by the first; the second ends the process."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.stops = anyio.CancelScope()

    async def watch(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Wait for signals until cancelled."""
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                if self.signal is not None:
                    leave_at_once(number)
                self.signal = int(number)
                self.stops.cancel()


@asynccontextmanager
async def interruptible() -> AsyncIterator[Interrupt]:
    """Watch for signals while the body runs; the body puts what may be cut short under `Interrupt.stops`."""
    interrupt = Interrupt()
    async with anyio.create_task_group() as tasks:
        await tasks.start(interrupt.watch)
        yield interrupt
        tasks.cancel_scope.cancel()
