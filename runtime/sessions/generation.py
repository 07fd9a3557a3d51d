"""One generation: an asynchronous iterator of the tokens a session draws and reads back."""

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import anyio
import numpy as np

from serai.runtime.errors import BadParameter, OutOfBudget, SeraiError, SessionBusy
from serai.runtime.sampling.grammar import Grammar, Written
from serai.runtime.sampling.guessing import Guesser
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sampling.random import fresh_seed
from serai.runtime.sampling.sample import Sampled, TokenCounts
from serai.runtime.sessions.border import Border
from serai.runtime.sessions.deadline import Deadline
from serai.runtime.sessions.elsewhere import said_elsewhere
from serai.runtime.state import State
from serai.runtime.step import Draw
from serai.runtime.text.text_stream import TextStream

if TYPE_CHECKING:
    from serai.runtime.services import Services
    from serai.runtime.sessions.live import LiveSession
    from serai.runtime.sessions.session import Session


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the model's context."""
    CANCELLED = "cancelled"
    """The reader left."""
    BUDGET = "budget"
    """No memory was left to go on; the session stays resumable."""
    DEADLINE = "deadline"
    """Its time was over; the session holds what was handed out."""
    MOVED = "moved"
    """The session was migrated; whoever has it now goes on after what was handed out."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Token:
    """A token the session has drawn and read back.

    `text` is what it makes visible: empty inside a character, inside what may become a stop string, and for control
    tokens. `position` is the number of tokens before it. `logprob` is natural; it and `top_logprobs` are there when
    asked for. `finish_reason` is set on the last token only.
    """

    id: int
    text: str
    position: int
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation: its token ids, its visible text and why it ended."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class _Try:
    """Guesses of which only the first few were right, and how long the step took that found out."""

    guesses: int
    right: int
    seconds: float


class Generation:
    """Iterate over it for tokens. It holds its session from the first token asked for until the end or `aclose`.

    A token is handed out when the session has read it back, so at every moment the session holds exactly the tokens
    its reader has been given; nothing runs ahead. An iteration that was cancelled can be taken up again.

    A `grammar` holds for the whole turn: what it has written already is matched first, so a generation that goes on
    after a fork or a restart is held as the one before was.
    """

    def __init__(
        self,
        session: "Session",
        services: "Services",
        params: SamplingParams,
        grammar: Grammar | None = None,
        *,
        weight: float = 1.0,
        deadline: Deadline | None = None,
        guess: bool = False,
    ) -> None:
        params.check_vocabulary(services.vocab_size)
        if grammar is not None and grammar.vocab_size != services.vocab_size:
            raise BadParameter(
                f"the grammar is one over {grammar.vocab_size:,} tokens, but the model has {services.vocab_size:,}; "
                "compile it with this model's tokenizer"
            )
        self._grammar = grammar
        self._written: Written | None = None
        self._session = session
        self._services = services
        self._params = params
        self._weight = weight
        self._deadline = deadline
        self._guess = guess
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else services.stop_ids)
        self._begun = False
        self._count = 0
        self._known: deque[Token] = deque()  # drawn, and to be handed out once a step has read them back
        self._drawn: tuple[Sampled, ...] = ()  # drawn, and not looked at
        self._batch: deque[Token] = deque()  # read back in one step, and handed out one by one
        self._after: State | None = None  # the state after the whole batch
        self._guesser: Guesser | None = None
        self._try: _Try | None = None  # one that was wrong somewhere; the next step reads back what is known since
        self._border = Border()
        self._is_left = False  # its reader wants no more of it
        self.finish_reason: FinishReason | None = None

    @property
    def ahead(self) -> State | None:
        """The state after tokens that were read back together and are handed out one by one."""
        return self._after

    def reads(self, session: "LiveSession") -> bool:
        """Whether it is this session's."""
        return self._session is session

    @property
    def is_under_way(self) -> bool:
        """Whether there may be more of it."""
        return self._begun and self.finish_reason is None

    @property
    def holds_session(self) -> bool:
        """Whether it is under way, or its end is being written down."""
        return self.is_under_way or self._border.is_passed

    @asynccontextmanager
    async def held(self) -> AsyncIterator[bool]:
        """Stand between two tokens for the length of the block; False when it ended before it could.

        A token that is being computed is handed out first. Whoever asks for the next one, or closes, waits for the end
        of the block, and is told `MOVED` if the session was moved in it. Raises `SessionBusy` while it is held already.
        """
        if self._border.is_held:
            raise SessionBusy(session_id=self._session.id, doing="migrate")
        async with self._border.held():
            if not self.is_under_way:
                yield False
                return
            self._session.reader_is_away(False)  # else it could be moved out of memory meanwhile
            try:
                yield True
            finally:
                if self._session.is_moved:
                    self.finish_reason = FinishReason.MOVED
                elif self._is_left:  # and perhaps not waited for any more
                    await self._end(FinishReason.CANCELLED)
                else:
                    self._session.reader_is_away(True)

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Token:
        if self._border.is_held:
            await self._border.opened()
        if self.finish_reason is not None:
            raise StopAsyncIteration
        if not self._begun:
            self._begin()
        self._session.reader_is_away(False)
        self._border.asked()
        try:
            return await self._step()
        except OutOfBudget:
            await self._end(FinishReason.BUDGET)
            raise
        except SeraiError:
            await self._end(FinishReason.ERROR)
            raise
        finally:
            if self.finish_reason is None:
                self._session.reader_is_away(True)
            self._border.came()

    async def aclose(self) -> None:
        """End here. The tokens handed out stay in the session and are durable when this returns."""
        self._is_left = True
        await self._border.opened()
        if self.is_under_way:
            self._border.asked()
            try:
                await self._end(FinishReason.CANCELLED)
            finally:
                self._border.came()
        self.finish_reason = self.finish_reason or FinishReason.CANCELLED

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def collect(self) -> Completion:
        """Read to the end."""
        tokens: list[int] = []
        pieces: list[str] = []
        async with self:
            async for token in self:
                tokens.append(token.id)
                pieces.append(token.text)
        return Completion(tuple(tokens), "".join(pieces), self.finish_reason)

    def __del__(self) -> None:
        # The reader dropped the iteration: nothing runs, so letting go of the session is all there is to do. Its
        # tokens are written down with the session's next durable step.
        if self.is_under_way:
            self.finish_reason = FinishReason.CANCELLED
            self.forget_batch()
            self._session.dropped()

    def _begin(self) -> None:
        session = self._session
        session.claim("generate")
        self._services.reading.add(self)
        self._begun = True
        timeline = session.timeline
        seed = self._params.seed
        if seed is None:  # one turn keeps the seed it began with
            seed = fresh_seed() if timeline.turn.seed is None else timeline.turn.seed
        timeline.generates(seed)
        start = timeline.turn.generation_start
        ids = timeline.ids()
        self._counts = TokenCounts(self._services.vocab_size, ids, generation_start=start)
        self._text = TextStream(self._services.tokenizer, self._params.stop)
        self._text.replay(ids[start:].tolist())
        if self._guess:
            self._guesser = Guesser(ids, said_elsewhere(session, self._services.live.values(), ids))
            session.worth.begin(self._guesser.least_pattern())
        record = self._params.to_record()
        if self._grammar is not None:
            self._written = self._grammar.start.after(*ids[start:].tolist())
            record["grammar"] = self._grammar.digest
        session.record.generation_begins(record, timeline)

    async def _step(self) -> Token:
        while not self._batch:
            if not await self._advance_in_time():
                await self._end(FinishReason.DEADLINE)
                raise StopAsyncIteration
        token = self._batch.popleft()
        if self._batch:
            self._session.lagged(token.id)
        else:
            state, self._after = self._after, None
            if state is None:
                raise AssertionError("a batch that was read back has the state after it")
            self._session.advanced(state, token.id)
        self._count += 1
        if token.finish_reason is not None:
            await self._end(token.finish_reason)
        return token

    async def _advance_in_time(self) -> bool:
        """`_advance`; False when the deadline has passed, or passes meanwhile."""
        if self._deadline is None:
            await self._advance()
            return True
        if self._deadline.left_s > 0:
            with anyio.CancelScope(deadline=self._deadline.at_s):
                await self._advance()
                return True
        return False

    async def _advance(self) -> None:
        """Read back the known tokens, with guesses after them; then a batch is ready, or more is known than before."""
        session, driver = self._session, self._services.driver
        if not self._known:
            if not self._drawn:
                await session.record.flush()
                unchanged, self._drawn = await driver.advance(
                    session.workflow,
                    await session.hot(),
                    np.zeros(0, np.int32),
                    (self._draw_at(session.position, self._written),),
                    weight=self._weight,
                )
                unchanged.release()
            self._look_at(self._drawn)
        known = list(self._known)
        last = known[-1]
        guesses: list[int] = []
        certain = False
        if last.finish_reason is None and len(known) == 1 and self._guesser is not None:
            guesses, certain = self._worth_guessing(self._guesser, last.position)
        ids = [*(token.id for token in known), *guesses]
        draws: tuple[Draw, ...] = ()
        if last.finish_reason is None:
            draws = (
                self._draw_at(last.position + 1, self._written),
                *(self._draw_at(last.position + 2 + index) for index in range(len(guesses))),
            )
        before, began_s = await session.hot(), self._services.now_s()
        state, drawn = await driver.advance(
            session.workflow, before, np.array(ids, np.int32), draws, weight=self._weight
        )
        if self._guesser is not None and not certain:
            self._measure(len(known), len(guesses), len(drawn) - 1, self._services.now_s() - began_s)
        if len(drawn) == len(draws):
            self._look_at(drawn[:-1])  # the right guesses were read back as well
            self._batch, self._known = self._known, deque()
            self._after, self._drawn = state, drawn[-1:]
        else:
            state.release()
            self._look_at(drawn)

    def _worth_guessing(self, guesser: Guesser, position: int) -> tuple[list[int], bool]:
        """Guesses for the tokens after `position`, none of which ends the generation, and whether the grammar leaves
        (nearly) nothing else: it knows the text that must follow, if not always its tokens."""
        forced = () if self._written is None else self._written.forced
        worth = self._session.worth
        guesses = forced or guesser.guess(worth.guesses, pattern=worth.pattern)
        if not guesses:  # so it is for most tokens, and steps can be short
            return [], False
        room = self._services.driver.limits.step_rows - 1  # a wrong guess makes one token more known than were guessed
        left = min(self._params.max_tokens - self._count, self._services.max_positions - position, room) - 1
        guesses = guesses[: max(left - 1, 0)]
        return self._before_the_end(guesses), bool(forced and guesses)

    def _before_the_end(self, guesses: Sequence[int]) -> list[int]:
        """Those before the first one that would end the generation: nothing may be read after that."""
        text = self._text.twin() if self._params.stop else None
        for index, token in enumerate(guesses):
            if text is not None:
                text.push(token)
            if token in self._stop_ids or (text is not None and text.stopped):
                return list(guesses[:index])
        return list(guesses)

    def _measure(self, known: int, guesses: int, right: int, seconds: float) -> None:
        """Tell what a step was worth that read `known` tokens back and perhaps guesses after them."""
        worth, tried = self._session.worth, self._try
        if tried is not None:
            self._try = None
            worth.tried(tried.guesses, tried.right, known, tried.seconds + seconds, first_s=tried.seconds)
        elif guesses and right == guesses:
            worth.tried(guesses, right, known + guesses, seconds, first_s=seconds)
        elif guesses:
            self._try = _Try(guesses, right, seconds)
        elif known == 1:
            worth.plain(seconds)

    def _look_at(self, drawn: tuple[Sampled, ...]) -> None:
        """Make the drawn tokens known: what will be handed out for each, and whether the generation ends with it."""
        for one in drawn:
            self._counts.push(one.token)
            self._written = one.written
            if self._guesser is not None:
                self._guesser.push(one.token)
            ahead = len(self._known)
            position = self._session.position + ahead
            text = self._text.push(one.token)
            reason: FinishReason | None = None
            if one.token in self._stop_ids or self._text.stopped:
                reason = FinishReason.STOP
            elif self._count + ahead + 1 >= self._params.max_tokens or position + 1 >= self._services.max_positions:
                reason = FinishReason.LENGTH
            if reason is not None:
                text += self._text.finish()
            wanted = self._params.logprobs is not None
            logprob, top = (one.logprob, one.top_logprobs) if wanted else (None, None)
            self._known.append(Token(one.token, text, position, logprob, top, reason))
        self._drawn = ()

    def _draw_at(self, position: int, written: Written | None = None) -> Draw:
        turn = self._session.timeline.turn
        if turn.seed is None:
            raise AssertionError("a generation has its seed from the start")
        generated = position - turn.generation_start
        banned = tuple(sorted(self._stop_ids)) if generated < self._params.min_tokens else ()
        return Draw(self._params, self._counts, turn.seed, self._session.timeline.branch, position, banned, written)

    def forget_batch(self) -> None:
        """Let go of what was read back and not handed out: it is not part of the session."""
        self._batch.clear()
        if self._after is not None:
            self._after.release()
            self._after = None

    def step_back(self) -> None:
        """As `forget_batch`, for a reader who will go on: what was not handed out is read back once more then."""
        if self._batch:
            self._known, self._drawn = self._batch.copy(), ()
            self.forget_batch()

    async def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        if self._batch:
            self._session.record.divide()  # so that the session can be moved out though its state is behind
        self.forget_batch()
        try:
            await self._session.record.flush()
            self._session.turn_ended()
        finally:
            self._session.unclaim()
