"""A reply as text for people: the answer as it is, and what is not the answer on lines of its own, marked."""

from collections.abc import Callable
from typing import Final

from serai.runtime.chat import ContentDelta, Event, ReasoningDelta, ReplyEnd, ToolArgumentsDelta, ToolCallBegin

MARGIN: Final = "| "
"""Begins each line of reasoning and of tool calls."""

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"


def printable(text: str) -> str:
    """The text without the control characters by which it could take over a terminal; line ends and tabs stay."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))


class ReplyWriter:
    """Writes one reply, piece by piece, and always ends on a whole line.

    On a `terminal` control characters are left out, and marked lines are dim where it can show that.
    """

    def __init__(self, write: Callable[[str], object], *, terminal: bool, dim: bool) -> None:
        self._write = write
        self._terminal = terminal
        self._dim = dim
        self._kind: object = None
        self._at_line_start = True
        self._has_text = False
        self.faults: tuple[str, ...] = ()
        self.ended = False

    def take(self, event: Event) -> None:
        """Show an event."""
        match event:
            case ContentDelta(text):
                self._put(text, "content")
            case ReasoningDelta(text):
                self._put(text, "reasoning")
            case ToolCallBegin(index, _, name):
                self._put(f"calls {name} ", ("call", index))
            case ToolArgumentsDelta(index, text):
                self._put(text, ("call", index))
            case ReplyEnd(_, faults):
                self.ended, self.faults = True, faults

    def finish(self) -> None:
        """End the last line. A reply that says nothing is an empty line, one that never came is none."""
        if not self._at_line_start or (self.ended and not self._has_text):
            self._write("\n")
        self._at_line_start = True

    def _put(self, text: str, kind: object) -> None:
        if self._terminal:
            text = printable(text)
        if not text:
            return
        if kind != self._kind and not self._at_line_start:
            self._write("\n")
            self._at_line_start = True
        self._kind, self._has_text = kind, True
        if kind != "content":
            text = self._marked(text)
        self._write(text)
        self._at_line_start = text.removesuffix(_NOT_DIM).endswith("\n")

    def _marked(self, text: str) -> str:
        begun = "" if not self._at_line_start else MARGIN
        lines = begun + text[:-1].replace("\n", f"\n{MARGIN}") + text[-1]
        return f"{_DIM}{lines}{_NOT_DIM}" if self._dim else lines
