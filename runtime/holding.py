"""A session's state wherever it is: hot in memory, or cold in the store under a node to be brought back from.

One holding has one owner, its session. Moving in and out is guarded by a lock of its own, so that a session can be
asked for while it is being moved and simply waits for the move.
"""

from collections.abc import Callable

import anyio
import anyio.to_thread

from serai.runtime.admission import Admission
from serai.runtime.driver import Driver
from serai.runtime.journal import Journal, Record, Stored
from serai.runtime.residency import Tier
from serai.runtime.state import State, StatePool, fill, session_bytes


class Keeper:
    """Brings states in and out of memory for all sessions of one runtime."""

    def __init__(self, driver: Driver, pool: StatePool, admission: Admission, journal: Journal) -> None:
        self._driver = driver
        self._pool = pool
        self._admission = admission
        self._journal = journal
        self.demotions = 0
        self.promotions = 0

    async def find(self, name: str, *, as_is: bool = False) -> Stored:
        return await self._journal.find(name, as_is=as_is)

    async def rebuild(self, stored: Stored) -> State:
        """The state at a stored point: its nearest snapshot, and a replay of the token ids after that."""
        before = await self._restore(stored)
        missing = stored.timeline.ids(before.position)
        if len(missing) == 0:
            return before
        try:
            state, _ = await self._driver.advance(stored.node.session_id, before, missing, prefill=True)
        finally:
            before.release()
        return state

    async def _restore(self, stored: Stored) -> State:
        snapshot = stored.snapshot
        empty = self._pool.empty()
        if snapshot is None or snapshot.position == 0:
            return empty
        size = session_bytes(self._pool.layout, snapshot.position)
        reservation = await self._admission.enter(size, held_bytes=0, going_on=False)
        try:
            draft = self._pool.draft(empty, snapshot.position, with_logits=True)
        finally:
            empty.release()
            reservation.close()
        try:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(fill, draft, self._pool.layout, snapshot)
        except BaseException:
            draft.abandon()
            raise
        return draft.commit()


class Holding:
    """The state of one session."""

    def __init__(self, keeper: Keeper, state: State | None, position: int) -> None:
        self._keeper = keeper
        self._state = state
        self._moving = anyio.Lock()
        self.position = position

    @property
    def tier(self) -> Tier:
        return Tier.COLD if self._state is None else Tier.HOT

    @property
    def state(self) -> State | None:
        """The live state; None while it is cold."""
        return self._state

    def become(self, state: State) -> None:
        """Hold the next state, given by reference, and let go of the one before."""
        before, self._state = self._state, state
        self.position = state.position
        if before is not None:
            before.release()

    def fork(self) -> "Holding":
        """A second holding of the same state: nothing is copied, and a cold one stays cold."""
        return Holding(self._keeper, None if self._state is None else self._state.retain(), self.position)

    async def heat(self, record: Record) -> State:
        """The live state, brought back first if it is cold. The holding keeps it; retain it to keep it longer."""
        async with self._moving:
            if self._state is None:
                await record.flush()
                stored = await self._keeper.find(record.point())
                self._state = await self._keeper.rebuild(stored)
                self._keeper.promotions += 1
            return self._state

    async def cool(self, record: Record, in_use: Callable[[], bool]) -> bool:
        """Store the state and free its memory; False when somebody came to use it meanwhile, and then it stays."""
        async with self._moving:
            state = self._state
            if state is None or in_use():
                return False
            await record.save(state, "demote")
            if in_use() or self._state is not state:
                return False
            self._state = None
            state.release()
            self._keeper.demotions += 1
            return True

    def release(self) -> None:
        """Free what is held; the holding is not used after."""
        if self._state is not None:
            self._state.release()
            self._state = None
