"""The arguments of one K3 call as a stream of JSON text."""

import json
from enum import Enum, auto

from serai.runtime.chat.json_text import json_value


class Form(Enum):
    """How a call gives its arguments: not yet, as members of an object, or as JSON text of its own."""

    NONE = auto()
    MEMBERS = auto()
    RAW = auto()


class CallStream:
    """Turns a call's elements into pieces of one JSON object; every method gives the piece that has become certain.

    Strings are streamed as they come. A member of another type is held until it closes, and then given as it is if it
    is JSON, as a string if not: so the object parses whatever the model wrote, and no piece is ever taken back.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.form = Form.NONE
        self._is_string = False
        self._held: list[str] = []
        self._has_raw_text = False

    def begin_member(self, key: str, type_: str) -> str:
        start = "{" if self.form is Form.NONE else ", "
        self.form = Form.MEMBERS
        self._is_string = type_ == "string"
        self._held = []
        return f"{start}{_quoted(key)}: " + ('"' if self._is_string else "")

    def begin_raw(self) -> None:
        self.form = Form.RAW

    def text(self, text: str) -> str:
        if self.form is Form.RAW:
            self._has_raw_text = True
            return text
        if self._is_string:
            return _quoted(text)[1:-1]
        self._held.append(text)
        return ""

    def end_member(self) -> str:
        if self._is_string:
            return '"'
        text = "".join(self._held)
        return text.strip() if _is_json(text) else _quoted(text)

    def end(self) -> str:
        if self.form is Form.MEMBERS:
            return "}"
        return "" if self._has_raw_text else "{}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json_value(text)
    except (ValueError, RecursionError):
        return False
    return True
