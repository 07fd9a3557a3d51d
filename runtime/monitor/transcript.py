"""What the last token ids of a session say, as passages of one kind each: asked, thought, answered.

Made anew from the ids whenever somebody looks, from the last message boundary before a window of recent tokens; so it
costs the same however long a session is, and nothing while nobody looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from serai.runtime.chat import k2_tokens, k3_tags
from serai.runtime.text.tokenizer import Tokenizer

WINDOW_TOKENS = 1_000
"""Decoding so many takes well under a millisecond, which the event loop can spare a few times a second."""

_DEEPEST = 8
"""Tags before the window that are read for its first voice: no message nests deeper."""
_LONGEST_HEADER = 64


class Voice(Enum):
    """Whose words, and whether they are meant to be heard."""

    SYSTEM = "system"
    USER = "user"
    TOOL = "tool"
    REASONING = "reasoning"
    ANSWER = "answer"
    CALL = "call"
    TEXT = "text"
    """A session without messages: what was read and what was generated are one text."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Text of one voice. `is_cut` says that its beginning is not shown."""

    voice: Voice
    text: str
    is_cut: bool = False


_ROLES = {"system": Voice.SYSTEM, "user": Voice.USER, "tool": Voice.TOOL, "assistant": Voice.ANSWER}
_CHANNELS = {"think": Voice.REASONING, "response": Voice.ANSWER, "tools": Voice.CALL}


class _K3:
    """Tags: an open or close token, a name with attributes, a separator."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._open, self._close, self._sep = (
            tokenizer.token_id(name) for name in (k3_tags.OPEN, k3_tags.CLOSE, k3_tags.SEP)
        )
        self.begins = (self._open, self._close)
        self._stack: list[Voice] = []
        self._closing = False

    def header(self, token: int) -> bool:
        """Whether a header begins with this control token."""
        self._closing = token == self._close
        return token in self.begins

    def ends(self, token: int) -> bool:
        return token == self._sep

    def voice(self, text: str) -> Voice:
        """Whose words follow the header just read."""
        header = k3_tags.Header(self._closing, text)
        before = self._stack[-1] if self._stack else Voice.ANSWER
        if header.closing:
            self._stack = [] if header.name == "message" else self._stack[:-1]
        elif header.name == "message":
            self._stack = [_ROLES.get(header.attributes.get("role", ""), Voice.SYSTEM)]
        else:
            self._stack.append(_CHANNELS.get(header.name, before))
        return self._stack[-1] if self._stack else Voice.ANSWER


class _K2:
    """Roles: a token for the role, its name, a separator; tokens of their own around calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_tokens
        self._roles = {
            special[k2_tokens.USER]: Voice.USER,
            special[k2_tokens.ASSISTANT]: Voice.ANSWER,
            special[k2_tokens.SYSTEM]: Voice.SYSTEM,
        }
        self._middle = special[k2_tokens.MIDDLE]
        self.begins = tuple(self._roles)
        self._role = Voice.ANSWER

    def header(self, token: int) -> bool:
        if token not in self._roles:
            return False
        self._role = self._roles[token]
        return True

    def ends(self, token: int) -> bool:
        return token == self._middle

    def voice(self, text: str) -> Voice:
        return Voice.TOOL if self._role is Voice.SYSTEM and text.startswith("tool") else self._role


def transcript(ids: NDArray[np.int32], tokenizer: Tokenizer, *, window: int = WINDOW_TOKENS) -> tuple[Passage, ...]:
    """The passages of the last `window` tokens or a little more of `ids` int32 `[n]`; empty ones are left out.

    A passage longer than the window keeps its voice and loses its beginning.
    """
    special = tokenizer.special_tokens
    if k3_tags.OPEN in special and k3_tags.SEP in special:
        marks: _K3 | _K2 = _K3(tokenizer)
    elif all(name in special for name in k2_tokens.TURN_TOKENS):
        marks = _K2(tokenizer)
    else:
        text = _text(ids[-window:].tolist(), tokenizer)
        return (Passage(Voice.TEXT, text, is_cut=len(ids) > window),) if text else ()
    return _read(ids, tokenizer, marks, window)


def _read(ids: NDArray[np.int32], tokenizer: Tokenizer, marks: _K3 | _K2, window: int) -> tuple[Passage, ...]:
    begins = np.flatnonzero(np.isin(ids, marks.begins))
    start = max(len(ids) - window, 0)
    before = begins[begins < start]
    # Nothing says that a tag ends: one begun longer ago than a header is long is no reason to read from there.
    if len(before) and start - before[-1] <= _LONGEST_HEADER and not _has_end(ids[before[-1] : start], marks):
        start, before = int(before[-1]), before[:-1]  # the window began inside a tag
    tags = before[-_DEEPEST:]
    controls = tokenizer.special_ids
    made: list[Passage] = []
    run: list[int] = []
    voice = Voice.ANSWER if len(begins) else Voice.TEXT
    header: list[int] | None = None
    is_cut = start > 0

    def close() -> None:
        nonlocal is_cut
        text = _text(run, tokenizer)
        if text.strip():
            made.append(Passage(voice, text, is_cut))
        run.clear()
        is_cut = False

    for place in tags.tolist():
        marks.header(int(ids[place]))
        voice = marks.voice(_text(_until(ids[place + 1 : place + 1 + _LONGEST_HEADER].tolist(), marks), tokenizer))
    for token in ids[start:].tolist():
        if header is not None and not marks.ends(token) and token not in controls:
            header.append(token)
        elif header is not None:
            voice, header = marks.voice(_text(header, tokenizer)), None
            if marks.header(token):
                header = []
        elif token not in controls:
            run.append(token)
        else:
            close()
            if marks.header(token):
                header = []
    close()
    return tuple(made)


def _has_end(ids: NDArray[np.int32], marks: _K3 | _K2) -> bool:
    return any(marks.ends(token) for token in ids.tolist())


def _until(ids: Sequence[int], marks: _K3 | _K2) -> list[int]:
    """A header's tokens."""
    return list(ids[: next((index for index, token in enumerate(ids) if marks.ends(token)), len(ids))])


def _text(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """As text; a character whose last bytes are still to come, or whose first are cut off, is left out."""
    return tokenizer.decode(ids).strip("\ufffd")
