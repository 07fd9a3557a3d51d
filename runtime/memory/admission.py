"""Who may take memory next: every request reserves the most it will hold before it starts, in order of arrival.

A request that was admitted can always finish, so none is prefilled, thrown out and prefilled again. One that can never
fit is refused at once, with the numbers. One that doesn't fit now first lets idle sessions be moved out, then waits its
turn. A generation under way goes before those that have not begun: it holds memory that only its end gives back.

A namespace may have a quota (`accounts`). Who waits for its own namespace's quota stands in nobody's way but that of
its own; idle sessions of its own are moved out for it, and of no other.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import anyio

from serai.runtime.errors import OutOfBudget, SeraiError, TooManyWaiting, WaitedTooLong
from serai.runtime.memory.accounts import Account
from serai.runtime.state import StatePool

log = logging.getLogger(__name__)

NOBODY_UNDER_WAY_S = 30.0
"""Where no call is under way, nothing can be moved out and nobody closes a session for so long, nobody will: a call
that waits is told, instead of after `max_wait_s`."""

NOTHING_MOVES_S = 2.0
"""How long without a store, where idle sessions can't be moved out: between two calls of a program that closes what it
is done with lie milliseconds, and who keeps all open waits for itself."""

LOOK_AGAIN_S = 1.0
"""A session becomes movable by mere time when its reader takes no more tokens, and nobody says so."""


class Reservation:
    """Bytes kept free for one request until `close`. What is taken or given back within `counting` comes out of them or
    goes back into them, so that live and reserved bytes together stay what was admitted."""

    __slots__ = ("_admission", "account", "bytes", "is_over")

    def __init__(self, admission: "Admission", account: Account, size: int) -> None:
        self._admission = admission
        self.account = account
        self.bytes = size
        self.is_over = False
        account.reserved_bytes += size
        admission.reserved_bytes += size

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Buffers that the block takes are those promised; those that it gives back are promised again."""
        before = self._admission.live_bytes
        try:
            yield
        finally:
            self._keep(max(0, self.bytes + before - self._admission.live_bytes))

    def widen(self, more_bytes: int) -> bool:
        """Promise so much more if it is free at this moment; whether it was."""
        if not self._admission.is_free(more_bytes, self.account):
            return False
        self._keep(self.bytes + more_bytes)
        return True

    def _keep(self, size: int) -> None:
        if self.is_over:
            return
        shrunk = size < self.bytes
        self.account.reserved_bytes += size - self.bytes
        self._admission.reserved_bytes += size - self.bytes
        self.bytes = size
        if shrunk:
            self._admission.freed()

    def close(self) -> None:
        self._admission.end(self)

    @contextmanager
    def closing(self) -> Iterator["Reservation"]:
        """Ends it with the block."""
        try:
            yield self
        finally:
            self.close()


@dataclass(frozen=True, slots=True)
class Aside:
    """How a call that waits for memory gives up what its own session holds, to get it back when its turn comes.

    `step(is_called)` does that unless `is_called()` becomes true meanwhile, and says whether there was anything;
    `needed_bytes()` is what must be free for the call as things stand, and `most_bytes` once everything is given up.
    """

    step: Callable[[Callable[[], bool]], Awaitable[bool]]
    needed_bytes: Callable[[], int]
    most_bytes: int


@dataclass(eq=False, slots=True)
class _Waiter:
    """One call in line; `order` is its number by arrival."""

    order: int
    account: Account
    asked_bytes: int
    going_on: bool
    aside: Aside | None
    turn: anyio.Event = field(default_factory=anyio.Event)

    @property
    def needed_bytes(self) -> int:
        """What it needs now: more than it asked for, once it has given up some of what it held."""
        return self.asked_bytes if self.aside is None else self.aside.needed_bytes()

    @property
    def rank(self) -> tuple[bool, int]:
        """The least goes first."""
        return not self.going_on, self.order


class Admission:
    """The gate before the pool. `reclaim(bytes, namespace)` is asked to free that much from idle sessions, of one
    namespace or (None) of all; it says if any was.

    Without a limit and quotas everybody passes.
    """

    def __init__(
        self,
        pool: StatePool,
        *,
        max_waiting: int = 1_024,
        max_wait_s: float = 600.0,
        nobody_under_way_s: float = NOBODY_UNDER_WAY_S,
    ) -> None:
        self._pool = pool
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._nobody_under_way_s = nobody_under_way_s
        self._reservations: set[Reservation] = set()
        self.reserved_bytes = 0
        self._lines: dict[Account, list[_Waiter]] = {}
        self._arrivals = count()
        self.reclaim: Callable[[int, str | None], Awaitable[bool]] = _nothing_to_reclaim
        pool.on_freed = self.freed

    @property
    def live_bytes(self) -> int:
        """What all states in memory hold."""
        return self._pool.live_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return sum(len(line) for line in self._lines.values())

    @property
    def free_bytes(self) -> int | None:
        """What is neither live nor reserved; None without a limit."""
        limit, pool = self._pool.limit_bytes, self._pool
        return None if limit is None else limit - pool.live_bytes - pool.beside_bytes - self.reserved_bytes

    def check(self, needed_bytes: int, account: Account) -> None:
        """Raise `OverQuota` or `OutOfBudget`, with the numbers, when so much could not be had even alone."""
        account.check_bytes(needed_bytes)
        limit = self._pool.limit_bytes
        if limit is not None and needed_bytes > limit:
            raise OutOfBudget(
                what="this call", needed_bytes=needed_bytes, free_bytes=None if account.is_tenant else limit
            )

    async def enter(
        self, needed_bytes: int, *, account: Account, held_bytes: int, going_on: bool, aside: Aside | None = None
    ) -> Reservation:
        """Wait until `needed_bytes` are free and reserve them.

        `held_bytes` is what the request's own session holds already, which can't be moved out for it. With `aside` it
        can be moved out for those who came before: they would wait for each other otherwise. Raises
        `OverQuota` or `OutOfBudget` when it could not fit even alone, or when it is going on and nobody else could make
        room; `OverQuota` or `TooManyWaiting` when as many wait as may; `WaitedTooLong` after `max_wait_s`, or
        `nobody_under_way_s` in which there was no call whose end could have freed memory.
        """
        self.check(needed_bytes + held_bytes, account)
        one = _Waiter(next(self._arrivals), account, needed_bytes, going_on, aside)
        if self._fits(one) and not self._anybody_before(one):
            return self._reserve(needed_bytes, account)
        account.check_waiting()
        if self.waiting >= self._max_waiting:
            raise TooManyWaiting(waiting=None if account.is_tenant else self.waiting)
        with anyio.move_on_after(self._max_wait_s):
            return await self._wait(one)
        raise self._waited(self._max_wait_s, one)

    async def _wait(self, one: _Waiter) -> Reservation:
        line = self._lines.setdefault(one.account, [])
        line.append(one)
        line.sort(key=lambda waiter: waiter.rank)
        one.account.waiting += 1
        alone_since_s: float | None = None
        try:
            while True:
                is_alone = False
                if not self._anybody_before(one):
                    if self._fits(one):
                        return self._reserve(one.needed_bytes, one.account)
                    if await self._room_made(one) or self._fits(one):
                        continue
                    self._check_hope(one)
                    is_alone = self._is_alone(one)
                now_s = anyio.current_time()
                if not is_alone:
                    alone_since_s = None
                elif alone_since_s is None:
                    alone_since_s = now_s
                elif now_s - alone_since_s >= self._nobody_under_way_s:
                    raise self._waited(self._nobody_under_way_s, one)
                with anyio.move_on_after(min(LOOK_AGAIN_S, self._nobody_under_way_s)):
                    await one.turn.wait()
                    alone_since_s = None
                one.turn = anyio.Event()
        finally:
            line.remove(one)
            if not line:
                self._lines.pop(one.account, None)
            one.account.waiting -= 1
            self.freed()

    async def _room_made(self, one: _Waiter) -> bool:
        """Have idle sessions moved out, or else the session of a call that came later and waits, too."""
        if await self.make_room(one.needed_bytes, one.account):
            return True
        own_is_full = not one.account.has_room(one.needed_bytes)
        waiting = [other for line in self._lines.values() for other in line if other.rank > one.rank]
        for other in sorted(waiting, key=lambda waiter: waiter.rank, reverse=True):
            if other.aside is None or (own_is_full and other.account is not one.account):
                continue
            if self._is_called(other) or not self._could_fit(other.aside.most_bytes, other.account):
                continue
            try:
                if await other.aside.step(partial(self._is_called, other)):
                    return True
            except SeraiError as error:
                # As for idle sessions: whoever asks for memory isn't the one to be told of another's trouble.
                log.warning("a session that waits could not be moved out of memory: %s", error)
        return False

    def _could_fit(self, needed_bytes: int, account: Account) -> bool:
        """Whether so much could be had alone."""
        try:
            self.check(needed_bytes, account)
        except OutOfBudget:
            return False
        return True

    def _is_called(self, one: _Waiter) -> bool:
        """Whether it waits no more."""
        return one not in self._lines.get(one.account, ())

    async def make_room(self, needed_bytes: int, account: Account) -> bool:
        """Have idle sessions moved out: the namespace's own if its quota is what is full; whether any was."""
        own = account.free_bytes
        if own is not None and own < needed_bytes:
            return await self.reclaim(needed_bytes - own, account.namespace)
        return await self.reclaim(needed_bytes - (self.free_bytes or 0), None)

    def _check_hope(self, one: _Waiter) -> None:
        """Raise for a generation under way when nobody else is whose end would free memory: it would wait for ever."""
        if not one.going_on or not self._is_alone(one):
            return
        account = one.account
        if not account.has_room(one.needed_bytes):
            account.check_bytes(one.needed_bytes, account.live_bytes)
        else:
            free = None if account.is_tenant else self.free_bytes or 0
            raise OutOfBudget(what="going on", needed_bytes=one.needed_bytes, free_bytes=free)

    def _is_alone(self, one: _Waiter) -> bool:
        """Whether there is no call whose end would give back what it waits for: its own quota's bytes, or anybody's."""
        if not one.account.has_room(one.needed_bytes):
            return one.account.reserved_bytes == 0
        return not self._reservations

    def _waited(self, waited_s: float, one: _Waiter) -> WaitedTooLong:
        account, free = one.account, self.free_bytes
        if account.is_tenant:  # what is free of the budget says what others hold
            free = None if account.has_room(one.needed_bytes) else account.free_bytes
        free_bytes = None if free is None else max(free, 0)
        return WaitedTooLong(waited_s=waited_s, needed_bytes=one.needed_bytes, free_bytes=free_bytes)

    def freed(self) -> None:
        """Memory or a place became free, or a quota changed: the first of each line looks again."""
        for line in self._lines.values():
            line[0].turn.set()

    def end(self, reservation: Reservation) -> None:
        if not reservation.is_over:
            reservation.is_over = True
            self._reservations.discard(reservation)
            reservation.account.reserved_bytes -= reservation.bytes
            self.reserved_bytes -= reservation.bytes
        self.freed()

    def _anybody_before(self, one: _Waiter) -> bool:
        """Whether it must let somebody go first: of its own namespace whoever has waited longer, of another whoever has
        and waits for the budget, not for the quota of its own. What waits for its own quota lets nobody wait."""
        line = self._lines.get(one.account)
        if line and line[0] is not one and line[0].rank < one.rank:
            return True
        if not one.account.has_room(one.needed_bytes):
            return False
        return any(first.rank < one.rank for first in self._firsts() if first.account.has_room(first.needed_bytes))

    def _firsts(self) -> Iterator[_Waiter]:
        return (line[0] for line in self._lines.values())

    def _fits(self, one: _Waiter) -> bool:
        return self.is_free(one.needed_bytes, one.account)

    def is_free(self, needed_bytes: int, account: Account) -> bool:
        """Whether budget and quota leave so much at this moment."""
        free = self.free_bytes
        return account.has_room(needed_bytes) and (free is None or needed_bytes <= free)

    def _reserve(self, size: int, account: Account) -> Reservation:
        reservation = Reservation(self, account, size)
        self._reservations.add(reservation)
        return reservation


async def _nothing_to_reclaim(_: int, __: str | None) -> bool:
    return False
