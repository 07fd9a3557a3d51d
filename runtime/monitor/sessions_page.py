"""The sessions as a table: one line each, with as many columns as the width has room for."""

from collections.abc import Callable
from dataclasses import dataclass

from serai.runtime.cli.output import bytes_text, counted
from serai.runtime.monitor.figures import duration_text, rate_text, sparkline
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page
from serai.runtime.monitor.text import Line, Span, Tone, fit, fit_right, line
from serai.runtime.monitor.tree import PAUSED, Row, Showing
from serai.runtime.status import SessionStatus

LEAST_NAME_CELLS = 16
MOST_NAME_CELLS = 60
SPARK_CELLS = 7

_TIER_TONES = {"hot": Tone.GOOD, "cold": Tone.DIM, PAUSED: Tone.WARN}


@dataclass(frozen=True, slots=True)
class _Column:
    """`rank` says in which order columns are left out when there is no room: the highest goes first."""

    heading: str
    cells: int
    rank: int
    cell: Callable[[Model, SessionStatus, int], Span]
    right: bool = False


def doing_text(one: SessionStatus) -> str:
    """What a session is doing or waiting for, in words: "generate", "tool, 12 s" (to go), "idle 3 min" (since)."""
    if one.tier == PAUSED:
        return "resumable"
    if one.doing is not None:
        return one.doing
    if one.returns_in_s is not None:
        return f"tool, {duration_text(one.returns_in_s)}"
    return f"idle {duration_text(one.idle_s)}"


def _spark(model: Model, one: SessionStatus, cells: int) -> Span:
    return Span(sparkline(tuple(model.history.of(one.id).tokens_s), cells), Tone.GRAPH)


def _doing(model: Model, one: SessionStatus, cells: int) -> Span:
    return Span(fit(doing_text(one), cells), Tone.NORMAL if one.doing is not None else Tone.DIM)


def _plain(read: Callable[[SessionStatus], str], *, right: bool = True) -> Callable[[Model, SessionStatus, int], Span]:
    place = fit_right if right else fit
    return lambda model, one, cells: Span(place(read(one), cells))


def _size(size: int) -> str:
    return "·" if size == 0 else bytes_text(size).replace(" bytes", " B")


_COLUMNS = (
    _Column("tier", 6, 0, lambda model, one, cells: Span(fit(one.tier, cells), _TIER_TONES.get(one.tier, Tone.NORMAL))),
    _Column("position", 9, 2, _plain(lambda one: f"{one.position:,}"), right=True),
    _Column("own", 7, 1, _plain(lambda one: _size(one.own_bytes)), right=True),
    _Column("shared", 7, 4, _plain(lambda one: _size(one.shared_bytes)), right=True),
    _Column("tok/s", 6, 3, _plain(lambda one: rate_text(one.tokens_s)), right=True),
    _Column("", SPARK_CELLS, 5, _spark),
    _Column("doing", 12, 1, _doing),
    _Column("turn", 5, 7, _plain(lambda one: f"{one.turn:,}"), right=True),
    _Column("reused", 9, 8, _plain(lambda one: f"{one.reused_tokens:,}" if one.reused_tokens else "·"), right=True),
    _Column("namespace", 12, 9, _plain(lambda one: one.namespace, right=False)),
    _Column("id", 26, 10, _plain(lambda one: one.id, right=False)),
)


def sessions_page(model: Model, width: int) -> Page:
    """The table, with a line on top that says what of it is shown."""
    columns, name_cells = _layout(width)
    shown = model.rows()
    known = model.sessions()
    headings = [fit("  session", name_cells + 2)]
    for column in columns:
        place = fit_right if column.right else fit
        headings.append(" " + place(column.heading, column.cells))
    head = (_summary(model, len(shown), len(known)), line(Span("".join(headings), Tone.HEAD)))
    if not shown:
        why = "no session yet" if not known else "no session matches; esc shows all again"
        return Page(head, 1, lambda index: line(Span(f"  {why}", Tone.DIM)))
    return Page(
        head,
        len(shown),
        lambda index: _row(model, shown[index], columns, name_cells),
        tuple(row.status.id for row in shown),
    )


def _summary(model: Model, shown: int, known: int) -> Line:
    parts = [f" {shown:,} of {counted(known, 'session')}" if shown != known else f" {counted(known, 'session')}"]
    parts.append(f"by {model.order.value}{', reversed' if model.reverse else ''}")
    if model.showing is not Showing.ALL:
        parts.append(f"only {model.showing.value}")
    if model.query:
        parts.append(f"with “{fit(model.query, min(len(model.query), 24)).rstrip()}”")
    waiting = 0 if model.status is None else model.status.work.waiting_for_memory
    spans = [Span(" · ".join(parts), Tone.DIM)]
    if waiting:
        spans.append(Span(f" · {waiting:,} calls wait for memory", Tone.WARN))
    return tuple(spans)


def _layout(width: int) -> tuple[list[_Column], int]:
    """The columns that fit beside a name of a readable width, and that width."""
    columns = list(_COLUMNS)

    def left() -> int:
        return width - 3 - sum(column.cells + 1 for column in columns)

    while columns and left() < LEAST_NAME_CELLS:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns, max(min(left(), MOST_NAME_CELLS), 1)


def _row(model: Model, row: Row, columns: list[_Column], name_cells: int) -> Line:
    one = row.status
    name = f"{row.guide}{'≈' if one.inexact else ''}{one.label or one.id[:8]}"
    if row.hidden:
        name += f" (+{row.hidden})"
    spans = [Span(fit(name, name_cells), Tone.NORMAL if one.tier == "hot" else Tone.DIM)]
    for column in columns:
        spans.append(Span(" "))
        spans.append(column.cell(model, one, column.cells))
    return tuple(spans)
