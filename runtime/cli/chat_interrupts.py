"""What Ctrl-C does in a chat: the first one stops the answer, the second one in a row leaves in an orderly way."""

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.abc import TaskStatus

from serai.runtime.cli.interrupts import SIGNALS, leave_at_once


class ChatInterrupts:
    """`leave` is the scope of the whole chat, cancelled by the second Ctrl-C in a row or by SIGTERM; a signal after
    that ends the process. `hint` is called for a Ctrl-C with no answer to stop.
    """

    def __init__(self, hint: Callable[[], None]) -> None:
        self.signal: int | None = None
        self.leave = anyio.CancelScope()
        self._answer: anyio.CancelScope | None = None
        self._presses = 0
        self._hint = hint

    @contextmanager
    def answering(self) -> Iterator[anyio.CancelScope]:
        """What the first Ctrl-C cancels."""
        with anyio.CancelScope() as scope:
            self._answer = scope
            try:
                yield scope
            finally:
                self._answer = None

    def heard(self) -> None:
        """A line was typed: the next Ctrl-C is a first one again."""
        self._presses = 0

    def came(self, number: int) -> None:
        """Act on a signal."""
        if self.signal is not None:
            leave_at_once(number)
            return
        self._presses += 1
        if number != signal.SIGINT or self._presses > 1:
            self.signal = int(number)
            self.leave.cancel()
        elif self._answer is not None:
            self._answer.cancel()
        else:
            self._hint()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Watch for signals while the body runs."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._watch)
            yield
            tasks.cancel_scope.cancel()

    async def _watch(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                self.came(number)
