"""Lines of text with tones, and text from strangers made safe to print.

A line is a tuple of spans. Nothing here is ever parsed as markup: square brackets and escape sequences in a label are
characters like others.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len, chop_cells, set_cell_size


class Tone(Enum):
    """What a span means; how that looks is the theme's matter. Never the only sign of anything."""

    NORMAL = "normal"
    DIM = "dim"
    STRONG = "strong"
    HEAD = "head"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    GRAPH = "graph"
    TRUNK = "trunk"
    SCRATCH = "scratch"
    EXPERTS = "experts"
    LIVE = "live"
    KEPT = "kept"
    SPARE = "spare"
    FREE = "free"
    COOL = "cool"
    MILD = "mild"
    WARM = "warm"
    HOT = "hot"


class Span(NamedTuple):
    """A run of text in one tone."""

    text: str
    tone: Tone = Tone.NORMAL


Line = tuple[Span, ...]

ELLIPSIS = "…"
LONGEST = 2_000
"""Characters of a stranger's text that are looked at; no terminal shows more of it in one line."""

_SHOWN_AS = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
"""Control characters as their pictures: ␛ for escape, ␊ for a line feed."""
_WORDS = re.compile(r"\s+|\S+")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
"""Categories whose characters have no width of their own, reorder others, or can't be encoded."""


@lru_cache(maxsize=4_096)
def printable(text: str) -> str:
    """The text with every character that could move, hide or reorder others replaced by a visible stand-in.

    Control characters become their pictures, other invisible ones (zero width, bidirectional marks, lone surrogates)
    their number as `\\u200b`. Variation selectors, which only change a width, go; every space is a plain one.
    """
    return "".join(map(_shown, text[:LONGEST]))


def _shown(char: str) -> str:
    if " " <= char <= "~":
        return char
    code = ord(char)
    if code in _SHOWN_AS:
        return _SHOWN_AS[code]
    if 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF:
        return ""
    category = unicodedata.category(char)
    if category == "Zs":
        return " "
    if category in _HIDDEN:
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return char


def fit(text: str, cells: int) -> str:
    """Printable text cut or padded to exactly `cells` columns; what was cut ends in "…"."""
    if cells <= 0:
        return ""
    shown = printable(text)
    width = cell_len(shown)
    if width <= cells:
        return shown + " " * (cells - width)
    return set_cell_size(shown, cells - 1) + ELLIPSIS


def fit_right(text: str, cells: int) -> str:
    """As `fit`, for numbers: padded on the left."""
    shown = printable(text)
    width = cell_len(shown)
    return " " * (cells - width) + shown if width <= cells else fit(shown, cells)


def wrapped(text: str, cells: int) -> list[str]:
    """A stranger's text as printable lines of at most `cells` columns, broken at spaces where there are any. Its line
    ends are kept, tabs become spaces."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines.extend(_wrap("".join(map(_shown, paragraph.expandtabs(4))), max(cells, 1)))
    return lines


def _wrap(paragraph: str, cells: int) -> list[str]:
    lines, present, width = [], "", 0
    for word in _WORDS.findall(paragraph):
        size = cell_len(word)
        if width and width + size > cells:
            lines.append(present.rstrip())
            present, width = "", 0
            if word.isspace():
                continue
        *whole, last = chop_cells(word, cells) if size > cells else [word]
        lines.extend(whole)
        present, width = present + last, width + cell_len(last)
    return [*lines, present.rstrip()]


def line(*parts: str | Span) -> Line:
    """A line of spans; plain strings get the normal tone. Strings are ours: a stranger's goes through `fit` first."""
    return tuple(Span(part) if isinstance(part, str) else part for part in parts)


def text_of(spans: Iterable[Span]) -> str:
    """What a line reads without its tones."""
    return "".join(span.text for span in spans)


def cut(spans: Line, cells: int) -> Line:
    """At most `cells` columns of a line."""
    kept: list[Span] = []
    for span in spans:
        width = cell_len(span.text)
        if width > cells:
            if cells > 0:
                kept.append(Span(fit(span.text, cells), span.tone))
            break
        kept.append(span)
        cells -= width
    return tuple(kept)


def padded(spans: Line, cells: int) -> Line:
    """Exactly `cells` columns of a line."""
    kept = cut(spans, cells)
    missing = cells - sum(cell_len(span.text) for span in kept)
    return (*kept, Span(" " * missing)) if missing else kept


def beside(left: Sequence[Line], right: Sequence[Line], cells: int) -> list[Line]:
    """Two columns with a rule between them, the left one `cells` wide; as long as the longer one."""
    rows = max(len(left), len(right))
    pairs = zip([*left, *[()] * (rows - len(left))], [*right, *[()] * (rows - len(right))], strict=True)
    return [(*padded(one, cells), Span(" │ ", Tone.DIM), *other) for one, other in pairs]


def rule(title: str, cells: int) -> Line:
    """A section's title on a rule."""
    shown = fit(title, max(min(cell_len(title), cells - 2), 0))
    left = max(cells - cell_len(shown) - 3, 0)
    return line(Span("─ ", Tone.DIM), Span(shown, Tone.STRONG), Span(" " + "─" * left, Tone.DIM))
