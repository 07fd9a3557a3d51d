"""K3's tags: how they are spelled, read back, and completed where a reply was cut."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serai.runtime.chat.segments import Segment, SegmentWriter

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
END_OF_TEXT = "[EOS]"


class K3Writer(SegmentWriter):
    """Writes tags and notes."""

    def open(self, name: str, /, **attributes: str) -> None:
        self.markup(OPEN)
        self.text(name)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.markup(SEP)

    def close(self, name: str) -> None:
        self.markup(CLOSE)
        self.text(name)
        self.markup(SEP)

    def end_message(self) -> None:
        self.close("message")
        self.markup(END_OF_MESSAGE)

    def note(self, kind: str, body: str) -> None:
        """A system message of a type of its own."""
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()


@dataclass(frozen=True, slots=True)
class Header:
    """What stands between an open or close token and its separator."""

    closing: bool
    text: str

    @property
    def name(self) -> str:
        return (self.text.split(maxsplit=1) or [""])[0]

    @property
    def attributes(self) -> Mapping[str, str]:
        """Values, unescaped. One without quotes ends at a space, one without its last quote at the end."""
        return {
            key: (quoted or bare).replace("&quot;", '"').replace("&amp;", "&")
            for key, quoted, bare in _ATTRIBUTE.findall(self.text)
        }

    @property
    def rest(self) -> str:
        """What stands after the name and the well-formed attributes: nothing, unless the separator was forgotten."""
        after_name = self.text.lstrip()[len(self.name) :]
        return _WELL_FORMED.sub("", after_name, count=1)


_WELL_FORMED = re.compile(r'^(?:\s[^\s="]+="[^"]*")*')
_ATTRIBUTE = re.compile(r'\s([^\s="]+)=(?:"([^"]*)(?:"|$)|([^\s"]*))')


def json_type(value: object) -> str:
    """A JSON value's type as the markup names it."""
    match value:
        case bool():  # before int: in Python a boolean is one
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
        case _:
            return "object"


def missing_tags(elements: Sequence[str], *, answered: bool, header: Header | None = None) -> tuple[Segment, ...]:
    """What must follow a reply cut inside `elements` (outermost first) to end its message.

    `answered` says that the response channel or a later one was opened; if not, an empty response is added, as every
    finished message has one. `header` is a tag cut before its separator: it is completed, and an element it opens is
    closed.
    """
    out = K3Writer()
    open_elements = list(elements)
    if header is not None:
        _complete(out, header, open_elements, answered=answered)
        answered = answered or any(channel in open_elements for channel in ("response", "tools"))
    while open_elements:
        name = open_elements.pop()
        if name == "message" and not open_elements and not answered:
            out.open("response")
            out.close("response")
        out.close(name)
    out.markup(END_OF_MESSAGE)
    return out.finish()


def _children(element: str, *, answered: bool) -> tuple[str, ...]:
    """Elements that a tag begun inside `element` may have been meant to open, the likeliest first."""
    match element:
        case "message" | "think":
            return ("tools", "response", "think") if answered else ("response", "tools", "think")
        case "tools":
            return ("call",)
        case "call":
            return ("argument", "json")
        case _:
            return ()


def _complete(out: K3Writer, header: Header, open_elements: list[str], *, answered: bool) -> None:
    innermost = open_elements[-1] if open_elements else ""
    expected = (innermost,) if header.closing else _children(innermost, answered=answered)
    name = next((candidate for candidate in expected if candidate.startswith(header.text)), None)
    if name is None:
        name = header.name
        out.text('"' * (header.text.count('"') % 2))
    else:
        out.text(name[len(header.text) :])
    out.markup(SEP)
    if header.closing:
        if name in open_elements:
            del open_elements[len(open_elements) - 1 - open_elements[::-1].index(name) :]
        return
    if name in ("think", "response", "tools"):
        del open_elements[1:]  # a channel closes the one before it
    open_elements.append(name)
