"""Reads Kimi K3's replies.

Departures from the grammar are read as meant where that is plain: a channel opened before the last one closed closes
it, a message closed or ended with elements still open closes them, a call outside the `tools` channel is a call, and a
tag whose separator was forgotten ends after its attributes. An element that doesn't belong where it stands is
transparent: its tags are not shown and its text belongs to whatever holds it, to the response if that has no text of
its own.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto

from serai.runtime.chat.call_stream import CallStream, Form
from serai.runtime.chat.conversation import Cursor, MintCallId, PlacedCall
from serai.runtime.chat.k3_tags import CLOSE, END_OF_MESSAGE, END_OF_TEXT, OPEN, SEP, Header, missing_tags
from serai.runtime.chat.reply import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReplyEnd,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from serai.runtime.chat.segments import Segment, Tokenizer
from serai.runtime.chat.text_runs import Faults, TextRun, header_text


class _Kind(Enum):
    MESSAGE = auto()
    THINK = auto()
    RESPONSE = auto()
    TOOLS = auto()
    CALL = auto()
    MEMBER = auto()
    RAW = auto()
    UNKNOWN = auto()


_CHANNELS = {"think": _Kind.THINK, "response": _Kind.RESPONSE, "tools": _Kind.TOOLS}
_WITHOUT_TEXT = (_Kind.MESSAGE, _Kind.TOOLS, _Kind.CALL)


@dataclass(frozen=True, slots=True)
class _Element:
    name: str
    kind: _Kind


class K3ReplyParser:
    """The `ReplyParser` of Kimi K3: a stack of open elements over token ids, starting where a generation prompt ends.

    Arguments are streamed while a call is being written (`CallStream`), not held until it closes.
    """

    def __init__(self, cursor: Cursor, tokenizer: Tokenizer, mint: MintCallId) -> None:
        if cursor.reply is None:
            raise ValueError("no reply begins at this cursor; it must come from Markup.prompt")
        self._start = cursor
        self._tokenizer = tokenizer
        self._mint = mint
        self._open, self._close, self._sep, self._end_of_message, end_of_text = (
            tokenizer.token_id(name) for name in (OPEN, CLOSE, SEP, END_OF_MESSAGE, END_OF_TEXT)
        )
        self._stops = {self._end_of_message, end_of_text}
        self._controls = tokenizer.special_ids
        self._elements = [_Element("message", _Kind.MESSAGE), _Element(cursor.reply, _CHANNELS[cursor.reply])]
        self._answered = cursor.reply == "response"
        self._header: tuple[bool, list[int]] | None = None  # (is it a closing tag, its tokens)
        self._run = TextRun(tokenizer)
        self._call: CallStream | None = None
        self._calls: list[PlacedCall] = []
        self._faults = Faults()
        self._message_closed = False
        self._missing_at_stop: tuple[Segment, ...] | None = None
        self._finished = False
        self._events: list[Event] = []

    def push(self, token: int) -> tuple[Event, ...]:
        if self._finished:
            raise ValueError("the reply has ended; the next one needs a new parser")
        if token in self._controls:
            self._control(token)
        elif self._header is not None:
            self._header[1].append(token)
        else:
            self._text(self._run.push(token, stray=self._place in _WITHOUT_TEXT))
        return self._take_events()

    def finish(self) -> tuple[Event, ...]:
        if not self._finished:
            self._end_run()
            if self._call is not None:
                self._emit(ToolCallEnd(self._call.index, complete=False))
            self._end(stopped=False)
        return self._take_events()

    def cursor(self) -> Cursor:
        missing = self._missing() if self._missing_at_stop is None else self._missing_at_stop
        next_call = self._start.next_call + len(self._calls)
        return replace(self._start, missing=missing, reply=None, calls=tuple(self._calls), next_call=next_call)

    def _missing(self) -> tuple[Segment, ...]:
        header = None
        if self._header is not None:
            header = Header(self._header[0], header_text(self._header[1], self._tokenizer))
        names = [element.name for element in self._elements]
        return missing_tags(names, answered=self._answered or self._message_closed, header=header)

    @property
    def _place(self) -> _Kind:
        """The innermost element that isn't transparent."""
        kinds = (element.kind for element in reversed(self._elements) if element.kind is not _Kind.UNKNOWN)
        return next(kinds, _Kind.UNKNOWN)

    def _control(self, token: int) -> None:
        if token in self._stops:
            # The other stop token ends the reply, yet to the model the message is as open as before.
            self._missing_at_stop = () if token == self._end_of_message else self._missing()
        if self._header is None:
            self._end_run()
        if token in self._stops:
            self._forgotten_separator()
            self._leave_down_to(0)
            self._end(stopped=True)
        elif token in (self._open, self._close):
            self._forgotten_separator()
            self._header = (token == self._close, [])
        elif token == self._sep and (header := self._take_header()) is not None:
            self._tag(header)
        else:
            self._faults.add(f"control token {token} stands where it means nothing")

    def _take_header(self) -> Header | None:
        if self._header is None:
            return None
        (closing, tokens), self._header = self._header, None
        return Header(closing, header_text(tokens, self._tokenizer))

    def _forgotten_separator(self) -> None:
        """A tag that runs into the next is read as if it had ended after its attributes, so that no text is lost."""
        header = self._take_header()
        if header is not None:
            self._faults.add(f"a tag has no separator: {header.text[:60]!r}")
            self._tag(header)
            self._text(header.rest)

    def _tag(self, header: Header) -> None:
        if not header.closing:
            self._elements.append(_Element(header.name, self._enter(header)))
            return
        depths = [depth for depth, element in enumerate(self._elements) if element.name == header.name]
        if not depths:
            self._faults.add(f"{header.name[:60]!r} was closed but is not open")
            return
        self._leave_down_to(depths[-1], closed=header.name)
        self._message_closed = self._message_closed or not self._elements

    def _enter(self, header: Header) -> _Kind:
        """What the element about to open is where it stands, having closed what it implies is closed."""
        if not self._message_closed:
            if (channel := _CHANNELS.get(header.name)) is not None:
                self._leave_down_to(1)
                self._answered = self._answered or channel is not _Kind.THINK
                return channel
            if header.name == "call":
                self._leave_down_to(2 if self._depth_of(_Kind.TOOLS) == 1 else 1)
                self._answered = True
                self._begin_call(header)
                return _Kind.CALL
            if self._call is not None and header.name == "argument" and self._call.form is not Form.RAW:
                self._leave_down_to(self._depth_of(_Kind.CALL) + 1)
                key, type_ = header.attributes.get("key", ""), header.attributes.get("type", "string")
                self._arguments(self._call.begin_member(key, type_))
                return _Kind.MEMBER
            if self._call is not None and header.name == "json" and self._call.form is Form.NONE:
                self._call.begin_raw()
                return _Kind.RAW
        self._faults.add(f"an element {header.name[:60]!r} stands where it means nothing")
        return _Kind.UNKNOWN

    def _depth_of(self, kind: _Kind) -> int:
        kinds = [element.kind for element in self._elements]
        return kinds.index(kind) if kind in kinds else -1

    def _begin_call(self, header: Header) -> None:
        name = header.attributes.get("tool", "")
        if not name:
            self._faults.add(f"a call names no tool: {header.text[:60]!r}")
        self._call = CallStream(len(self._calls))
        id_ = self._mint(self._call.index)
        self._calls.append(PlacedCall(name, id_))
        self._emit(ToolCallBegin(self._call.index, id_, name))

    def _leave_down_to(self, depth: int, *, closed: str | None = None) -> None:
        """Leaves the elements above `depth`; all but the one named `closed`, the last, are closed by implication."""
        while len(self._elements) > depth:
            element = self._elements.pop()
            if self._call is None:
                continue
            if element.kind in (_Kind.MEMBER, _Kind.RAW, _Kind.CALL) and not (
                len(self._elements) == depth and element.name == closed
            ):
                self._faults.add(f"the {element.name} of call {self._call.index} was not closed")
            if element.kind is _Kind.MEMBER:
                self._arguments(self._call.end_member())
            elif element.kind is _Kind.CALL:
                self._arguments(self._call.end())
                self._emit(ToolCallEnd(self._call.index, complete=True))
                self._call = None

    def _text(self, text: str) -> None:
        if not text:
            return
        match self._place:
            case _Kind.THINK:
                self._emit(ReasoningDelta(text))
            case _Kind.MEMBER | _Kind.RAW if self._call is not None:
                self._arguments(self._call.text(text))
            case _ if self._message_closed:
                self._faults.add("text stands after the end of the message")
            case _:
                self._emit(ContentDelta(text))

    def _end_run(self) -> None:
        self._text(self._run.end(stray=self._place in _WITHOUT_TEXT))

    def _arguments(self, text: str) -> None:
        if text and self._call is not None:
            self._emit(ToolArgumentsDelta(self._call.index, text))

    def _end(self, *, stopped: bool) -> None:
        self._finished = True
        self._emit(ReplyEnd(stopped, self._faults.all()))

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events
