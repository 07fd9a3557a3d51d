"""One generation: an asynchronous iterator of the tokens a session draws and reads back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from serai.runtime.errors import OutOfBudget, SeraiError
from serai.runtime.random import fresh_seed
from serai.runtime.sampling import Sampled, TokenCounts
from serai.runtime.sampling_params import SamplingParams
from serai.runtime.step import Draw
from serai.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from serai.runtime.services import Services
    from serai.runtime.session import Session


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


class Generation:
    """Iterate over it for tokens. It holds its session from the first token asked for until the end or `aclose`.

    A token is handed out when the session has read it back, so at every moment the session holds exactly the tokens
    its reader has been given; nothing runs ahead. An iteration that was cancelled can be taken up again.
    """

    def __init__(self, session: "Session", services: "Services", params: SamplingParams) -> None:
        params.check_vocabulary(services.vocab_size)
        self._session = session
        self._services = services
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else services.stop_ids)
        self._begun = False
        self._count = 0
        self._next: Token | None = None
        self._drawn: Sampled | None = None
        self.finish_reason: FinishReason | None = None

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Token:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        if not self._begun:
            self._begin()
        try:
            return await self._step()
        except OutOfBudget:
            await self._end(FinishReason.BUDGET)
            raise
        except SeraiError:
            await self._end(FinishReason.ERROR)
            raise

    async def aclose(self) -> None:
        """End here. The tokens handed out stay in the session and are durable when this returns."""
        if self._begun and self.finish_reason is None:
            await self._end(FinishReason.CANCELLED)
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
        if self._begun and self.finish_reason is None:
            self.finish_reason = FinishReason.CANCELLED
            self._session.unclaim()

    def _begin(self) -> None:
        session = self._session
        session.claim("generate")
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
        session.record.generation_begins(self._params.to_record(), timeline)

    async def _step(self) -> Token:
        session, driver = self._session, self._services.driver
        if self._next is None:
            if self._drawn is None:
                await session.record.flush()
                unchanged, self._drawn = await driver.advance(
                    session.workflow, await session.hot(), np.zeros(0, np.int32), self._draw_at(session.position)
                )
                unchanged.release()
            self._next = self._look_at(self._drawn)
        token = self._next
        draw = None if token.finish_reason is not None else self._draw_at(token.position + 1)
        ids = np.array([token.id], np.int32)
        state, drawn = await driver.advance(session.workflow, await session.hot(), ids, draw)
        session.advanced(state, token.id)
        self._next, self._drawn = None, drawn
        self._count += 1
        if token.finish_reason is not None:
            await self._end(token.finish_reason)
        return token

    def _look_at(self, drawn: Sampled | None) -> Token:
        """What will be handed out for the drawn token, and whether the generation ends with it."""
        if drawn is None:
            raise AssertionError("a step that was asked to draw gives a token or an error")
        self._counts.push(drawn.token)
        position = self._session.position
        text = self._text.push(drawn.token)
        reason: FinishReason | None = None
        if drawn.token in self._stop_ids or self._text.stopped:
            reason = FinishReason.STOP
        elif self._count + 1 >= self._params.max_tokens or position + 1 >= self._services.max_positions:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += self._text.finish()
        wanted = self._params.logprobs is not None
        return Token(
            drawn.token,
            text,
            position,
            drawn.logprob if wanted else None,
            drawn.top_logprobs if wanted else None,
            reason,
        )

    def _draw_at(self, position: int) -> Draw:
        turn = self._session.timeline.turn
        if turn.seed is None:
            raise AssertionError("a generation has its seed from the start")
        generated = position - turn.generation_start
        banned = tuple(sorted(self._stop_ids)) if generated < self._params.min_tokens else ()
        return Draw(self._params, self._counts, turn.seed, self._session.timeline.branch, position, banned)

    async def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        try:
            await self._session.record.flush()
            self._session.turn_ended()
        finally:
            self._session.unclaim()
