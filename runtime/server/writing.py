"""One reply as it is written: tokens drawn, read by token id, stop strings found in the content."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

import anyio
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
from serai.runtime.errors import DeadlineMissed, OutOfBudget
from serai.runtime.sampling.grammar import Grammar
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.server.gate import Gates
from serai.runtime.server.places import Tokens
from serai.runtime.sessions.deadline import Deadline
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

    A `grammar` holds the reply to what was asked for. A reply that ends before it is done, because memory ran out or at
    its `deadline`, is one cut short for a client; `cut_by` says by what, where that isn't the length it asked for.
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
        priority: int = 0,
        deadline: Deadline | None = None,
    ) -> None:
        self.session = session
        self.parser = parser
        self.finish: Finish | None = None
        self.cut_by: FinishReason | None = None
        self.output_tokens = 0
        self.reasoning_tokens = 0
        self._ids: list[int] = []
        self._seen: list[Event] = []
        self._params = replace(params, stop=(), stop_token_ids=tuple({*params.stop_token_ids, *stop_ids}))
        self._matcher = StopMatcher(stops)
        self._special_ids = special_ids
        self._gates = gates
        self._grammar = grammar
        self._priority = priority
        self._deadline = deadline
        self._undecided: list[Token] = []  # tokens of text that no event has told yet

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the reply, if one did."""
        return self._matcher.stopped_by

    @property
    def reply(self) -> Reply:
        """What has been written so far, as the client saw it."""
        return collect(self._seen)

    def ids(self) -> Tokens:
        """The reply's token ids so far, int32."""
        return np.array(self._ids, np.int32)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The reply, piece by piece. Close it to end the reply early; what was drawn is kept."""
        left_s = None if self._deadline is None else max(self._deadline.left_s, 0.0)
        generation = self.session.generate(
            self._params, grammar=self._grammar, priority=self._priority, deadline_s=left_s
        )
        async with aclosing(generation):
            while self.finish is None:
                if not self._gates.are_open:
                    # A paused reply has its deadline too: the generation, asked after it, says that it has passed.
                    with anyio.CancelScope(deadline=math.inf if self._deadline is None else self._deadline.at_s):
                        await self._gates.wait()
                try:
                    token = await anext(generation)
                except StopAsyncIteration:
                    if self._deadline is not None and not self._ids:
                        raise DeadlineMissed(what="the reply", left_s=self._deadline.allowed_s) from None
                    yield self._cut(generation.finish_reason)
                    return
                except OutOfBudget:
                    if not self._ids:
                        raise
                    yield self._cut(generation.finish_reason)
                    return
                yield self._take(token)

    def _cut(self, reason: FinishReason | None) -> Piece:
        self.cut_by = reason
        return self._end(Finish.LENGTH)

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
