"""A session's state wherever it is: hot in memory, or cold in the store under a node to be brought back from.

One holding has one owner, its session. Moving in and out is guarded by a lock of its own, so that a session can be
asked for while it is being moved and simply waits for the move.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from serai.runtime.driver import Driver
from serai.runtime.errors import SeraiError, ShuttingDown
from serai.runtime.memory.admission import Admission, Reservation
from serai.runtime.memory.ledger import held_bytes
from serai.runtime.memory.residency import Tier
from serai.runtime.sessions.journal import Journal, Stored
from serai.runtime.sessions.prefixes import Kept, Prefixes
from serai.runtime.sessions.record import Record
from serai.runtime.sessions.saver import Saver
from serai.runtime.sessions.starts import Accept, Start
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State, StatePool, session_bytes, snapshot_of

log = logging.getLogger(__name__)


class Keeper:
    """Brings states in and out of memory for all sessions of one runtime."""

    def __init__(
        self,
        driver: Driver,
        pool: StatePool,
        admission: Admission,
        journal: Journal,
        prefixes: Prefixes,
        saver: Saver,
        *,
        save_after_tokens: int,
    ) -> None:
        self._driver = driver
        self._pool = pool
        self._admission = admission
        self._journal = journal
        self._prefixes = prefixes
        self._saver = saver
        self._save_after_tokens = save_after_tokens
        self.demotions = 0
        self.promotions = 0

    async def find(self, name: str, accept: Accept = Accept.OWN, *, take_back: bool = False) -> Stored:
        return await self._journal.find(name, accept, take_back=take_back)

    async def rebuild(self, stored: Stored, reservation: Reservation | None = None) -> tuple[State, int]:
        """The state at a stored point: its nearest snapshot, and a replay of the token ids after that.

        With it, how many those were. The `reservation` holds what it takes, if there is one. An exact state for which
        many were replayed, or one for want of a snapshot that is of use, is written in the background.
        """
        while (start := stored.way.start) is not None:
            before = await self._restore(start, stored.node.namespace, reservation)
            if before is not None:
                break
            stored = replace(stored, way=await self._journal.way_to(stored.node.id, stored.accept))
        else:
            before = self._pool.empty(stored.node.namespace)
        state = await self._replay(before, stored.timeline, stored.node.session_id, reservation)
        replayed = stored.replay_tokens
        node = None if state.inexact else stored.worth_storing(replayed, more_than=self._save_after_tokens)
        if node is not None:
            # A branch pauses under a node of its own: the same tokens would be replayed for each who resumes here.
            self._saver.offer_replayed(node, state, stored.timeline.digest())
        return state, replayed

    async def bring_back(self, record: Record, position: int, reservation: Reservation | None = None) -> State:
        """The state of a live session, which is at `position` and at its record's last node.

        An exact session stays so: rather than go on from what was stored with loss, its token ids are replayed.
        """
        accept = Accept.OWN if record.inexact else Accept.EXACT
        start = (await self._journal.way_to(record.point(), accept)).start
        if start is not None and start.position == position:  # as it is left by a move: no token ids are needed
            state = await self._restore(start, record.namespace, reservation)
            if state is not None:
                return state
        state, _ = await self.rebuild(await self.find(record.point(), accept), reservation)
        if record.inexact and not state.inexact and position > 0:
            log.warning(
                "the inexact state at node %s can't be read any more: the session goes on with the exact one, replayed "
                "from its token ids, and what follows may differ from what would have",
                record.point(),
            )
        return state

    async def at(
        self, timeline: Timeline, namespace: str, workflow: str, *, exact: bool, beside: State | None = None
    ) -> State:
        """The state at the end of a timeline: the deepest one known on the way (for an exact one), then a replay.

        `beside` is held meanwhile and can't be moved out: `OutOfBudget` when the two could not be held even alone.
        """
        before = await self.known(namespace, timeline.ids(), above=0) if exact else None
        before = before or self._pool.empty(namespace)
        if beside is not None and before.position < len(timeline):
            try:
                more = self._pool.growth_bytes(before.position, len(timeline) - before.position)
                self._admission.check(held_bytes(self._pool, beside, before) + more, before.account)
            except BaseException:
                before.release()
                raise
        return await self._replay(before, timeline, workflow)

    async def hold_at(
        self, timeline: Timeline, namespace: str, workflow: str, *, exact: bool, beside: State | None = None
    ) -> "Holding":
        """A holding of the state at the end of a timeline, as `at` gives it."""
        state = await self.at(timeline, namespace, workflow, exact=exact, beside=beside)
        return Holding(self, state, state.position)

    def replay_tokens(self, timeline: Timeline, namespace: str, *, exact: bool) -> int:
        """How many tokens `at` would have to compute again."""
        found = self._prefixes.deepest(namespace, timeline.ids(), above=0) if exact else None
        return len(timeline) - (0 if found is None else found.position)

    async def nearest(self, namespace: str, ids: NDArray[np.int32], *, above: int) -> Kept | None:
        """The deepest known prefix of `ids` beyond position `above`, in memory or in the store.

        Somebody who is computing a longer one is waited for, so that the same tokens are never computed twice at once.
        """
        while True:
            found = self._prefixes.deepest(namespace, ids, above=above)
            reached = above if found is None else found.position
            computing = self._prefixes.being_computed(namespace, ids, above=reached)
            if computing is None:
                return found
            await computing.wait()

    async def known(self, namespace: str, ids: NDArray[np.int32], *, above: int) -> State | None:
        """The state at the `nearest` known prefix that can be used; the caller owns what it is given."""
        while (found := await self.nearest(namespace, ids, above=above)) is not None:
            if found.state is not None:
                return found.state.retain()
            if (state := await self.from_store(found)) is not None:
                return state
        return None

    async def from_store(self, entry: Kept, reservation: Reservation | None = None) -> State | None:
        """The state of an entry whose snapshot is stored; None when it can't be used, and then it is forgotten."""
        if entry.node_id is None:
            return None
        start = await self._journal.own_start(entry.node_id)
        state = None if start is None else await self._restore(start, entry.namespace, reservation)
        if state is None:
            self._prefixes.lost(entry)
            return None
        self._prefixes.keep(entry.namespace, entry.digest, state)
        return state

    async def distrust(self, state: State, error: SeraiError) -> None:
        """The first step after a state that came from the store has failed: whoever holds it builds it anew.

        Only the request that met the failure fails. The snapshot is kept for inspection, and what is before it in the
        store, or nothing, is what the token ids are replayed from: whoever tries again never meets it again.
        """
        if state.source is None or state.is_spoiled:
            return
        state.is_spoiled = True
        self._prefixes.distrust(state, state.source)
        await self._journal.set_aside(state.source, f"the first step after it failed ({error})")

    async def catch_up(self, before: State, ids: list[int]) -> State:
        """The state after a few more tokens of the same timeline; `before` stays the caller's."""
        state, _ = await self._driver.advance("", before, np.array(ids, np.int32))
        return state

    async def _replay(
        self, before: State, timeline: Timeline, workflow: str, reservation: Reservation | None = None
    ) -> State:
        missing = timeline.ids(before.position)
        if len(missing) == 0:
            return before
        try:
            state, _ = await self._driver.advance(workflow, before, missing, prefill=True, reservation=reservation)
        finally:
            with nullcontext() if reservation is None else reservation.counting():
                before.release()
        return state

    async def _restore(self, start: Start, namespace: str, reservation: Reservation | None = None) -> State | None:
        """The state a snapshot holds, read straight into the pool's memory; None if it can't be used after all."""
        empty = self._pool.empty(namespace)
        if start.position == 0:
            return empty
        if reservation is None:
            size = session_bytes(self._pool.layout, start.position)
            reservation = await self._admission.enter(size, account=empty.account, held_bytes=0, going_on=False)
            try:
                return await self._restore(start, namespace, reservation)
            finally:
                reservation.close()
        with reservation.counting():
            state = self._pool.draft(empty, start.position, with_logits=True).commit()
        empty.release()
        is_whole = False
        try:
            is_whole = await self._journal.load(start, snapshot_of(self._pool.layout, state))
        finally:
            if not is_whole:
                with reservation.counting():
                    state.release()
        if not is_whole:
            return None
        state.source, state.inexact = start.node_id, start.inexact
        return state


class Holding:
    """The state of one session."""

    def __init__(self, keeper: Keeper, state: State | None, position: int, *, replay_tokens: int = 0) -> None:
        self.replay_tokens = replay_tokens  # to be read once more before it is hot
        self._keeper = keeper
        self._state = state
        self._lag: list[int] = []
        self._moving = anyio.Lock()
        self._released = False
        self.position = position

    @property
    def tier(self) -> Tier:
        return Tier.COLD if self._state is None else Tier.HOT

    @property
    def held(self) -> State | None:
        """What is in memory, up to date or not."""
        return self._state

    @property
    def state(self) -> State | None:
        """The live state; None while it is cold, or behind the tokens that were handed out."""
        return None if self._lag else self._state

    def become(self, state: State) -> None:
        """Hold the next state, given by reference, and let go of the one before."""
        if self._released:
            state.release()
            return
        before, self._state = self._state, state
        self._lag.clear()
        self.position = state.position
        if before is not None:
            before.release()

    @property
    def lags(self) -> bool:
        """Whether the live state is behind what is held."""
        return bool(self._lag)

    def lag(self, token: int) -> None:
        """The next token is part of what is held, though the state does not hold it yet: `heat` reads it."""
        self._lag.append(token)
        self.position += 1

    def fork(self) -> "Holding":
        """A second holding of the same state: nothing is copied, and a cold one stays cold."""
        other = Holding(self._keeper, None if self._state is None else self._state.retain(), self.position)
        other._lag, other.replay_tokens = self._lag.copy(), self.replay_tokens
        return other

    async def heat(self, record: Record, reservation: Reservation | None = None) -> State:
        """The live state, brought back first if it is cold, within the `reservation` if one is given. The holding keeps
        it; retain it to keep it longer."""
        state = self.state
        if state is not None and not state.is_spoiled and not self._moving.locked():
            await anyio.lowlevel.checkpoint_if_cancelled()
            return state  # as for nearly every token; to take the lock would cost a turn of the event loop
        async with self._moving:
            with nullcontext() if reservation is None else reservation.counting():
                self._let_go_if_spoiled()
            if self._state is None:
                await record.flush()
                self._arrived(await self._keeper.bring_back(record, self.position, reservation))
                self._keeper.promotions += 1
            await self._catch_up()
            return self._live()

    async def settle(self) -> None:
        """Let a move that is under way end, and a live state read what it is behind.

        Who reserves memory does so first: a move into memory may wait for just that, and would be waited for.
        """
        async with self._moving:
            self._let_go_if_spoiled()
            if self._state is not None:
                await self._catch_up()

    async def _catch_up(self) -> None:
        if self._lag:
            self._arrived(await self._keeper.catch_up(self._live(), self._lag))

    def _arrived(self, state: State) -> None:
        """What was waited for is here, and nobody may want it any more."""
        self.replay_tokens = 0
        self.become(state)
        if self._released:
            raise ShuttingDown

    def _live(self) -> State:
        if self._state is None:
            raise AssertionError("a holding that was heated has a state")
        return self._state

    async def cool(self, record: Record, in_use: Callable[[], bool]) -> bool:
        """Store the state and free its memory; False, and then it stays, when somebody came to use it meanwhile, or no
        node is where it is."""
        if in_use() or self._state is None or self._state.fixed is None:
            return False  # whoever uses it or has it read may hold the lock, and wait for the memory this is to free
        async with self._moving:
            state = self._state
            if state is None or in_use() or not record.reaches(state.position):
                return False
            if self._lag:
                record.divide()
            await record.flush()
            if in_use() or self._state is not state:
                return False
            if not state.is_spoiled:
                await record.save(state, "demote")
            if in_use() or self._state is not state:
                return False
            self.replay_tokens = self.position - state.position
            self._let_go()
            self._keeper.demotions += 1
            return True

    def release(self) -> None:
        """Free what is held, and whatever a call that is still under way comes back with."""
        self._released = True
        self._let_go()

    def _let_go_if_spoiled(self) -> None:
        if self._state is not None and self._state.is_spoiled:
            self._let_go()

    def _let_go(self) -> None:
        if self._state is not None:
            self._state.release()
            self._state = None
            self._lag.clear()
