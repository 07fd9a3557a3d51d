"""What a session is to the runtime: used by one call at a time, hot in memory or cold in the store, open or ended.

`Session` adds what it is to its user, a timeline.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from serai.runtime.errors import BadParameter, SessionBusy, SessionClosed
from serai.runtime.memory.admission import Reservation
from serai.runtime.memory.beside import ids_bytes
from serai.runtime.memory.residency import Idle, Tier
from serai.runtime.services import Services
from serai.runtime.sessions.events import EventKind
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.record import Record
from serai.runtime.state import State, session_bytes

if TYPE_CHECKING:
    from serai.runtime.sessions.generation import Generation

SLOW_READER_S = 1.0
"""A generation whose reader has taken nothing for so long is at rest: its session may be moved out of memory."""


class Life(Enum):
    """Whether a session object can be used."""

    OPEN = "open"
    CLOSED = "closed"
    PAUSED = "paused"
    MOVED = "moved"


class LiveSession:
    """Who uses a session, where its state is, and its end."""

    def __init__(
        self, services: Services, *, session_id: str, holding: Holding, namespace: str, label: str, workflow: str | None
    ) -> None:
        self.id = session_id
        self.namespace = namespace
        self.label = label
        self.workflow = session_id if workflow is None else workflow
        self.record = Record(services.journal, session_id, namespace=namespace, label=label)
        self.account = services.pool.accounts.of(namespace)
        self.account.sessions += 1
        self._counted = True
        self._beside_bytes = 0
        self._services = services
        self._holding = holding
        self._life = Life.OPEN
        self._doing: str | None = None
        self._reader_is_away = False
        self._used_s = services.now_s()
        self._returns_at_s: float | None = None
        self._count_beside(self.position)

    @property
    def position(self) -> int:
        """Tokens read so far."""
        return self._holding.position

    @property
    def inexact(self) -> bool:
        """Whether it comes from a state that was stored with loss or by another build: nothing of it is reused."""
        return self.record.inexact

    @property
    def tier(self) -> Tier:
        """Where the state is: hot in memory, or cold in the store until it is used again."""
        return self._holding.tier

    @property
    def held(self) -> State | None:
        """The state this session holds in memory, if any; it may be behind the tokens that were handed out."""
        return self._holding.held

    @property
    def doing(self) -> str | None:
        """The call that is using the session now."""
        return self._doing

    @property
    def is_open(self) -> bool:
        return self._life is Life.OPEN

    @property
    def is_moved(self) -> bool:
        """Whether it is not owned here any more, or perhaps not."""
        return self._life is Life.MOVED

    def stand_by(self) -> None:
        """Count no longer toward its namespace's quota of sessions: it is kept only so that others begin where it
        stands, and whoever keeps it bounds how many those are. What it holds in memory counts as before."""
        if self._counted and self._life is Life.OPEN:
            self._counted = False
            self.account.sessions -= 1

    # used by one call at a time

    @contextmanager
    def use(self, doing: str) -> Iterator[None]:
        """Hold the session for one call; raises `SessionBusy` or `SessionClosed`."""
        self.claim(doing)
        try:
            yield
        finally:
            self.unclaim()

    @asynccontextmanager
    async def use_between_tokens(self, doing: str) -> AsyncIterator[None]:
        """As `use`, but a stream that a reader has open is no hindrance: it stands between two tokens meanwhile."""
        self._check_open()
        while (reading := self._holding_generation()) is not None:
            async with reading.held() as stands:
                if stands:
                    before, self._doing = self._doing, doing
                    try:
                        yield
                    finally:
                        self._doing = before if self.is_open else None
                    return
        with self.use(doing):
            yield

    def _holding_generation(self) -> "Generation | None":
        return next((one for one in self._generations() if one.holds_session), None)

    def claim(self, doing: str) -> None:
        """Begin to hold the session until `unclaim`."""
        self._check_open()
        if self._doing is not None:
            raise SessionBusy(session_id=self.id, doing=self._doing)
        self._doing = doing
        self._used_s = self._services.now_s()

    def reader_is_away(self, away: bool) -> None:
        """Whether the generation that holds the session waits for its reader."""
        self._reader_is_away = away

    @property
    def _is_in_use(self) -> bool:
        return self._doing is not None and not self._reader_is_away

    def unclaim(self) -> None:
        self._doing = None
        self._reader_is_away = False
        self._used_s = self._services.now_s()
        self._services.admission.freed()  # idle now, it may be moved out for whoever waits for memory

    def dropped(self) -> None:
        """As `unclaim`, for a reader who vanished: Python may say so when no event loop runs, so no clock is read."""
        self._doing = None
        self._reader_is_away = False
        self._services.admission.freed()

    # in memory or in the store

    async def hot(self, reservation: Reservation | None = None) -> State:
        """The live state, brought back from the store first if need be, within the `reservation` if one is given. For
        whoever holds the session."""
        self._check_open()
        was = self.tier
        state = await self._holding.heat(self.record, reservation)
        if was is Tier.COLD:
            self._services.events.tell(EventKind.PROMOTED, self.id, self.namespace)
        return state

    def needed_bytes(self, tokens: int) -> int:
        """What must be free for the state to be in memory, and beside it token ids up to position `tokens`."""
        ids = ids_bytes(tokens) - ids_bytes(self.position)
        if self.held is not None:
            return ids
        pool, again = self._services.pool, self._holding.replay_tokens
        start = self.position - again
        return ids + session_bytes(pool.layout, start) + (pool.growth_bytes(start, again) if again else 0)

    def idle(self, now_s: float) -> Idle | None:
        """What moving this session out of memory would bring; None while it is in use, cold or empty."""
        state = self._holding.held
        if self._is_in_use or state is None or state.fixed is None or not self.record.reaches(state.position):
            return None
        if self._doing is not None and now_s - self._used_s < SLOW_READER_S:
            return None
        own, _ = self._services.pool.held_bytes(state)
        return Idle(self.id, own, now_s - self._used_s, self._returns_in_s(now_s))

    async def demote(self) -> bool:
        """Move the state to the store; the next call brings it back. False when it is in use (or cold already)."""
        return await self._cool(lambda: self._is_in_use or not self.is_open)

    async def step_aside(self, is_called: Callable[[], bool]) -> bool:
        """As `demote`, while the call that holds the session waits for memory, until it `is_called`."""
        return self._services.journal.is_durable and await self._cool(lambda: is_called() or not self.is_open)

    async def _cool(self, in_use: Callable[[], bool]) -> bool:
        moved = await self._holding.cool(self.record, in_use)
        if moved:
            for generation in self._generations():
                generation.step_back()  # before anybody can ask for the next token
            self._services.events.tell(EventKind.DEMOTED, self.id, self.namespace)
        return moved

    def _generations(self) -> "Iterator[Generation]":
        """Those that read this session, or did and are kept."""
        return (generation for generation in tuple(self._services.reading) if generation.reads(self))

    @asynccontextmanager
    async def waiting_for_tool(self, *, expected_s: float) -> AsyncIterator[None]:
        """Say that nothing is asked of the session for about `expected_s` seconds.

        When memory is short it is among the first to be moved out, and it is brought back shortly before it is
        expected, or when the block ends.
        """
        self._check_open()
        if not expected_s >= 0:
            raise BadParameter(f"expected_s is {expected_s!r}, but must be a number of seconds, 0 or more")
        self._returns_at_s = self._services.now_s() + expected_s
        self._services.returning.expect(self, expected_s)
        try:
            yield
        finally:
            self._returns_at_s = None
            self._used_s = self._services.now_s()
            self._services.returning.forget(self)
        await self.come_back()

    async def come_back(self) -> None:
        """Bring the state into memory if it is cold and nobody is using the session; whoever uses it then waits."""
        if self.is_open and self._doing is None and self.tier is Tier.COLD:
            await self.hot()

    def _returns_in_s(self, now_s: float) -> float | None:
        return None if self._returns_at_s is None else max(self._returns_at_s - now_s, 0.0)

    def _count_beside(self, tokens: int) -> None:
        """Have what it takes beside its state, with so many token ids, counted in the budget while it is open."""
        before = self._beside_bytes
        self._beside_bytes = self._services.session_bytes + ids_bytes(tokens) if self._life is Life.OPEN else 0
        self._services.pool.beside_bytes += self._beside_bytes - before

    # open or ended

    async def close(self) -> None:
        """Free the state. What was durable stays durable; closing twice is fine.

        When the last tokens can't be stored the session stays open, as it was; at the end of `async with` it ends.
        """
        if self._life is Life.OPEN:
            with self.use("close"):
                await self.record.flush()
            self._end(Life.CLOSED)

    async def break_off(self) -> None:
        """Close, though a call is under way: what it has handed out is made durable."""
        if self._life is Life.OPEN:
            self._end(Life.CLOSED)
            await self.record.flush()

    def forgo_states(self) -> None:
        """Write and keep none of the states it has left on its way: the session will be deleted."""
        self._services.saver.drop(self.id)

    def abandon(self) -> None:
        """End without writing anything down: what is not durable yet is lost."""
        self._end(Life.CLOSED)

    def moved(self) -> None:
        """End because the session is not owned here any more, or perhaps not."""
        self._end(Life.MOVED)

    async def _leave(self) -> None:
        # A reader who was cancelled inside the block has not closed its stream, and must hear of that and nothing else.
        try:
            if self._doing is None:
                await self.close()
            else:
                await self.break_off()
        finally:
            self.abandon()

    def _end(self, life: Life) -> None:
        if self._life is not Life.OPEN:
            return  # broken off while `pause` or `close` was writing
        self._life = life
        self.account.sessions -= self._counted
        self._count_beside(0)
        self._holding.release()
        for generation in self._generations():  # a reader who keeps one and never asks again
            generation.forget_batch()
        self._services.admission.freed()  # its token ids were counted, too, if it was cold
        del self._services.live[self.id]
        if all(other.workflow != self.workflow for other in self._services.live.values()):
            self._services.driver.forget(self.workflow)
        kind = EventKind.PAUSED if life is Life.PAUSED else EventKind.CLOSED
        self._services.events.tell(kind, self.id, self.namespace, f"at position {self.position}")

    def _check_open(self) -> None:
        if self._life is not Life.OPEN:
            raise SessionClosed(session_id=self.id, how=self._life.value)
