"""What a reply says, as events in the order it is written, and the message they add up to.

A reply's text comes in pieces as tokens complete it; pieces of one kind that follow each other are one text. Arguments
of a tool call come as pieces of one JSON object: at every moment what has been given is a beginning of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from serai.runtime.chat.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call opens. `index` counts the calls of this reply from 0; `id` is minted, unique in the conversation."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call closes; `complete` is false if the reply was cut inside it, so that its arguments are only a beginning."""

    index: int
    complete: bool


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    """The reply is over: `stopped` by the model itself, or cut short.

    `faults` are sentences on markup that was not as it should be, and that was read as well as could be.
    """

    stopped: bool
    faults: tuple[str, ...] = ()


Event: TypeAlias = ReasoningDelta | ContentDelta | ToolCallBegin | ToolArgumentsDelta | ToolCallEnd | ReplyEnd


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply: the assistant's message, and how it ended (`cut_calls` are indices of calls cut short)."""

    message: Message
    stopped: bool
    cut_calls: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


def collect(events: Iterable[Event]) -> Reply:
    """Adds events up, so that a reply given whole says exactly what a streamed one did."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: list[ToolCallBegin] = []
    arguments: list[list[str]] = []
    cut: list[int] = []
    end = ReplyEnd(stopped=False)
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                content.append(text)
            case ToolCallBegin():
                begun.append(event)
                arguments.append([])
            case ToolArgumentsDelta(index, text):
                arguments[index].append(text)
            case ToolCallEnd(index, complete):
                if not complete:
                    cut.append(index)
            case ReplyEnd():
                end = event
    calls = [ToolCall(call.name, "".join(pieces), call.id) for call, pieces in zip(begun, arguments, strict=True)]
    message = Message.assistant("".join(content), reasoning="".join(reasoning), calls=calls)
    return Reply(message, end.stopped, tuple(cut), end.faults)
