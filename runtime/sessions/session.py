"""A session: one timeline of tokens with a live state, that can be appended to, continued, forked and paused."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import check_text, new_id
from serai.checkpoints.nodes import NodeKind
from serai.runtime.errors import BadParameter, NothingToContinue, SeraiError
from serai.runtime.sampling.grammar import Grammar
from serai.runtime.sampling.guessing import Worth
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.scheduler import weight_of
from serai.runtime.services import Services
from serai.runtime.sessions.changing import ChangingSession
from serai.runtime.sessions.deadline import Deadline
from serai.runtime.sessions.events import EventKind
from serai.runtime.sessions.generation import Generation
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State
from serai.runtime.status import SessionStatus


class Session(ChangingSession):
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
        append_metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
        replayed_tokens: int = 0,
    ) -> None:
        super().__init__(
            services,
            session_id=session_id,
            timeline=timeline,
            holding=holding,
            namespace=namespace,
            label=label,
            workflow=workflow,
            append_metadata=append_metadata,
            priority=priority,
        )
        self.parent = parent
        # Read once more before `resume` gave it out; 0 with `background`, where it is given out before they are.
        # (`SessionStatus.replay_tokens` counts those.)
        self.replayed_tokens = replayed_tokens
        self.worth = Worth()
        services.live[session_id] = self
        services.events.tell(EventKind.OPENED, session_id, namespace, label)

    async def logits(self) -> NDArray[np.float32]:
        """A copy of the next-token logits, float32 `[vocab_size]`. Raises `NothingToContinue` at position 0."""
        with self.use("logits"):
            state = await self.hot()
            if state.logits is None:
                raise NothingToContinue(session_id=self.id)
            copy: NDArray[np.float32] = state.logits.array.copy()
            return copy

    def generate(
        self,
        params: SamplingParams | None = None,
        *,
        grammar: Grammar | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
        guess: bool | None = None,
    ) -> Generation:
        """Continue the timeline: an asynchronous iterator of `Token`, each one that the `grammar`, if any, allows.

        Nothing runs ahead of the reader: leaving the iteration at any point leaves a session that holds exactly the
        tokens that were handed out. One that is still at it `deadline_s` seconds from now ends there, with that as its
        reason. `priority` is the session's unless given. With `guess`, the runtime's policy unless given, tokens that
        were read before are guessed where that pays: the same tokens, but several may come at once. Raises
        `NothingToContinue` at position 0.
        """
        self._check_open()
        if self.position == 0:
            raise NothingToContinue(session_id=self.id)
        weight = weight_of(self.priority if priority is None else priority)
        deadline = Deadline.after(deadline_s)
        guess = self._services.policy.guess if guess is None else guess
        params = params or SamplingParams()
        return Generation(self, self._services, params, grammar, weight=weight, deadline=deadline, guess=guess)

    async def fork(
        self,
        *,
        turn: int | None = None,
        position: int | None = None,
        node: str | None = None,
        label: str | None = None,
        choice: int | None = None,
    ) -> "Session":
        """A second timeline, from this token boundary on, or from the end of a turn, any position, or a node on the
        way here.

        From here it copies no state and is allowed while a call is under way. From an earlier point it starts at the
        nearest state known before it and reads the tokens between once more: `replay_tokens` says how many those are.
        It draws by a random branch of its own, that of the next fork or of `choice` number so many: choice 1 of a
        prompt says the same however often the session was forked before. Raises `PositionUnavailable` for a point this
        timeline doesn't have, `OverQuota` when the namespace may have no more sessions.
        """
        self._check_open()
        self.account.check_sessions()
        check_text(label or "", "label", may_be_empty=True)
        if choice is not None and choice < 0:
            raise BadParameter(f"choices count from 0, not {choice}")
        where = self._place(turn, position, node)
        timeline = self._timeline.fork(where, choice=choice)
        if where == self.position:
            return self._branch(timeline, self._holding.fork(), label)
        holding = await self._services.keeper.hold_at(timeline, self.namespace, self.workflow, exact=not self.inexact)
        try:
            self._check_open()  # the runtime may have closed meanwhile, and would not know of the child
            self.account.check_sessions()
        except SeraiError:
            holding.release()
            raise
        return self._branch(timeline, holding, label)

    async def twin(self, *, label: str | None = None) -> "Session":
        """As `fork` from here, but the second session goes on just as this one would: it keeps the random branch, as
        resuming this point does, and counts as no fork."""
        self._check_open()
        self.account.check_sessions()
        check_text(label or "", "label", may_be_empty=True)
        return self._branch(self._timeline.twin(), self._holding.fork(), label)

    def _branch(self, timeline: Timeline, holding: Holding, label: str | None) -> "Session":
        """A session that begins on this one's path, where `timeline` ends."""
        child = Session(
            self._services,
            session_id=new_id(),
            timeline=timeline,
            holding=holding,
            namespace=self.namespace,
            label=self.label if label is None else label,
            workflow=self.workflow,
            parent=self.id,
            append_metadata=self.append_metadata,
            priority=self.priority,
        )
        child.worth = self.worth.fork()
        child.record.branched_from(self.record)
        child.record.cut(timeline, NodeKind.FORK)
        child.append_metadata = child.record.append_metadata()
        self._services.events.tell(EventKind.FORKED, self.id, self.namespace, child.id)
        return child

    async def fork_many(self, count: int) -> list["Session"]:
        """`count` forks, as `fork`, or none."""
        if count < 1:
            raise BadParameter(f"fork_many makes at least 1 fork, not {count}")
        self.account.check_sessions(count)
        return [await self.fork() for _ in range(count)]

    async def __aenter__(self) -> "Session":
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._leave()

    def lagged(self, token: int) -> None:
        """As `advanced`, when the state after the token is part of a longer one that is not taken over yet."""
        if not self._holding.lags:
            self.record.state_stays(self._timeline)
        self._holding.lag(token)
        self._note(token)

    def advanced(self, state: State, token: int) -> None:
        """A generation read back the token it had drawn: `state` is the one after it."""
        if self._holding.lags:
            self.record.state_comes()
        self._holding.become(state)
        self._note(token)

    def _note(self, token: int) -> None:
        self._timeline.generated(token)
        self._count_beside(self.position)
        self.record.generated(token, self._timeline)
        self._used_s = self._services.now_s()
        self._rate.count(1, self._used_s)

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
            replay_tokens=self._holding.replay_tokens,
        )

    def turn_ended(self) -> None:
        """A generation has ended and its tokens are durable."""
        self._leave_state()
        self._services.events.tell(EventKind.TURN_ENDED, self.id, self.namespace, f"at position {self.position}")

    def __repr__(self) -> str:
        doing = f", {self._doing}" if self._doing else ""
        name = f" {self.label!r}" if self.label else ""
        return f"<Session {self.id}{name} {self._life.value} at {self.position}, turn {self.turn}{doing}>"
