"""Prompts as segments: structure and content reach the tokenizer by different doors.

A rendered prompt is a list of segments. Text segments go through the tokenizer's text door, which can't produce a
control token whatever the text says; markup segments go through the markup door, which knows control tokens by name.
Each segment is encoded on its own: joining neighbours before the BPE changes ids and lets content complete a
half-written marker.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from serai.runtime.chat.errors import PromptInvalid


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a rendered prompt; `markup` says by which door it is encoded."""

    text: str
    markup: bool = False


class Tokenizer(Protocol):
    """What the chat layer needs of a tokenizer."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of all control tokens by name."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of all control tokens, those the tokenizer's config calls not special included."""

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text; never a control token."""

    def token_id(self, name: str) -> int:
        """Id of the control token of that name."""

    def token_bytes(self, token: int, *, control: bool = False) -> bytes:
        """Bytes a token stands for; a control token has none unless `control` is true."""


class SegmentWriter:
    """Collects segments; empty text leaves none."""

    def __init__(self, segments: Iterable[Segment] = ()) -> None:
        self._segments = list(segments)

    def text(self, text: str) -> None:
        """Adds ordinary text. Raises PromptInvalid for text that has no UTF-8 form."""
        if text:
            require_unicode(text)
            self._segments.append(Segment(text))

    def markup(self, text: str) -> None:
        self._segments.append(Segment(text, markup=True))

    def extend(self, segments: Iterable[Segment]) -> None:
        self._segments.extend(segments)

    def finish(self) -> tuple[Segment, ...]:
        return tuple(self._segments)


# A control token among others in one markup segment: an image slot is four of them and a size in pixels.
_CONTROL_TOKEN = re.compile(r"(<\|[a-z_]+\|>)")


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of a prompt, each segment encoded on its own."""
    ids: list[int] = []
    for segment in segments:
        if not segment.markup:
            ids.extend(tokenizer.encode(segment.text))
            continue
        pieces = _CONTROL_TOKEN.split(segment.text)
        if len(pieces) == 1:
            ids.append(tokenizer.token_id(segment.text))
            continue
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(tokenizer.token_id(piece))
            elif piece:
                ids.extend(tokenizer.encode(piece))
    return ids


def require_unicode(text: str, *, message_index: int | None = None) -> None:
    """Raises PromptInvalid if `text` holds half of a surrogate pair, which JSON can spell and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptInvalid(
            f"its text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "which is no Unicode character; send the whole pair or leave it out",
            message_index=message_index,
        ) from None
