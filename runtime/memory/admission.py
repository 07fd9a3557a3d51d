"""Who may take memory next: every request reserves the most it will hold before it starts, in order of arrival.

A request that was admitted can always finish, so none is prefilled, thrown out and prefilled again. One that can never
fit is refused at once, with the numbers. One that doesn't fit now first lets idle sessions be moved out, then waits its
turn. A generation under way goes before those that have not begun: it holds memory that only its end gives back.
"""

from collections.abc import Awaitable, Callable

import anyio

from serai.runtime.errors import OutOfBudget, TooManyWaiting, WaitedTooLong
from serai.runtime.state import StatePool


class Reservation:
    """Bytes kept free for one request. `keep` adjusts them as they turn into live buffers; `close` ends it."""

    __slots__ = ("_admission", "bytes")

    def __init__(self, admission: "Admission", size: int) -> None:
        self._admission = admission
        self.bytes = size

    def keep(self, size: int) -> None:
        """From now on `size` bytes beyond what is live may still be taken."""
        shrunk = size < self.bytes
        self.bytes = size
        if shrunk:
            self._admission.freed()

    def close(self) -> None:
        self._admission.end(self)


class Admission:
    """The gate before the pool. `reclaim(bytes)` is asked to free that much from idle sessions; it says if any was.

    Without a limit everybody passes.
    """

    def __init__(self, pool: StatePool, *, max_waiting: int = 1_024, max_wait_s: float = 600.0) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._reservations: set[Reservation] = set()
        self._queue: list[anyio.Event] = []
        self._going_on: list[anyio.Event] = []
        self.reclaim: Callable[[int], Awaitable[bool]] = _nothing_to_reclaim
        pool.on_freed = self.freed

    @property
    def reserved_bytes(self) -> int:
        return sum(one.bytes for one in self._reservations)

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return len(self._queue) + len(self._going_on)

    @property
    def free_bytes(self) -> int | None:
        """What is neither live nor reserved; None without a limit."""
        limit = self._pool.limit_bytes
        return None if limit is None else limit - self._pool.live_bytes - self.reserved_bytes

    def check(self, needed_bytes: int) -> None:
        """Raise `OutOfBudget`, with the numbers, when so much could not be had even alone."""
        limit = self._pool.limit_bytes
        if limit is not None and needed_bytes > limit:
            raise OutOfBudget(what="this call", needed_bytes=needed_bytes, free_bytes=limit)

    async def enter(self, needed_bytes: int, *, held_bytes: int, going_on: bool) -> Reservation:
        """Wait until `needed_bytes` are free and reserve them.

        `held_bytes` is what the request's own session holds already, which can't be moved out for it. Raises
        `OutOfBudget` when it could not fit even alone, or when it is going on and nobody else could make room;
        `TooManyWaiting` when the queue is full; `WaitedTooLong` after `max_wait_s`.
        """
        self.check(needed_bytes + held_bytes)
        queue = self._going_on if going_on else self._queue
        ahead = self._going_on if going_on else self._going_on + self._queue
        if not ahead and self._fits(needed_bytes):
            return self._reserve(needed_bytes)
        if self.waiting >= self._max_waiting:
            raise TooManyWaiting(waiting=self.waiting)
        with anyio.move_on_after(self._max_wait_s):
            return await self._wait(queue, needed_bytes, going_on=going_on)
        raise WaitedTooLong(
            waited_s=self._max_wait_s, needed_bytes=needed_bytes, free_bytes=max(self.free_bytes or 0, 0)
        )

    async def _wait(self, queue: list[anyio.Event], needed_bytes: int, *, going_on: bool) -> Reservation:
        turn = anyio.Event()
        queue.append(turn)
        try:
            while True:
                first = queue[0] is turn and (going_on or not self._going_on)
                if first and self._fits(needed_bytes):
                    return self._reserve(needed_bytes)
                if first:
                    if await self.reclaim(needed_bytes - (self.free_bytes or 0)) or self._fits(needed_bytes):
                        continue
                    if going_on and not self._reservations:
                        # Nobody is under way whose end would free memory, so waiting would be for ever.
                        raise OutOfBudget(what="going on", needed_bytes=needed_bytes, free_bytes=self.free_bytes or 0)
                await turn.wait()
                position = queue.index(turn)
                turn = queue[position] = anyio.Event()
        finally:
            queue.remove(turn)
            self.freed()

    def freed(self) -> None:
        """Memory or a place became free: the first in line looks again."""
        queue = self._going_on or self._queue
        if queue:
            queue[0].set()

    def end(self, reservation: Reservation) -> None:
        self._reservations.discard(reservation)
        self.freed()

    def _fits(self, needed_bytes: int) -> bool:
        free = self.free_bytes
        return free is None or needed_bytes <= free

    def _reserve(self, size: int) -> Reservation:
        reservation = Reservation(self, size)
        self._reservations.add(reservation)
        return reservation


async def _nothing_to_reclaim(_: int) -> bool:
    return False
