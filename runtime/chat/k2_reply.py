"""Reads the replies of Kimi K2 and Kimi-Linear."""

from dataclasses import replace
from enum import Enum, auto

from serai.runtime.chat.conversation import Cursor, MintCallId, PlacedCall
from serai.runtime.chat.k2_tokens import (
    ARGUMENT_BEGIN,
    ASSISTANT,
    CALL_BEGIN,
    CALL_END,
    END,
    END_OF_TEXT,
    SECTION_BEGIN,
    SECTION_END,
    SYSTEM,
    USER,
)
from serai.runtime.chat.reply import ContentDelta, Event, ReplyEnd, ToolArgumentsDelta, ToolCallBegin, ToolCallEnd
from serai.runtime.chat.segments import Segment, Tokenizer
from serai.runtime.chat.text_runs import Faults, TextRun, header_text

# What the model writes before its calls when it has nothing to say.
_NOTHING = "(no content)"


class _Place(Enum):
    CONTENT = auto()
    BETWEEN_CALLS = auto()
    HEADER = auto()
    ARGUMENTS = auto()
    ANOTHER_TURN = auto()  # the model went on to write somebody else's turn: nothing there is its reply


class K2ReplyParser:
    """The `ReplyParser` of Kimi K2: a call is given once its header is whole, its arguments as they come."""

    def __init__(self, cursor: Cursor, tokenizer: Tokenizer, mint: MintCallId) -> None:
        if cursor.reply is None:
            raise ValueError("no reply begins at this cursor; it must come from Markup.prompt")
        self._start = cursor
        self._tokenizer = tokenizer
        self._mint = mint
        self._names = {number: name for name, number in tokenizer.special_tokens.items()}
        self._place = _Place.CONTENT
        self._in_section = False
        self._header: list[int] = []
        self._calls: list[PlacedCall] = []
        self._next_call = cursor.next_call
        self._has_arguments = False
        self._held = ""  # content so far, while it may still turn out to be `_NOTHING`
        self._may_be_nothing = True
        self._run = TextRun(tokenizer)
        self._faults = Faults()
        self._missing_at_stop: tuple[Segment, ...] | None = None
        self._finished = False
        self._events: list[Event] = []

    def push(self, token: int) -> tuple[Event, ...]:
        if self._finished:
            raise ValueError("the reply has ended; the next one needs a new parser")
        if (name := self._names.get(token)) is not None:
            self._end_run()
            self._control(name)
        elif self._place is _Place.HEADER:
            self._header.append(token)
        else:
            self._text(self._run.push(token, stray=self._place is _Place.BETWEEN_CALLS))
        return self._take_events()

    def finish(self) -> tuple[Event, ...]:
        if not self._finished:
            self._end_run()
            if self._place is _Place.ARGUMENTS:
                self._events.append(ToolCallEnd(len(self._calls) - 1, complete=False))
            self._end(stopped=False)
        return self._take_events()

    def cursor(self) -> Cursor:
        missing = self._missing() if self._missing_at_stop is None else self._missing_at_stop
        return replace(self._start, missing=missing, reply=None, calls=tuple(self._calls), next_call=self._next_call)

    def _missing(self) -> tuple[Segment, ...]:
        missing: list[str] = []
        if self._place is _Place.HEADER:
            missing += [ARGUMENT_BEGIN, "{}", CALL_END]
        elif self._place is _Place.ARGUMENTS:
            missing += [CALL_END]
        if self._in_section:
            missing += [SECTION_END]
        missing += [END]
        return tuple(Segment(text, markup=text != "{}") for text in missing)

    def _control(self, name: str) -> None:
        match name:
            case _ if name in (END, END_OF_TEXT):
                self._missing_at_stop = () if name == END else self._missing()
                self._leave_call()
                self._end(stopped=True)
            case _ if self._place is _Place.ANOTHER_TURN:
                pass
            case _ if name in (USER, ASSISTANT, SYSTEM):
                self._leave_call()
                self._faults.add(f"another turn ({name}) begins before this one ended")
                self._place = _Place.ANOTHER_TURN
            case _ if name == SECTION_BEGIN:
                self._leave_call()
                self._begin_calls()
                self._in_section = True
            case _ if name == SECTION_END:
                self._leave_call()
                self._place, self._in_section = _Place.CONTENT, False
            case _ if name == CALL_BEGIN:
                self._leave_call()
                self._begin_calls()
                self._place, self._header = _Place.HEADER, []
            case _ if name == ARGUMENT_BEGIN and self._place is _Place.HEADER:
                self._begin_call()
            case _ if name == CALL_END and self._place in (_Place.HEADER, _Place.ARGUMENTS):
                self._leave_call(closed=True)
            case _:
                self._faults.add(f"{name} stands where it means nothing")

    def _begin_calls(self) -> None:
        if self._held.rstrip() == _NOTHING:
            self._held = ""
        self._release()
        self._place = _Place.BETWEEN_CALLS

    def _begin_call(self) -> None:
        header = header_text(self._header, self._tokenizer).strip()
        name, number = _parse_header(header)
        if number is not None:
            self._next_call = max(self._next_call, number + 1)
        if number is None or not name:
            self._faults.add(f"a call's id is {header[:60]!r}, not functions.NAME:N")
        index = len(self._calls)
        id_ = self._mint(index)
        self._calls.append(PlacedCall(name, id_, header))
        self._events.append(ToolCallBegin(index, id_, name))
        self._place, self._has_arguments = _Place.ARGUMENTS, False

    def _leave_call(self, *, closed: bool = False) -> None:
        """Ends the call being written, if one is; without `closed` by implication."""
        if self._place is _Place.HEADER:
            self._begin_call()
            self._faults.add(f"call {len(self._calls) - 1} has no arguments")
        if self._place is not _Place.ARGUMENTS:
            return
        index = len(self._calls) - 1
        if not closed:
            self._faults.add(f"call {index} was not closed")
        if not self._has_arguments:
            self._events.append(ToolArgumentsDelta(index, "{}"))
        self._events.append(ToolCallEnd(index, complete=True))
        self._place = _Place.BETWEEN_CALLS

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._place is _Place.ARGUMENTS:
            text = text if self._has_arguments else text.lstrip()
            self._has_arguments = self._has_arguments or bool(text)
            if text:
                self._events.append(ToolArgumentsDelta(len(self._calls) - 1, text))
        elif self._place is not _Place.ANOTHER_TURN:
            self._held += text
            self._may_be_nothing = self._may_be_nothing and _could_become_nothing(self._held)
            if not self._may_be_nothing:
                self._release()

    def _release(self) -> None:
        self._may_be_nothing = False
        if self._held:
            self._events.append(ContentDelta(self._held))
        self._held = ""

    def _end_run(self) -> None:
        self._text(self._run.end(stray=self._place is _Place.BETWEEN_CALLS))

    def _end(self, *, stopped: bool) -> None:
        self._release()
        self._finished = True
        self._events.append(ReplyEnd(stopped, self._faults.all()))

    def _take_events(self) -> tuple[Event, ...]:
        events, self._events = tuple(self._events), []
        return events


def _parse_header(header: str) -> tuple[str, int | None]:
    """Name and number of a call from `functions.NAME:N`; what has another shape is all name."""
    name, _, number = header.rpartition(":")
    if number.isascii() and number.isdecimal() and len(number) < 10:
        return name.removeprefix("functions."), int(number)
    return header.removeprefix("functions."), None


def _could_become_nothing(text: str) -> bool:
    return _NOTHING.startswith(text) or text.rstrip() == _NOTHING
