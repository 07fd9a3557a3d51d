"""A session: one timeline of tokens with a live state, that can be appended to, continued, forked and paused."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import check_text, new_id
from serai.checkpoints.nodes import NodeKind
from serai.runtime.errors import (
    BadParameter,
    NothingToContinue,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
)
from serai.runtime.memory.residency import Idle, Tier
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.services import Services
from serai.runtime.sessions.contents import Appended, token_ids
from serai.runtime.sessions.events import EventKind
from serai.runtime.sessions.generation import Generation
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.journal import Point
from serai.runtime.sessions.rate import Rate
from serai.runtime.sessions.trail import Trail
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State
from serai.runtime.status import SessionStatus


class Life(Enum):
    """Whether a session object can be used."""

    OPEN = "open"
    CLOSED = "closed"
    PAUSED = "paused"


class Session:
    """One timeline. Made by `Runtime.session`, `Runtime.resume` and `Session.fork`; never directly.

    One call at a time: a second one meanwhile raises `SessionBusy`. Forking is always allowed and takes the last
    token boundary. After `close` or `pause` every call raises `SessionClosed`.
    """

    def __init__(
        self,
        services: Services,
        *,
        session_id: str,
        timeline: Timeline,
        holding: Holding,
        namespace: str,
        label: str,
        workflow: str | None = None,
        parent: str | None = None,
        inexact: bool = False,
        append_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.id = session_id
        self.namespace = namespace
        self.label = label
        self.workflow = session_id if workflow is None else workflow
        self.parent = parent
        self.inexact = inexact
        self.append_metadata: Mapping[str, Any] = append_metadata or {}
        self.record = services.journal.open_record(session_id, namespace=namespace, label=label)
        self._services = services
        self._timeline = timeline
        self._holding = holding
        self._life = Life.OPEN
        self._doing: str | None = None
        self._used_s = services.now_s()
        self._returns_at_s: float | None = None
        self._rate = Rate()
        self._trail = Trail(services, session_id=session_id, namespace=namespace, workflow=self.workflow)
        services.live[session_id] = self
        services.events.tell(EventKind.OPENED, session_id, label)

    @property
    def position(self) -> int:
        """Tokens read so far."""
        return self._holding.position

    @property
    def turn(self) -> int:
        """The present turn's index, from 0."""
        return self._timeline.turn.index

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
    def timeline(self) -> Timeline:
        return self._timeline

    def tokens(self) -> NDArray[np.int32]:
        """All token ids read so far, int32 `[position]`."""
        return self._timeline.ids()

    def text(self) -> str:
        """The timeline as text; control tokens are left out."""
        return self._services.need_tokenizer().decode(self._timeline.ids().tolist())

    async def logits(self) -> NDArray[np.float32]:
        """A copy of the next-token logits, float32 `[vocab_size]`. Raises `NothingToContinue` at position 0."""
        with self.use("logits"):
            state = await self.hot()
            if state.logits is None:
                raise NothingToContinue(session_id=self.id)
            copy: NDArray[np.float32] = state.logits.array.copy()
            return copy

    async def hot(self) -> State:
        """The live state, brought back from the store first if need be. For whoever holds the session."""
        self._check_open()
        was = self.tier
        state = await self._holding.heat(self.record)
        if was is Tier.COLD:
            self._services.events.tell(EventKind.PROMOTED, self.id)
        return state

    async def append(
        self, content: str | Sequence[int] | NDArray[np.integer], *, metadata: Mapping[str, Any] | None = None
    ) -> Appended:
        """Read text or token ids. Their ids are durable when this returns (with a store), and `metadata`, a JSON
        object of the caller's, with them: `append_metadata` gives it back, after a resume too.

        All or nothing: on an error or cancellation the session is what it was before. Raises `PromptTooLong` before
        any work.
        """
        with self.use("append"):
            ids = await token_ids(content, self._services.tokenizer, self._services.vocab_size)
            if len(ids) == 0:
                return Appended(0, 0, 0, self.position)
            if self.position + len(ids) > self._services.max_positions:
                raise PromptTooLong(
                    position=self.position, added_tokens=len(ids), limit_tokens=self._services.max_positions
                )
            first, own = self.position == 0, await self.hot()
            if self._leaves_states:
                state, reused = await self._trail.read(own, self._timeline, ids)
            else:
                state, _ = await self._services.driver.advance(self.workflow, own, ids, prefill=True)
                reused = 0
            async with self._undone_unless_durable(own):
                self._holding.become(state)
                self._timeline.appended(ids)
                self.append_metadata = dict(metadata or {})
                self.record.appended(ids, self._timeline, self.append_metadata)
                await self.record.flush()
            self._rate.count(len(ids), self._services.now_s())
            self._services.events.tell(EventKind.APPENDED, self.id, f"{len(ids)} tokens")
            self._leave_state(first=first)
            return Appended(len(ids), len(ids) - reused, reused, self.position)

    @asynccontextmanager
    async def _undone_unless_durable(self, own: State) -> AsyncIterator[None]:
        """Whoever is told that an append failed will say it again: then it must not be there twice.

        The tokens go in before they are written, so that a fork taken meanwhile has them in all its parts or in none.
        """
        before, metadata = own.retain(), self.append_metadata
        timeline = self._timeline.at(self.position, branch=self._timeline.branch)
        try:
            yield
        except BaseException:
            timeline.forks = self._timeline.forks
            self._timeline, self.append_metadata = timeline, metadata
            self._holding.become(before.retain())
            self._trail.cut(len(timeline))
            self.record.take_back(timeline)
            raise
        finally:
            before.release()

    def generate(self, params: SamplingParams | None = None) -> Generation:
        """Continue the timeline: an asynchronous iterator of `Token`.

        Nothing runs ahead of the reader: leaving the iteration at any point leaves a session that holds exactly the
        tokens that were handed out. Raises `NothingToContinue` at position 0.
        """
        self._check_open()
        if self.position == 0:
            raise NothingToContinue(session_id=self.id)
        return Generation(self, self._services, params or SamplingParams())

    def rename(self, label: str) -> None:
        """Call the session something else from now on. Raises `NameInvalid` for what can't be a label."""
        check_text(label, "label", may_be_empty=True)
        self.label = label
        self.record.label_is(label)

    async def fork(
        self, *, turn: int | None = None, position: int | None = None, label: str | None = None
    ) -> "Session":
        """A second timeline, from this token boundary on, or from the end of a turn, or from any position.

        From here it copies no state and is allowed while a call is under way. From an earlier point it starts at the
        nearest state known before it and reads the tokens between once more: `replay_tokens` says how many those are.
        Raises `PositionUnavailable` for a point this timeline doesn't have.
        """
        self._check_open()
        check_text(label or "", "label", may_be_empty=True)
        where = self._timeline.position_of(turn, position)
        if where == self.position:
            timeline, holding = self._timeline.fork(), self._holding.fork()
        else:
            timeline = self._timeline.fork(where)
            holding = await self._services.keeper.hold_at(
                timeline, self.namespace, self.workflow, exact=not self.inexact
            )
            if not self.is_open:  # the runtime closed meanwhile, and would not know of the child
                holding.release()
                self._check_open()
        child = Session(
            self._services,
            session_id=new_id(),
            timeline=timeline,
            holding=holding,
            namespace=self.namespace,
            label=self.label if label is None else label,
            workflow=self.workflow,
            parent=self.id,
            inexact=self.inexact,
            append_metadata=self.append_metadata,
        )
        child.record.branched_from(self.record)
        child.record.cut(timeline, NodeKind.FORK)
        child.append_metadata = child.record.append_metadata()
        self._services.events.tell(EventKind.FORKED, self.id, child.id)
        return child

    def replay_tokens(self, *, turn: int | None = None, position: int | None = None) -> int:
        """How many tokens a fork or rewind to that point would have to read once more."""
        self._check_open()
        where = self._timeline.position_of(turn, position)
        if where == self.position:
            return 0
        timeline = self._timeline.at(where, branch=self._timeline.branch)
        return self._services.keeper.replay_tokens(timeline, self.namespace, exact=not self.inexact)

    async def rewind(self, *, turn: int | None = None, position: int | None = None) -> None:
        """Go back to the end of a turn, or to any position; what came after stays in the store as a branch.

        All or nothing, at the cost that `replay_tokens` says. Raises `PositionUnavailable`.
        """
        with self.use("rewind"):
            where = self._timeline.position_of(turn, position)
            if where == self.position:
                return
            timeline = self._timeline.at(where, branch=self._timeline.branch)
            timeline.forks = self._timeline.forks
            holding = await self._services.keeper.hold_at(
                timeline, self.namespace, self.workflow, exact=not self.inexact
            )
            if not self.is_open:  # the runtime closed meanwhile
                holding.release()
                self._check_open()
            before, self._holding = self._holding, holding
            before.release()
            self._timeline = timeline
            self._trail.cut(where)
            self.record.cut(timeline, NodeKind.REWIND)
            self.append_metadata = self.record.append_metadata()
            await self.record.flush()
        self._services.events.tell(EventKind.REWOUND, self.id, f"to position {where}")

    async def edit(self, turn: int, content: str | Sequence[int] | NDArray[np.integer]) -> Appended:
        """Say something else in an earlier turn: go back to where it began and append `content` instead."""
        start = 0 if turn == 0 else self._timeline.end_of(turn - 1)
        if turn > self.turn or turn < 0:
            self._timeline.end_of(turn)  # raises, naming the turns there are
        await self.rewind(position=start)
        return await self.append(content)

    async def children(self) -> tuple[str, ...]:
        """The ids of the nodes that continue from this session's last node, in this session or another."""
        self._check_open()
        await self.record.flush()
        return await self._services.journal.children(self.record.point())

    @property
    def _leaves_states(self) -> bool:
        return self._services.policy.reuse and not self.inexact

    def _leave_state(self, *, first: bool = False) -> None:
        state = self._holding.state
        if self._leaves_states and state is not None and state.fixed is not None:
            self._trail.leave(state, self._timeline.digest(), self.record.nodes()[-1], first=first)

    async def fork_many(self, count: int) -> list["Session"]:
        """`count` forks, as `fork`."""
        if count < 1:
            raise BadParameter(f"fork_many makes at least 1 fork, not {count}")
        return [await self.fork() for _ in range(count)]

    async def pause(self) -> Point:
        """Make the whole state durable, free its memory and give back the point to resume from.

        When the state can't be stored the session stays open, as it was.
        """
        with self.use("pause"):
            self.record.settled(self._timeline)
            point = await self.record.save(await self.hot(), "pause")
        self._end(Life.PAUSED)
        return point

    async def close(self) -> None:
        """Free the state. What was durable stays durable; closing twice is fine.

        When the last tokens can't be stored the session stays open, as it was; at the end of `async with` it ends.
        """
        if self._life is Life.OPEN:
            with self.use("close"):
                await self.record.flush()
            self._end(Life.CLOSED)

    async def __aenter__(self) -> "Session":
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        # A reader who was cancelled inside the block has not closed its stream, and must hear of that and nothing else.
        try:
            if self._doing is None:
                await self.close()
            else:
                await self.break_off()
        finally:
            self.abandon()

    @contextmanager
    def use(self, doing: str) -> Iterator[None]:
        """Hold the session for one call; raises `SessionBusy` or `SessionClosed`."""
        self.claim(doing)
        try:
            yield
        finally:
            self.unclaim()

    def claim(self, doing: str) -> None:
        """Begin to hold the session until `unclaim`."""
        self._check_open()
        if self._doing is not None:
            raise SessionBusy(session_id=self.id, doing=self._doing)
        self._doing = doing
        self._used_s = self._services.now_s()

    def unclaim(self) -> None:
        self._doing = None
        self._used_s = self._services.now_s()
        self._services.admission.freed()  # idle now, it may be moved out for whoever waits for memory

    def dropped(self) -> None:
        """As `unclaim`, for a reader who vanished: Python may say so when no event loop runs, so no clock is read."""
        self._doing = None

    def lagged(self, token: int) -> None:
        """As `advanced`, when the state after the token is part of a longer one that is not taken over yet."""
        self._holding.lag(token)
        self._note(token)

    def advanced(self, state: State, token: int) -> None:
        """A generation read back the token it had drawn: `state` is the one after it."""
        self._holding.become(state)
        self._note(token)

    def _note(self, token: int) -> None:
        self._timeline.generated(token)
        self.record.generated(token, self._timeline)
        self._rate.count(1, self._services.now_s())

    def kept_positions(self) -> frozenset[int]:
        """Where on its way a state of it is kept in memory, for itself or others to start from."""
        return self._trail.kept_positions()

    def status(self, now_s: float) -> SessionStatus:
        """This session's figures."""
        own, shared = self._services.pool.held_bytes(self._holding.state)
        return SessionStatus(
            id=self.id,
            label=self.label,
            namespace=self.namespace,
            workflow=self.workflow,
            parent=self.parent,
            tier=self.tier.value,
            doing=self._doing,
            position=self.position,
            turn=self.turn,
            own_bytes=own,
            shared_bytes=shared,
            tokens_s=self._rate.per_second(now_s),
            reused_tokens=self._trail.reused_tokens,
            idle_s=0.0 if self._doing else max(now_s - self._used_s, 0.0),
            returns_in_s=self._returns_in_s(now_s),
            inexact=self.inexact,
        )

    def turn_ended(self) -> None:
        """A generation has ended and its tokens are durable."""
        self._leave_state()
        self._services.events.tell(EventKind.TURN_ENDED, self.id, f"at position {self.position}")

    async def break_off(self) -> None:
        """Close, though a call is under way: what it has handed out is made durable."""
        if self._life is Life.OPEN:
            self._end(Life.CLOSED)
            await self.record.flush()

    def abandon(self) -> None:
        """End without writing anything down: what is not durable yet is lost."""
        self._end(Life.CLOSED)

    def idle(self, now_s: float) -> Idle | None:
        """What moving this session out of memory would bring; None while it is in use, cold or empty."""
        state = self._holding.state
        if self._doing is not None or state is None or state.fixed is None:
            return None
        own, _ = self._services.pool.held_bytes(state)
        return Idle(self.id, own, now_s - self._used_s, self._returns_in_s(now_s))

    def _returns_in_s(self, now_s: float) -> float | None:
        return None if self._returns_at_s is None else max(self._returns_at_s - now_s, 0.0)

    async def demote(self) -> bool:
        """Move the state to the store; the next call brings it back. False when it is in use (or cold already)."""
        moved = await self._holding.cool(self.record, lambda: self._doing is not None or not self.is_open)
        if moved:
            self._services.events.tell(EventKind.DEMOTED, self.id)
        return moved

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
        self._services.returning.expect(self, self._returns_at_s)
        try:
            yield
        finally:
            self._returns_at_s = None
            self._used_s = self._services.now_s()
            self._services.returning.forget(self)
        await self.come_back()

    async def come_back(self) -> None:
        """Bring the state into memory if it is cold and nobody is using the session."""
        if self.is_open and self._doing is None and self.tier is Tier.COLD:
            with self.use("return"):
                await self.hot()

    def _end(self, life: Life) -> None:
        if self._life is not Life.OPEN:
            return  # broken off while `pause` or `close` was writing
        self._life = life
        self._holding.release()
        self._services.saver.forget(self.id)
        del self._services.live[self.id]
        if all(other.workflow != self.workflow for other in self._services.live.values()):
            self._services.driver.forget(self.workflow)
        kind = EventKind.PAUSED if life is Life.PAUSED else EventKind.CLOSED
        self._services.events.tell(kind, self.id, f"at position {self.position}")

    def _check_open(self) -> None:
        if self._life is not Life.OPEN:
            raise SessionClosed(session_id=self.id, how=self._life.value)

    def __repr__(self) -> str:
        doing = f", {self._doing}" if self._doing else ""
        name = f" {self.label!r}" if self.label else ""
        return f"<Session {self.id}{name} {self._life.value} at {self.position}, turn {self.turn}{doing}>"
