"""How well the expert cache does. The view is there only where experts are read from disk."""

from serai.runtime.cli.output import bytes_text
from serai.runtime.monitor.figures import bar, plot
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, fit, line

PLOT_ROWS = 5


def experts_page(model: Model, width: int) -> Page:
    """Hits, reads and their history."""
    experts = None if model.status is None else model.status.experts
    if experts is None:
        return page_of((), (line(Span(" this model's experts are all in memory, or it has none", Tone.DIM)),))
    samples = list(model.history.samples)
    latest = samples[-1] if samples else None
    reading = latest.read_bytes / latest.seconds if latest is not None and latest.seconds > 0 else 0.0
    speed = experts.read_bytes / experts.read_s if experts.read_s > 0 else 0.0
    cells = max(min(width - 34, 60), 1)
    body: list[Line] = [
        line(f" {fit('hit rate now', 20)}    —    nothing was looked up")
        if latest is None or not latest.lookups
        else _rate("hit rate now", latest.hits / latest.lookups, cells),
        _rate("since opening", experts.hit_rate, cells),
        _rate("slots filled of all", experts.slots / experts.experts if experts.experts else 0.0, cells),
        (),
        line(f" {experts.slots:,} of {experts.experts:,} experts fit in memory"),
        line(f" {experts.hits:,} lookups found theirs, {experts.misses:,} had to be read"),
        line(f" {bytes_text(experts.read_bytes)} read at {bytes_text(round(speed))}/s while reading"),
        line(f" {bytes_text(round(reading))}/s at present"),
        (),
        line(Span(f" hit rate, the last {len(samples)} statuses", Tone.HEAD)),
    ]
    rates = [sample.hits / sample.lookups if sample.lookups else 0.0 for sample in samples]
    names = ["100 %", *[""] * (PLOT_ROWS - 2), "0 %"]
    drawn = plot(rates, max(width - 12, 1), PLOT_ROWS, top=1.0)
    body.extend(line(f" {name:>8} │", Span(row, Tone.GRAPH)) for name, row in zip(names, drawn, strict=True))
    return page_of((), body)


def _rate(name: str, rate: float, cells: int) -> Line:
    return line(f" {fit(name, 20)} {100 * rate:5.1f} % ", Span(bar(rate, 1.0, cells), Tone.GRAPH))
