"""A session: one timeline of tokens with a live state, that can be appended to, continued, forked and paused."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind
from serai.runtime.driver import Driver
from serai.runtime.errors import BadParameter, NothingToContinue, PromptTooLong, SessionBusy, SessionClosed
from serai.runtime.generation import Generation
from serai.runtime.journal import Journal, Point
from serai.runtime.sampling_params import SamplingParams
from serai.runtime.state import State, StatePool
from serai.runtime.tokenizer import Tokenizer
from serai.runtime.turns import Timeline

ENCODE_INLINE_CHARACTERS = 2_000
"""Longer texts are tokenised on a worker thread: at about 1 µs a character this bounds what the loop pays to 2 ms."""


@dataclass(frozen=True, slots=True)
class Services:
    """What every session of one runtime shares."""

    driver: Driver
    pool: StatePool
    journal: Journal
    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int
    stop_ids: frozenset[int]
    live: "dict[str, Session]" = field(default_factory=dict)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise BadParameter("this model's folder has no tokenizer, so text can't be read; give token ids instead")
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did: how many tokens it added, how many of them were computed and how many taken from a state
    that was known already, and the position reached."""

    tokens: int
    prefilled: int
    reused: int
    position: int


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
        state: State,
        namespace: str,
        label: str,
        inexact: bool = False,
        append_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.id = session_id
        self.namespace = namespace
        self.label = label
        self.inexact = inexact
        self.append_metadata: Mapping[str, Any] = append_metadata or {}
        self.record = services.journal.open_record(session_id, namespace=namespace, label=label)
        self._services = services
        self._timeline = timeline
        self._state = state
        self._life = Life.OPEN
        self._doing: str | None = None
        services.live[session_id] = self

    @property
    def position(self) -> int:
        """Tokens read so far."""
        return self._state.position

    @property
    def turn(self) -> int:
        """The present turn's index, from 0."""
        return self._timeline.turn.index

    @property
    def is_open(self) -> bool:
        return self._life is Life.OPEN

    @property
    def state(self) -> State:
        """The live state; retain it to keep it beyond the session's next step."""
        self._check_open()
        return self._state

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    def tokens(self) -> NDArray[np.int32]:
        """All token ids read so far, int32 `[position]`."""
        return self._timeline.ids()

    def text(self) -> str:
        """The timeline as text; control tokens are left out."""
        return self._services.need_tokenizer().decode(self._timeline.ids().tolist())

    def logits(self) -> NDArray[np.float32]:
        """A copy of the next-token logits, float32 `[vocab_size]`. Raises `NothingToContinue` at position 0."""
        self._check_open()
        if self._state.logits is None:
            raise NothingToContinue(session_id=self.id)
        copy: NDArray[np.float32] = self._state.logits.array.copy()
        return copy

    async def append(
        self, content: str | Sequence[int] | NDArray[np.integer], *, metadata: Mapping[str, Any] | None = None
    ) -> Appended:
        """Read text or token ids. Their ids are durable when this returns (with a store), and `metadata`, a JSON
        object of the caller's, with them: `append_metadata` gives it back, after a resume too.

        All or nothing: on an error or cancellation the session is what it was before. Raises `PromptTooLong` before
        any work.
        """
        with self.use("append"):
            ids = await self._ids_of(content)
            if len(ids) == 0:
                return Appended(0, 0, 0, self.position)
            if self.position + len(ids) > self._services.max_positions:
                raise PromptTooLong(
                    position=self.position, added_tokens=len(ids), limit_tokens=self._services.max_positions
                )
            state, _ = await self._services.driver.advance(self.id, self._state, ids, prefill=True)
            self._become(state)
            self._timeline.appended(ids)
            self.append_metadata = dict(metadata or {})
            self.record.appended(ids, self._timeline, self.append_metadata)
            await self.record.flush()
            return Appended(len(ids), len(ids), 0, self.position)

    def generate(self, params: SamplingParams | None = None) -> Generation:
        """Continue the timeline: an asynchronous iterator of `Token`.

        Nothing runs ahead of the reader: leaving the iteration at any point leaves a session that holds exactly the
        tokens that were handed out. Raises `NothingToContinue` at position 0.
        """
        self._check_open()
        if self.position == 0:
            raise NothingToContinue(session_id=self.id)
        return Generation(self, self._services, params or SamplingParams())

    async def fork(self, *, label: str | None = None) -> "Session":
        """A second timeline from this token boundary on. Copies no state; allowed while a call is under way."""
        self._check_open()
        child = Session(
            self._services,
            session_id=new_id(),
            timeline=self._timeline.fork(),
            state=self._state.retain(),
            namespace=self.namespace,
            label=self.label if label is None else label,
            inexact=self.inexact,
            append_metadata=self.append_metadata,
        )
        child.record.branched_from(self.record)
        child.record.started(child.timeline, NodeKind.FORK)
        return child

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
            point = await self.record.save(self._state)
        self._end(Life.PAUSED)
        return point

    async def close(self) -> None:
        """Free the state. What was durable stays durable; closing twice is fine."""
        if self._life is Life.OPEN:
            with self.use("close"):
                await self.record.flush()
            self._end(Life.CLOSED)

    async def __aenter__(self) -> "Session":
        self._check_open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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

    def unclaim(self) -> None:
        self._doing = None

    def advanced(self, state: State, token: int) -> None:
        """A generation read back the token it had drawn: `state` is the one after it."""
        self._become(state)
        self._timeline.generated(token)
        self.record.generated(token)

    def discard(self) -> None:
        """Free the state without waiting for anything; the runtime's last resort when it shuts down."""
        if self._life is Life.OPEN:
            self._end(Life.CLOSED)

    def _become(self, state: State) -> None:
        before, self._state = self._state, state
        before.release()

    def _end(self, life: Life) -> None:
        self._life = life
        self._state.release()
        self._services.driver.forget(self.id)
        del self._services.live[self.id]

    def _check_open(self) -> None:
        if self._life is not Life.OPEN:
            raise SessionClosed(session_id=self.id, how=self._life.value)

    async def _ids_of(self, content: str | Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        if isinstance(content, str):
            encode = self._services.need_tokenizer().encode
            if len(content) <= ENCODE_INLINE_CHARACTERS:
                return np.array(encode(content), dtype=np.int32)
            return np.array(await anyio.to_thread.run_sync(encode, content), dtype=np.int32)
        ids = np.asarray(content)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise BadParameter(
                f"append takes text or one row of integer token ids, not an array of {ids.dtype} with shape {ids.shape}"
            )
        vocab = self._services.vocab_size
        if ids.size and (ids.min() < 0 or ids.max() >= vocab):
            wrong = int(ids[(ids < 0) | (ids >= vocab)][0])
            raise BadParameter(f"token id {wrong} is outside this model's vocabulary of 0 to {vocab - 1}")
        return ids.astype(np.int32)

    def __repr__(self) -> str:
        doing = f", {self._doing}" if self._doing else ""
        name = f" {self.label!r}" if self.label else ""
        return f"<Session {self.id}{name} {self._life.value} at {self._state.position}, turn {self.turn}{doing}>"
