"""What a markup needs to know of a conversation, so that only what is new is ever rendered.

A session's past is token ids that the model has read; it is never rendered again. `Cursor` is all that an append needs
to know of that past: what the last reply left open, whose results may come, how calls are numbered.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.chat.grammars import Held
from serai.runtime.chat.messages import Message, Part, Tool, join_split_turn
from serai.runtime.chat.reply import Event
from serai.runtime.chat.segments import Segment, Tokenizer

EFFORTS = ("low", "high", "max")
DEFAULT_EFFORT = "max"

Channel: TypeAlias = Literal["think", "response"]
MintCallId: TypeAlias = Callable[[int], str]
"""Gives the id a client sees for the n-th call of a reply, counted from 0. It must be new to the conversation."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a conversation declares before its first message.

    This is the low-level door: nothing is added to what is asked, so no effort is declared unless named (one without
    thinking is not declared either). `Markup.options` fills in the defaults that the model's own servers use.
    """

    tools: tuple[Tool, ...] = ()
    thinking: bool = True
    thinking_effort: str | None = None

    def __post_init__(self) -> None:
        if self.thinking_effort is not None and self.thinking_effort not in EFFORTS:
            # K3's own note lists medium among the supported values, yet its encoder refuses it.
            raise PromptInvalid(f"thinking_effort is {self.thinking_effort!r}; it must be one of {', '.join(EFFORTS)}")


@dataclass(frozen=True, slots=True)
class Notes:
    """What one request asks of the next reply only. Rendered just before the reply, never part of the history.

    `tool_choice` is "auto", "none", "required" or an object naming a function (which has no note: a grammar holds it).
    `response_format` is an object of type text, json_object or json_schema.
    """

    tool_choice: str | Mapping[str, Any] | None = None
    response_format: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("auto", "none", "required"):
            raise PromptInvalid(
                f"tool_choice is {self.tool_choice!r}; it must be auto, none, required or an object naming a function"
            )
        if self.response_format is None:
            return
        kind = self.response_format.get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise PromptInvalid(f"response_format is of type {kind!r}; it must be text, json_object or json_schema")
        if kind == "json_schema" and self.schema is None:
            raise PromptInvalid("response_format is json_schema but has no json_schema.schema object")

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """The JSON schema asked for, if one is."""
        holder = (self.response_format or {}).get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        return schema if isinstance(schema, Mapping) else None


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True)
class PlacedCall:
    """A call that stands in the history: the id its client knows it by, and the one the model reads (K2 only)."""

    name: str
    id: str | None = None
    model_id: str | None = None


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a conversation stands after some tokens, whatever they were.

    `missing` is what must be appended before another message may begin, empty when the last one is closed. `reply` is
    the channel in which a reply begins, if a generation prompt stands there. `calls` are those of the last assistant
    turn, `results` counts the results given to it in the present run, `next_call` is the number K2 gives the next call.
    `spoken` says that a message has been rendered.
    """

    thinking: bool = True
    tools_declared: bool = False
    spoken: bool = False
    missing: tuple[Segment, ...] = ()
    reply: Channel | None = None
    calls: tuple[PlacedCall, ...] = ()
    results: int = 0
    next_call: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain JSON object that `from_json` reads back."""
        return {
            "thinking": self.thinking,
            "tools_declared": self.tools_declared,
            "spoken": self.spoken,
            "missing": [[segment.text, segment.markup] for segment in self.missing],
            "reply": self.reply,
            "calls": [[call.name, call.id, call.model_id] for call in self.calls],
            "results": self.results,
            "next_call": self.next_call,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Cursor":
        fields = dict(data)
        fields["missing"] = tuple(Segment(text, markup) for text, markup in data["missing"])
        fields["calls"] = tuple(PlacedCall(name, id_, model_id) for name, id_, model_id in data["calls"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What to append, and where the conversation stands once it is."""

    segments: tuple[Segment, ...]
    cursor: Cursor


class ReplyParser(Protocol):
    """Reads a reply token by token.

    Structure is decided by token ids alone: a marker that the model spells as ordinary text is text. Whatever the model
    writes is read as something; nothing raises but a push after the end.
    """

    def push(self, token: int) -> tuple[Event, ...]:
        """What this token completes. The stop token gives `ReplyEnd`, after which nothing may be pushed."""

    def finish(self) -> tuple[Event, ...]:
        """No more tokens will come: gives what was held back and, unless the stop token did, `ReplyEnd`."""

    def cursor(self) -> Cursor:
        """Where the conversation stands after the tokens pushed so far, with what they left open."""


class Markup(Protocol):
    """A model family's prompt format: pure functions from values to segments, and the parser of its replies."""

    @property
    def id(self) -> str:
        """Name and version of the format, part of a snapshot's fingerprint: changes whenever rendered ids would."""

    @property
    def stop_names(self) -> tuple[str, ...]:
        """Control tokens that end a reply."""

    def options(
        self, *, tools: Sequence[Tool] | None = None, thinking: bool | None = None, thinking_effort: str | None = None
    ) -> PromptOptions:
        """Options with the family's defaults. Raises PromptInvalid for one that the family doesn't have."""

    def begin(self, options: PromptOptions) -> Rendered:
        """What stands before the first message."""

    def append(self, cursor: Cursor, messages: Sequence[Message]) -> Rendered:
        """Closes what is open, then `messages`. Raises PromptInvalid, `message_index` counting in `messages`."""

    def prompt(self, cursor: Cursor, notes: Notes = NO_NOTES, *, thinking: bool | None = None) -> Rendered:
        """Closes what is open, then the request's notes, then the beginning of a reply (with `thinking` as it was)."""

    def parser(self, cursor: Cursor, tokenizer: Tokenizer, mint: MintCallId) -> ReplyParser:
        """Parses the reply whose beginning `prompt` rendered; `cursor` is what that call gave."""

    def grammar(self, cursor: Cursor, held: Held, tokenizer: Tokenizer) -> str:
        """The grammar that holds such a reply to what it must be, for `sampling.grammar` to compile."""


def render(
    markup: Markup,
    messages: Sequence[Message],
    options: PromptOptions,
    notes: Notes = NO_NOTES,
    *,
    add_generation_prompt: bool = True,
) -> Rendered:
    """A whole conversation at once."""
    begun = markup.begin(options)
    body = markup.append(begun.cursor, messages)
    segments = begun.segments + body.segments
    if not add_generation_prompt:
        return Rendered(segments, body.cursor)
    prompt = markup.prompt(body.cursor, notes)
    return Rendered(segments + prompt.segments, prompt.cursor)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer with what is known of the call it answers.

    `call` is the one its id names; `call_at_place` the one at its own place among the calls, if its id names none.
    `index` is the message's own in the list of messages.
    """

    index: int
    message: Message
    call: PlacedCall | None
    call_at_place: PlacedCall | None

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.message.parts


@dataclass(frozen=True, slots=True)
class Run:
    """Messages that are rendered together, the first at `index`: a run of tool messages, or one of another role."""

    index: int
    messages: tuple[Message, ...]


def runs(messages: Sequence[Message]) -> Iterator[Run]:
    """Cuts a list of messages into runs, joining assistant turns that a gateway has split."""
    start = 0
    while start < len(messages):
        end = start + 1
        first = messages[start]
        if first.role == "tool":
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            yield Run(start, tuple(messages[start:end]))
        elif end < len(messages) and (joined := join_split_turn(first, messages[end])) is not None:
            end += 1
            yield Run(start, (joined,))
        else:
            yield Run(start, (first,))
        start = end


def place_results(run: Run, cursor: Cursor) -> list[ToolResult]:
    """Finds the call that each message of a run of tool messages answers.

    If all name a call of the last turn they are put in the order of the calls; otherwise they stay as they came.
    """
    places: dict[str | None, list[int]] = {}
    for place, call in enumerate(cursor.calls):
        if call.id is not None:
            places.setdefault(call.id, []).append(place)
    indexed = list(enumerate(run.messages, run.index))
    if all(message.call_id in places for message in run.messages):
        indexed.sort(key=lambda one: places[one[1].call_id][0])
    results = []
    for place, (index, message) in enumerate(indexed, cursor.results):
        if named := places.get(message.call_id):
            # Calls may share an id, however wrong that is: then each result takes the next of them.
            call = cursor.calls[named.pop(0) if len(named) > 1 else named[0]]
            results.append(ToolResult(index, message, call, None))
        else:
            at_place = cursor.calls[place] if place < len(cursor.calls) else None
            results.append(ToolResult(index, message, None, at_place))
    return results


@contextmanager
def told_of(index: int) -> Iterator[None]:
    """What is raised of a message in the block, and says not yet of which, is told of the one at `index`."""
    try:
        yield
    except PromptInvalid as error:
        if error.message_index is not None:
            raise
        raise PromptInvalid(str(error), message_index=index) from None
