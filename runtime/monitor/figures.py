"""Figures drawn with characters: durations, sparklines, stacked bars and plots."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from serai.runtime.monitor.text import Span, Tone

BLOCKS = "▁▂▃▄▅▆▇█"


def duration_text(seconds: float) -> str:
    """At most seven characters: "0 s", "59 s", "3 min", "2 h", "5 d"."""
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    for limit, unit, name in ((60.0, 1.0, "s"), (3_600.0, 60.0, "min"), (86_400.0, 3_600.0, "h")):
        if seconds < limit:
            return f"{int(seconds / unit)} {name}"
    return f"{min(int(seconds / 86_400), 9_999)} d"


def rate_text(per_second: float) -> str:
    """Tokens a second; "·" for none at all."""
    if per_second <= 0:
        return "·"
    return f"{per_second:.1f}" if per_second < 100 else f"{per_second:,.0f}"


def sparkline(values: Sequence[float], cells: int, *, top: float | None = None) -> str:
    """The last `cells` values as one row of blocks; the highest block is `top`, or the largest value shown."""
    shown = list(values[-cells:]) if cells > 0 else []
    highest = max(shown, default=0.0) if top is None else top
    drawn = "".join(" " if value <= 0 else BLOCKS[_level(value, highest, len(BLOCKS))] for value in shown)
    return drawn.rjust(max(cells, 0))


def _level(value: float, highest: float, levels: int) -> int:
    return min(int(value / highest * levels), levels - 1) if highest > 0 else 0


class Share(NamedTuple):
    """A named part of a bar."""

    name: str
    amount: int
    tone: Tone


def share_cells(shares: Sequence[Share], cells: int) -> list[int]:
    """How many cells each share gets of a bar: by largest remainder, at least one for whatever isn't zero (as long as
    there are enough cells), `cells` together."""
    total = sum(max(share.amount, 0) for share in shares)
    if total == 0 or cells <= 0:
        return [0] * len(shares)
    exact = [max(share.amount, 0) * cells / total for share in shares]
    given = [max(int(part), 1 if part > 0 else 0) for part in exact]
    while sum(given) > cells:
        largest = max(range(len(given)), key=lambda index: (given[index], -index))
        given[largest] -= 1
    left = cells - sum(given)
    by_remainder = sorted(range(len(given)), key=lambda index: given[index] - exact[index])
    for index in by_remainder[:left]:
        given[index] += 1
    return given


def stacked_bar(shares: Sequence[Share], cells: int) -> tuple[Span, ...]:
    """One bar. Each part begins with "|" and its name, or as much of it as fits, so that it reads without colour."""
    parts = zip(shares, share_cells(shares, cells), strict=True)
    return tuple(Span(f"|{share.name}"[:width].ljust(width), share.tone) for share, width in parts if width)


def bar(part: float, whole: float, cells: int) -> str:
    """A plain bar of at most `cells`; anything above zero shows."""
    if part <= 0 or whole <= 0 or cells <= 0:
        return ""
    return "█" * max(1, min(round(part / whole * cells), cells))


def plot(values: Sequence[float], cells: int, rows: int, *, top: float) -> list[str]:
    """The last `cells` values as columns of blocks, `rows` high, the top row first."""
    shown = list(values[-cells:]) if cells > 0 else []
    steps = len(BLOCKS)
    heights = [0 if top <= 0 else min(round(max(value, 0) / top * rows * steps), rows * steps) for value in shown]
    lines = []
    for row in range(rows - 1, -1, -1):
        filled = [min(max(height - row * steps, 0), steps) for height in heights]
        lines.append("".join(BLOCKS[level - 1] if level else " " for level in filled).rjust(max(cells, 0)))
    return lines


def overlaid(front: Sequence[float], behind: Sequence[float], rows: int, *, top: float) -> list[list[Span]]:
    """Two plots of equally many columns in one: `front` in full blocks, and where `behind` reaches higher, it shaded;
    the top row first. Where anything is above zero, something of it is drawn."""
    least = top / (rows * len(BLOCKS)) if rows else 0.0
    whole = plot([max(value, least) if value > 0 else 0.0 for value in front], len(front), rows, top=top)
    shaded = [0 if top <= 0 else round(max(value, 0) / top * rows) for value in behind] or [0] * len(front)
    drawn = []
    for number, row in enumerate(whole):
        spans: list[Span] = []
        for block, height in zip(row, shaded, strict=True):
            covered = block == " " and height > rows - 1 - number
            tone = Tone.DIM if covered else Tone.GRAPH
            if spans and spans[-1].tone is tone:
                spans[-1] = Span(spans[-1].text + ("░" if covered else block), tone)
            else:
                spans.append(Span("░" if covered else block, tone))
        drawn.append(spans)
    return drawn
