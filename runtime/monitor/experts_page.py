"""How well the expert cache does, and which experts of which layer are wanted. The view is there only where experts are
read from disk."""

from itertools import pairwise

from serai.runtime.cli.output import bytes_text
from serai.runtime.monitor.figures import bar, plot
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, beside, fit, line, rule
from serai.runtime.status import ExpertStatus, LayerHeat

PLOT_ROWS = 4
MAP_CELLS = 78
"""A layer's line with its 64 groups."""
LEAST_FIGURES = 60

_SHADES = (
    ("·", Tone.DIM),
    *[("░", Tone.COOL)] * 2,
    *[("▒", Tone.MILD)] * 2,
    *[("▓", Tone.WARM)] * 3,
    *[("█", Tone.HOT)] * 2,
)
"""How each digit of `LayerHeat.heat` is drawn: the fuller the hotter, so that it reads without colour."""


def experts_page(model: Model, width: int) -> Page:
    """Hits, reads and their history; a line a layer beside them, or below where there is no room."""
    experts = None if model.status is None else model.status.experts
    if experts is None:
        return page_of((), (line(Span(" this model's experts are all in memory, or it has none", Tone.DIM)),))
    left = width - MAP_CELLS - 3
    if left >= LEAST_FIGURES:
        return page_of((), beside(_figures(model, experts, left), _map(experts, MAP_CELLS), left))
    return page_of((), [*_figures(model, experts, width), (), *_map(experts, width)])


def _figures(model: Model, experts: ExpertStatus, width: int) -> list[Line]:
    samples = list(model.history.samples)
    latest = samples[-1] if samples else None
    reading = latest.read_bytes / latest.seconds if latest is not None and latest.seconds > 0 else 0.0
    speed = experts.read_bytes / experts.read_s if experts.read_s > 0 else 0.0
    cells = max(min(width - 34, 60), 1)
    used = experts.guesses_used / experts.guessed if experts.guessed else 0.0
    body: list[Line] = [
        rule("expert cache", width - 1),
        line(f" {fit('hit rate now', 20)}    —    nothing was looked up")
        if latest is None or not latest.lookups
        else _rate("hit rate now", latest.hits / latest.lookups, cells),
        _rate("since opening", experts.hit_rate, cells),
        _rate("look-ahead hits", used, cells),
        _rate("slots filled of all", experts.slots / experts.experts if experts.experts else 0.0, cells),
        (),
        line(f" {experts.hits:,} lookups found theirs ({experts.late:,} late), {experts.misses:,} did not"),
        line(f" {experts.guessed:,} were read ahead, {experts.guesses_used:,} of them were then wanted"),
        line(f" {experts.slots:,} of {experts.experts:,} experts fit in memory"),
        line(f" {bytes_text(experts.read_bytes)} read at {_speed(speed)} while reading, {_speed(reading)} at present"),
        (),
        rule(f"hit rate, the last {len(samples)} statuses", width - 1),
    ]
    rates = [sample.hits / sample.lookups if sample.lookups else 0.0 for sample in samples]
    names = ["100 %", *[""] * (PLOT_ROWS - 2), "0 %"]
    drawn = plot(rates, max(width - 12, 1), PLOT_ROWS, top=1.0)
    body.extend(line(f" {name:>8} │", Span(row, Tone.GRAPH)) for name, row in zip(names, drawn, strict=True))
    return body


def _speed(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.2f} GB/s"


def _rate(name: str, rate: float, cells: int) -> Line:
    return line(f" {fit(name, 20)} {100 * rate:5.1f} % ", Span(bar(rate, 1.0, cells), Tone.GRAPH))


def _map(experts: ExpertStatus, width: int) -> list[Line]:
    """A line a layer: its hit rate, how many of its experts are held, and how much each group of them is wanted."""
    legend = line(
        Span(" layer hits held  ", Tone.DIM),
        *(Span(f"{shade} {name}  ", tone) for (shade, tone), name in zip(_LEGEND, _NAMES, strict=True)),
    )
    return [rule("experts wanted lately", width - 1), legend, *(_layer(one, width) for one in experts.layers)]


_LEGEND = (_SHADES[0], _SHADES[1], _SHADES[3], _SHADES[5], _SHADES[8])
_NAMES = ("never", "seldom", "some", "often", "most")


def _layer(one: LayerHeat, width: int) -> Line:
    asked = one.hits + one.misses
    rate = f"{100 * one.hits / asked:3.0f} %" if asked else "    —"
    return line(f"{one.layer:>4} {rate:>5}{one.held:>5} ", *heat_spans(one.heat, max(width - 16, 0)))


def heat_spans(heat: str, cells: int) -> list[Span]:
    """The digits as shades, neighbours of one tone together; where there are fewer cells, the hottest of each few."""
    levels = [int(digit) if digit in _DIGITS else 0 for digit in heat]
    if len(levels) > cells:
        edges = [len(levels) * place // cells for place in range(cells + 1)] if cells else []
        levels = [max(levels[begin:end]) for begin, end in pairwise(edges)]
    spans: list[Span] = []
    for level in levels:
        shade, tone = _SHADES[level]
        if spans and spans[-1].tone is tone:
            spans[-1] = Span(spans[-1].text + shade, tone)
        else:
            spans.append(Span(shade, tone))
    return spans


_DIGITS = frozenset("0123456789")
