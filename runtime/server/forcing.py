"""Making a reply call a tool: its call is begun for the model, which then writes the arguments.

Nothing is masked, so no grammar is needed: when the reasoning ends, the tokens that open the call are read into the
session as if the model had written them. With a named function its whole header is; with `required` and several tools
the header up to the name. What the arguments are stays the model's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from serai.runtime.chat import ChatFormat, Cursor, Segment
from serai.runtime.chat.k2_tokens import ARGUMENT_BEGIN, CALL_BEGIN, SECTION_BEGIN
from serai.runtime.chat.k3_tags import CLOSE, SEP, K3Writer
from serai.runtime.server.errors import invalid


@dataclass(frozen=True, slots=True)
class MustCall:
    """A call that must come: of the function `name`, or of any."""

    name: str | None = None


def checked(must: MustCall, tools: Sequence[Mapping[str, Any]]) -> MustCall:
    """With the only function there is, if there is only one. Raises a 400 for one that isn't declared."""
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise invalid("tool_choice", "tool_choice asks for a call, but no tools are declared to choose from")
    if must.name is None:
        return MustCall(names[0]) if len(set(names)) == 1 else must
    if must.name not in names:
        raise invalid("tool_choice", f"tool_choice names {must.name!r:.80}, but the tools are {', '.join(names)}")
    return must


class Forcing:
    """Watches one reply's tokens for the place where the call is to begin; then `due` are the ids to read, once."""

    def __init__(self, must: MustCall, form: ChatFormat, prompted: Cursor) -> None:
        self.must = must
        self._form = form
        self._k3 = SECTION_BEGIN not in form.tokenizer.special_tokens
        self._cursor = prompted
        self._header: list[int] | None = None
        self._done = False

    def at_start(self) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """The ids to read before the first token is drawn: where nothing is thought before."""
        thinks = self._k3 and self._cursor.reply == "think"
        return None if thinks else self._due()

    def after(self, token: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
        """The ids to read after this token of the reply."""
        if self._done or not self._k3:
            return None
        tokenizer = self._form.tokenizer
        if token == tokenizer.token_id(CLOSE):
            self._header = []
        elif token == tokenizer.token_id(SEP) and self._header is not None:
            name = b"".join(tokenizer.token_bytes(one) for one in self._header)
            self._header = None
            if name.strip() == b"think":
                return self._due()
        elif token in tokenizer.special_ids:
            self._header = None
        elif self._header is not None:
            self._header.append(token)
        return None

    def _due(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        self._done = True
        segments = self._k3_opening() if self._k3 else self._k2_opening()
        return np.array(self._form.encode(segments), np.int32)

    def _k3_opening(self) -> tuple[Segment, ...]:
        out = K3Writer()
        if self._cursor.reply == "think":
            out.open("response")
        out.close("response")
        out.open("tools")
        before = len(out.finish())
        out.open("call", tool=self.must.name or "?", index="1")
        segments = out.finish()
        if self.must.name is not None:
            return segments
        value = next(place for place in range(before, len(segments)) if segments[place].text == "?")
        return segments[:value]

    def _k2_opening(self) -> tuple[Segment, ...]:
        begin = Segment(SECTION_BEGIN, markup=True), Segment(CALL_BEGIN, markup=True)
        if self.must.name is None:
            return (*begin, Segment("functions."))
        header = Segment(f"functions.{self.must.name}:{self._cursor.next_call}")
        return (*begin, header, Segment(ARGUMENT_BEGIN, markup=True))
