"""One reply as it is written: tokens drawn, read by token id, stop strings found in the content."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from serai.runtime.chat import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ReplyEnd,
    ReplyParser,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    collect,
)
from serai.runtime.errors import OutOfBudget
from serai.runtime.sampling.grammar import Grammar
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.server.gate import Gates
from serai.runtime.server.places import Tokens
from serai.runtime.sessions.generation import FinishReason, Token
from serai.runtime.sessions.session import Session
from serai.runtime.text.stops import StopMatcher


class Finish(Enum):
    """Why a reply ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token brought: events, and the tokens whose text the events' content is (for logprobs)."""

    events: tuple[Event, ...]
    tokens: tuple[Token, ...] = ()


class Writer:
    """Draws one reply. Iterate over `pieces()`; afterwards `reply`, `finish` and the counts are those of all of it.

    A `grammar` holds the reply to what was asked for. `no_budget` says that the reply ended because memory ran out,
    which a client sees as a length limit.
    """

    def __init__(
        self,
        session: Session,
        parser: ReplyParser,
        params: SamplingParams,
        *,
        stops: tuple[str, ...],
        stop_ids: frozenset[int],
        special_ids: frozenset[int],
        gates: Gates,
        grammar: Grammar | None = None,
    ) -> None:
        self.session = session
        self.parser = parser
        self.finish: Finish | None = None
        self.no_budget = False
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self._ids: list[int] = []
        self._seen: list[Event] = []
        self._params = replace(params, stop=(), stop_token_ids=tuple({*params.stop_token_ids, *stop_ids}))
        self._matcher = StopMatcher(stops)
        self._special_ids = special_ids
        self._gates = gates
        self._grammar = grammar
        self._undecided: list[Token] = []  # tokens of text that no event has told yet

    @property
    def reply(self) -> Reply:
        """What has been written so far, as the client saw it."""
        return collect(self._seen)

    def ids(self) -> Tokens:
        """The reply's token ids so far, int32."""
        return np.array(self._ids, np.int32)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The reply, piece by piece. Close it to end the reply early; what was drawn is kept."""
        generation = self.session.generate(self._params, grammar=self._grammar)
        async with aclosing(generation):
            while self.finish is None:
                await self._gates.wait()
                try:
                    token = await anext(generation)
                except OutOfBudget:
                    if not self._ids:
                        raise
                    self.no_budget = True
                    yield self._end(Finish.LENGTH)
                    return
                yield self._take(token)

    def _take(self, token: Token) -> Piece:
        self._ids.append(token.id)
        self.output_tokens += 1
        events = self.parser.push(token.id)
        if token.id in self._special_ids:
            self._undecided.clear()
        else:
            self._undecided.append(token)
        piece = self._show(events)
        if self.finish is not None:
            return piece
        if any(isinstance(event, ReplyEnd) for event in events) or token.finish_reason is FinishReason.STOP:
            return self._joined(piece, self._end(Finish.STOP))
        if token.finish_reason is FinishReason.LENGTH:
            return self._joined(piece, self._end(Finish.LENGTH))
        return piece

    def _end(self, finish: Finish) -> Piece:
        """What was held back is shown: nothing follows that could complete it."""
        piece = self._show(self.parser.finish())
        if self.finish is not None:  # a stop string was completed by what the parser had held
            return piece
        rest = self._matcher.finish()
        if rest:
            self._seen.append(ContentDelta(rest))
            piece = self._joined(piece, Piece((ContentDelta(rest),)))
        self.finish = finish
        if finish is Finish.STOP and any(isinstance(event, ToolCallBegin) for event in self._seen):
            self.finish = Finish.TOOL_CALLS
        return piece

    def _show(self, events: tuple[Event, ...]) -> Piece:
        shown: list[Event] = []
        tokens: list[Token] = []
        for event in events:
            match event:
                case ReasoningDelta():
                    self.reasoning_tokens += len(self._undecided)
                    self._undecided.clear()
                    shown.append(event)
                case ContentDelta(text):
                    tokens += self._undecided
                    self._undecided.clear()
                    visible, stopped = self._matcher.push(text)
                    if visible:
                        shown.append(ContentDelta(visible))
                    if stopped:
                        self.finish = Finish.STOP
                        break
                case ToolCallBegin() | ToolArgumentsDelta() | ToolCallEnd():
                    self._undecided.clear()
                    held = self._matcher.finish() if isinstance(event, ToolCallBegin) else ""
                    shown += [ContentDelta(held), event] if held else [event]
                case ReplyEnd():
                    continue
        self._seen += shown
        return Piece(tuple(shown), tuple(tokens))

    @staticmethod
    def _joined(first: Piece, second: Piece) -> Piece:
        return Piece(first.events + second.events, first.tokens + second.tokens)
