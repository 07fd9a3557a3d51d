"""What surrounds a page: the title with the connection, the tabs, the hints, and the help page."""

from rich.cells import cell_len

from serai.runtime.cli.output import bytes_text, counted
from serai.runtime.monitor import keys
from serai.runtime.monitor.figures import bar, duration_text, rate_text
from serai.runtime.monitor.model import INNER, Model, View
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, fit, line

GAUGE_CELLS = 10


def title_line(model: Model, width: int) -> Line:
    """The runtime on the left, as much as fits; the connection on the right, always."""
    right = _connection(model)
    room = width - cell_len(right.text) - 1
    return (Span(fit(_facts(model), room), Tone.STRONG), Span(" "), right) if room > 0 else (right,)


def _facts(model: Model) -> str:
    status = model.status
    if status is None:
        return f" serai · {model.source}"
    budget = status.budget
    cold = sum(one.tier == "cold" for one in status.sessions)
    rate = sum(one.tokens_s for one in status.sessions)
    used = bar(budget.used_bytes, budget.budget_bytes, GAUGE_CELLS).ljust(GAUGE_CELLS, "░")
    return (
        f" {counted(len(status.sessions), 'session')}, {cold:,} cold · {rate_text(rate) if rate else '0'} tok/s · "
        f"{used} {bytes_text(budget.used_bytes)} of {bytes_text(budget.budget_bytes)} · "
        f"{status.model} {status.precision}"
    )


def _connection(model: Model) -> Span:
    connection = model.connection
    if connection.is_live:
        return Span("● live ", Tone.GOOD) if model.about.may_act else Span("● live, read-only ", Tone.GOOD)
    if connection.retry_s == 0.0:
        return Span("… connecting ", Tone.WARN)
    again = duration_text(connection.retry_s)
    return Span(f"✗ lost {duration_text(connection.lost_s)} ago, again in {again} ", Tone.BAD)


def tabs(model: Model) -> tuple[tuple[View, str], ...]:
    """The tabs with their texts, from the left; the experts' only where experts are read from disk."""
    shown = [View.SESSIONS, View.BUDGET, View.EXPERTS, View.LOG]
    if model.status is None or model.status.experts is None:
        shown.remove(View.EXPERTS)
    numbers = {View.SESSIONS: 1, View.BUDGET: 2, View.EXPERTS: 3, View.LOG: 4}
    present = model.came_from if model.view in INNER else model.view
    return tuple(
        (view, f"[{numbers[view]} {view.value}]" if view is present else f" {numbers[view]} {view.value} ")
        for view in shown
    )


def tabs_line(model: Model) -> Line:
    """The tabs; the present one stands in brackets."""
    spans = [Span(text, Tone.STRONG if text.startswith("[") else Tone.DIM) for _, text in tabs(model)]
    if model.view in INNER:
        spans.append(Span(f" › {model.view.value}", Tone.STRONG))
    return tuple(spans)


def tab_at(model: Model, column: int) -> View | None:
    """The tab under a column of the screen."""
    for view, text in tabs(model):
        if column < len(text):
            return view
        column -= len(text)
    return None


def hints_line(model: Model, width: int) -> Line:
    """The last notice, or the reason for a lost connection, or what keys there are."""
    if model.notice:
        return line(Span(fit(f" {model.notice}", width), Tone.STRONG))
    if model.connection.problem is not None:
        return line(Span(fit(f" {model.connection.problem}", width), Tone.BAD))
    spans: list[Span] = []
    room = width
    for key in _hinted(model.view):
        text = f" {key.shown} {key.hint} "
        room -= len(text)
        if room < 0:
            break
        spans.extend((Span(f" {key.shown}", Tone.STRONG), Span(f" {key.hint} ", Tone.DIM)))
    return tuple(spans)


def _hinted(view: View) -> list[keys.Key]:
    """The keys worth naming in a view, the most needed first."""
    others = [key for key in keys.OTHERS if key.hint]
    match view:
        case View.SESSIONS:
            listed = (*keys.VIEWS, *keys.LISTING, *keys.ACTIONS)
            return [*others, *(key for key in listed if key.hint and key is not keys.BACK)]
        case View.DETAIL:
            own = [key for key in keys.VIEWS if key.action in ("nodes", "thoughts")]
            return [keys.BACK, *others, *own, *(key for key in keys.ACTIONS if key.hint)]
        case View.NODES:
            return [keys.BACK, *others, *(key for key in keys.ACTIONS if key.action in ("act('fork')", "chat"))]
        case View.HELP:
            return [keys.BACK, *others]
        case _:
            return others


def help_page() -> Page:
    """All keys."""
    body: list[Line] = []
    for title, group in keys.GROUPS:
        body.append(line(Span(f" {title}", Tone.HEAD)))
        body.extend(line(Span(f"   {key.shown:8}", Tone.STRONG), key.told) for key in group)
        body.append(())
    body.extend(
        (
            line(" The command palette (ctrl+p) finds all of this by name. The mouse works too:"),
            line(" click a session to select it, twice to open it; click a tab; turn the wheel."),
            (),
            line(" What a session says is fetched only while you have it open, only with the key it belongs"),
            line(" to, and is written to no log. Without a key a monitor sees figures, and no names."),
        )
    )
    return page_of((), body)
