"""One session: its figures, what it would cost elsewhere, its memory over time and what happened to it."""

from serai.runtime.cli.output import bytes_text
from serai.runtime.memory.attention import PUBLISHED
from serai.runtime.monitor.figures import bar, counted, plot, rate_text, sparkline
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.sessions_page import doing_text
from serai.runtime.monitor.text import Line, Span, Tone, fit, fit_right, line
from serai.runtime.status import SessionStatus

PLOT_ROWS = 4
COST_NAME_CELLS = 36


def detail_page(model: Model, width: int) -> Page:
    """The selected session; its last known figures where it is gone."""
    one = model.session(model.selected)
    if one is None:
        return page_of((), (line(Span(" that session is no longer there; esc goes back", Tone.DIM)),))
    head = (
        line(" ", Span(fit(one.label or "(no label)", max(width - 30, 1)), Tone.STRONG), Span(f" {one.id}", Tone.DIM)),
    )
    body = [
        *_figures(model, one, width),
        (),
        *_elsewhere(model, one, width),
        (),
        *_growth(model, one, width),
        (),
        *_timeline(model, one, width),
    ]
    return page_of(head, body)


def _figures(model: Model, one: SessionStatus, width: int) -> list[Line]:
    parent = model.session(one.parent)
    came = "a tree's first session" if one.parent is None else f"forked from {_name(parent, one.parent)}"
    forks = sum(other.parent == one.id for other in model.sessions())
    spark = sparkline(tuple(model.history.of(one.id).tokens_s), max(min(width - 30, 60), 1))
    reused = 100 * one.reused_tokens / one.position if one.position else 0.0
    lines = [
        line(f" {one.tier}, {doing_text(one)}; turn {one.turn:,}, position {one.position:,}"),
        line(f" {bytes_text(one.own_bytes)} of its own, {bytes_text(one.shared_bytes)} shared with others"),
        line(" " + fit(f"{came}, {counted(forks, 'fork')} of its own", max(width - 2, 1))),
        line(f" {one.reused_tokens:,} tokens reused ({reused:.0f} % of its position)"),
        line(f" {rate_text(one.tokens_s):>6} tok/s ", Span(spark, Tone.GRAPH)),
    ]
    if one.namespace:
        lines.insert(3, line(f" namespace {fit(one.namespace, max(width - 12, 1)).rstrip()}"))
    if one.inexact:
        lines.append(
            line(Span(" ≈ inexact: it comes from a lossy or foreign snapshot, and is never reused", Tone.WARN))
        )
    return lines


def _elsewhere(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """Memory at this position: here, and with attention of other kinds (`attention_memory.py`)."""
    here = one.own_bytes + one.shared_bytes
    costs: list[tuple[str, int]] = [("this session", here)] if here else []
    costs.extend((cost.name, cost.session_bytes(one.position)) for cost in (*model.comparison, *PUBLISHED))
    most = max((size for _, size in costs), default=0)
    name_cells = min(COST_NAME_CELLS, max(width - 30, 8))
    cells = max(width - name_cells - 22, 1)
    lines = [line(Span(f" memory of {one.position:,} tokens", Tone.HEAD))]
    for number, (name, size) in enumerate(costs):
        times = f"{size / here:6.1f}×" if here and number else "       "
        tone = Tone.GRAPH if number == 0 and here else Tone.DIM
        text = f" {fit(name, name_cells)} {fit_right(bytes_text(size), 9)} {times} "
        lines.append(line(text, Span(bar(size, most, cells), tone)))
    return lines


def _growth(model: Model, one: SessionStatus, width: int) -> list[Line]:
    values = list(model.history.of(one.id).own_bytes)
    top = max(values, default=0)
    drawn = plot(values, max(width - 12, 1), PLOT_ROWS, top=top)
    names = [bytes_text(top), *[""] * (PLOT_ROWS - 2), "0"]
    title = line(Span(f" its own memory, the last {len(values)} statuses", Tone.HEAD))
    return [
        title,
        *(line(f" {fit_right(name, 8)} │", Span(row, Tone.GRAPH)) for name, row in zip(names, drawn, strict=True)),
    ]


def _timeline(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """What this monitor saw happen to it, the latest first."""
    entries = [entry for entry in model.log if entry.session_id == one.id]
    lines = [line(Span(" seen by this monitor, the latest first", Tone.HEAD))]
    if not entries:
        lines.append(line(Span(" nothing yet", Tone.DIM)))
    for entry in reversed(entries):
        lines.append(
            line(f" {entry.time}  {fit(entry.what, 12)} ", Span(fit(entry.detail, max(width - 26, 1)), Tone.DIM))
        )
    return lines


def _name(session: SessionStatus | None, session_id: str) -> str:
    return session.label if session is not None and session.label else session_id[:8]
