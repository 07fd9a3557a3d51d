"""What changes a session's timeline: appends, going back, and edits of earlier turns. Each is done whole or not."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import NodeRecord
from serai.runtime.errors import BadParameter, PromptTooLong, SessionClosed
from serai.runtime.memory.accounts import Account
from serai.runtime.memory.admission import Reservation
from serai.runtime.memory.beside import ids_bytes
from serai.runtime.scheduler import weight_of
from serai.runtime.services import Services
from serai.runtime.sessions.contents import Appended, token_ids
from serai.runtime.sessions.deadline import Deadline, met
from serai.runtime.sessions.durable import DurableSession
from serai.runtime.sessions.elsewhere import other_than
from serai.runtime.sessions.events import EventKind
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.live import LiveSession
from serai.runtime.sessions.rate import Rate
from serai.runtime.sessions.record import Record
from serai.runtime.sessions.trail import Trail
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State


class _FromNothing(NamedTuple):
    """An edit reads all there will be, from the beginning or what is known of it, and needs nothing of what its session
    holds meanwhile: what `Trail.read` asks for."""

    session: LiveSession
    empty: State

    @property
    def position(self) -> int:
        return 0

    @property
    def held(self) -> State | None:
        return self.session.held

    @property
    def account(self) -> Account:
        return self.session.account

    def needed_bytes(self, tokens: int) -> int:
        return max(ids_bytes(tokens) - ids_bytes(self.session.position), 0)

    async def hot(self, reservation: Reservation | None = None) -> State:
        return self.empty

    async def step_aside(self, is_called: Callable[[], bool]) -> bool:
        return await self.session.step_aside(is_called)


class ChangingSession(DurableSession):
    """Adds what is read into the timeline and taken back from it, and the states that are left on the way."""

    def __init__(
        self,
        services: Services,
        *,
        session_id: str,
        timeline: Timeline,
        holding: Holding,
        namespace: str,
        label: str,
        workflow: str | None,
        append_metadata: Mapping[str, Any] | None,
        priority: int,
    ) -> None:
        weight_of(priority)  # raises for what is none
        super().__init__(
            services,
            session_id=session_id,
            timeline=timeline,
            holding=holding,
            namespace=namespace,
            label=label,
            workflow=workflow,
            append_metadata=append_metadata,
        )
        self.priority = priority
        self.taken_back = np.zeros(0, np.int32)
        self._rate = Rate()
        self._trail = Trail(services, session_id=session_id, namespace=namespace, workflow=self.workflow)

    async def append(
        self,
        content: str | Sequence[int] | NDArray[np.integer],
        *,
        metadata: Mapping[str, Any] | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
    ) -> Appended:
        """Read text or token ids. Their ids are durable when this returns (with a store), and `metadata`, a JSON
        object of the caller's, with them: `append_metadata` gives it back, after a resume too.

        `priority` is the session's unless given. An append that has not ended `deadline_s` seconds from now, or is seen
        not to, raises `DeadlineMissed`.

        All or nothing: on an error or cancellation the session is what it was before. Raises `PromptTooLong` before
        any work.
        """
        weight = weight_of(self.priority if priority is None else priority)
        deadline = Deadline.after(deadline_s)
        with self.use("append"), met(deadline, "append"):
            ids = await token_ids(content, self._services.tokenizer, self._services.vocab_size)
            if len(ids) == 0:
                return Appended(0, 0, 0, self.position)
            if self.position + len(ids) > self._services.max_positions:
                raise PromptTooLong(
                    position=self.position, added_tokens=len(ids), limit_tokens=self._services.max_positions
                )
            first = self.position == 0
            await self._holding.settle()
            shared = self._leaves_states
            state, reused = await self._trail.read(
                self, self._timeline, ids, shared=shared, weight=weight, deadline=deadline
            )
            own = self.held
            if own is None:  # it ended meanwhile
                state.release()
                raise SessionClosed(session_id=self.id, how=self._life.value)
            async with self._undone_unless_durable(own):
                self._holding.become(state)
                self._timeline.appended(ids)
                self._count_beside(self.position)
                self.append_metadata = dict(metadata or {})
                passed = self._write_append(self.record, self._timeline, ids, self.append_metadata)
                await self.record.flush()
            return self._appended(ids, reused, passed, first=first)

    def _write_append(
        self, record: Record, timeline: Timeline, ids: NDArray[np.int32], metadata: Mapping[str, Any]
    ) -> Sequence[NodeRecord]:
        """Have the record say that the timeline now ends with `ids`; the nodes inside of them at which states are."""
        start = len(timeline) - len(ids)
        on_the_way = self._trail.on_the_way(start, timeline.ids()) if record.is_durable else []
        record.appended(ids, timeline, metadata, on_the_way=on_the_way)
        return record.nodes()[-1 - len(on_the_way) : -1]

    def _appended(self, ids: NDArray[np.int32], reused: int, passed: Sequence[NodeRecord], *, first: bool) -> Appended:
        """The ids are read and durable."""
        self._rate.count(len(ids), self._services.now_s())
        self._services.events.tell(EventKind.APPENDED, self.id, self.namespace, f"{len(ids)} tokens")
        self._trail.save_on_the_way(passed)
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
            self._count_beside(len(timeline))
            self._holding.become(before.retain())
            self._trail.cut(len(timeline))
            self.record.take_back(timeline)
            raise
        finally:
            before.release()

    def _place(self, turn: int | None, position: int | None, node: str | None) -> int:
        """The position that a turn's end, a position, a node, or none of them (the present) names."""
        if node is None:
            return self._timeline.position_of(turn, position)
        if turn is not None or position is not None:
            raise BadParameter("give a turn, a position or a node, not several of them")
        return self.record.position_of(node)

    def replay_tokens(self, *, turn: int | None = None, position: int | None = None, node: str | None = None) -> int:
        """How many tokens a fork or rewind to that point would have to read once more."""
        self._check_open()
        where = self._place(turn, position, node)
        if where == self.position:
            return 0
        timeline = self._timeline.at(where, branch=self._timeline.branch)
        return self._services.keeper.replay_tokens(timeline, self.namespace, exact=not self.inexact)

    async def rewind(self, *, turn: int | None = None, position: int | None = None, node: str | None = None) -> None:
        """Go back to the end of a turn, to any position, or to a node on the way here.

        What came after stays in the store as a branch. All or nothing, at the cost that `replay_tokens` says. Raises
        `PositionUnavailable`.
        """
        with self.use("rewind"):
            where = self._place(turn, position, node)
            if where == self.position:
                return
            timeline = self._timeline_at(where)
            state = await self._services.keeper.at(
                timeline, self.namespace, self.workflow, exact=not self.inexact, beside=self.held
            )
            await self._go_to(state, timeline, self.record.rewound(timeline))
        self._services.events.tell(EventKind.REWOUND, self.id, self.namespace, f"to position {where}")

    async def edit(self, turn: int, content: str | Sequence[int] | NDArray[np.integer]) -> Appended:
        """Say something else in an earlier turn: go back to where it began and append `content` instead.

        What was said stays in the store as a branch. All or nothing: on an error or cancellation the session is what it
        was. Its state is held until then, beside the one that comes of it; states kept after that turn are let go of
        either way.
        """
        with self.use("edit"):
            self._timeline.end_of(turn)  # raises, naming the turns there are
            start = 0 if turn == 0 else self._timeline.end_of(turn - 1)
            ids = await token_ids(content, self._services.tokenizer, self._services.vocab_size)
            if start + len(ids) > self._services.max_positions:
                raise PromptTooLong(position=start, added_tokens=len(ids), limit_tokens=self._services.max_positions)
            self._trail.cut(start)
            whole = np.concatenate([self._timeline.ids()[:start], ids])
            empty = self._services.pool.empty(self.namespace)
            try:
                state, reused = await self._trail.read(
                    _FromNothing(self, empty),
                    Timeline(),
                    whole,
                    shared=self._leaves_states,
                    weight=weight_of(self.priority),
                )
            finally:
                empty.release()
            timeline = self._timeline_at(start)
            record = self.record.rewound(timeline)
            passed: Sequence[NodeRecord] = ()
            if len(ids):
                timeline.appended(ids)
                passed = self._write_append(record, timeline, ids, {})
            await self._go_to(state, timeline, record)
            self._services.events.tell(EventKind.REWOUND, self.id, self.namespace, f"to position {start}")
            return self._appended(ids, max(reused - start, 0), passed, first=start == 0)

    def _timeline_at(self, position: int) -> Timeline:
        """This session's timeline up to there."""
        timeline = self._timeline.at(position, branch=self._timeline.branch)
        timeline.forks = self._timeline.forks
        return timeline

    async def _go_to(self, state: State, timeline: Timeline, record: Record) -> None:
        """Write the record down, then be where it ends, with that `state` (the reference is taken): or stay."""
        written = False
        try:
            self._check_open()  # the runtime may have closed meanwhile
            await record.flush()
            written = True
        finally:
            # A call that is cancelled when the store has it already is there, as the store says.
            if (written or record.is_written) and self.is_open:
                self.taken_back = other_than(self._timeline.ids(), timeline.ids())
                before, self._holding = self._holding, Holding(self._services.keeper, state, state.position)
                before.release()
                timeline.forks = self._timeline.forks  # of those made meanwhile too
                self._timeline, self.record = timeline, record
                self._count_beside(len(timeline))
                self._trail.cut(len(timeline))
                self.append_metadata = record.append_metadata()
            else:
                state.release()

    def forgo_states(self) -> None:
        super().forgo_states()
        self._trail.cut(0)

    @property
    def _leaves_states(self) -> bool:
        return self._services.policy.reuse and not self.inexact

    def _leave_state(self, *, first: bool = False) -> None:
        state = self._holding.state
        if self._leaves_states and state is not None and state.fixed is not None and not state.is_spoiled:
            self._trail.leave(state, self._timeline.digest(), self.record.nodes()[-1], first=first)
