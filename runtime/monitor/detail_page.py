"""One session: what it says, its figures, its memory against full attention's, its nodes, and what happened to it."""

from collections.abc import Sequence

from serai.runtime.cli.output import bytes_text, counted
from serai.runtime.memory.attention import PUBLISHED, AttentionCost
from serai.runtime.monitor.figures import bar, overlaid, rate_text, sparkline
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.nodes_page import node_mark, node_text
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.passages import passage_lines
from serai.runtime.monitor.sessions_page import doing_text
from serai.runtime.monitor.text import Line, Span, Tone, beside, fit, fit_right, line, rule
from serai.runtime.status import SessionStatus

PLOT_ROWS = 5
COST_NAME_CELLS = 36
SHOWN_NODES = 6
SHOWN_EVENTS = 6
TWO_COLUMNS = 120
"""From this width on the text stands beside the figures."""
LEAST_TEXT_LINES = 5


def detail_page(model: Model, width: int, height: int) -> Page:
    """The selected session; its last known figures where it is gone."""
    one = model.session(model.selected)
    if one is None:
        return page_of((), (line(Span(" that session is no longer there; esc goes back", Tone.DIM)),))
    head = (
        line(" ", Span(fit(one.label or "(no label)", max(width - 30, 1)), Tone.STRONG), Span(f" {one.id}", Tone.DIM)),
    )
    room = max(height - len(head), 1)
    if width >= TWO_COLUMNS:
        left = width * 9 // 20
        figures = [*_figures(model, one, left), (), *_rest(model, one, left)]
        return page_of(head, beside(figures, _text(model, one, width - left - 3, room), left))
    figures = _figures(model, one, width)
    text = _text(model, one, width, max(room - len(figures), LEAST_TEXT_LINES))
    return page_of(head, [*figures, *text, (), *_rest(model, one, width)])


def _rest(model: Model, one: SessionStatus, width: int) -> list[Line]:
    return [
        *_growth(model, one, width),
        (),
        *_nodes(model, width),
        (),
        *_elsewhere(model, one, width),
        (),
        *_events(model, one, width),
    ]


def _figures(model: Model, one: SessionStatus, width: int) -> list[Line]:
    parent = model.session(one.parent)
    came = "a tree's first session" if one.parent is None else f"forked from {_name(parent, one.parent)}"
    forks = sum(other.parent == one.id for other in model.sessions())
    spark = sparkline(tuple(model.history.of(one.id).tokens_s), max(min(width - 50, 40), 1))
    reused = 100 * one.reused_tokens / one.position if one.position else 0.0
    lines = [
        line(f" {one.tier}, {doing_text(one)} · turn {one.turn:,} · position {one.position:,}"),
        line(
            f" {bytes_text(one.own_bytes)} of its own, {bytes_text(one.shared_bytes)} shared · "
            f"{rate_text(one.tokens_s)} tok/s ",
            Span(spark.lstrip(), Tone.GRAPH),
        ),
        line(
            " "
            + fit(
                f"{one.reused_tokens:,} tokens reused ({reused:.0f} %) · {counted(forks, 'fork')} · {came}",
                max(width - 2, 1),
            )
        ),
    ]
    if one.namespace:
        lines.append(line(f" namespace {fit(one.namespace, max(width - 12, 1)).rstrip()}"))
    if one.inexact:
        lines.append(
            line(Span(" ≈ inexact: it comes from a lossy or foreign snapshot, and is never reused", Tone.WARN))
        )
    return lines


def _text(model: Model, one: SessionStatus, width: int, room: int) -> list[Line]:
    """The end of what it says, as much as there is room for; the last line is the latest."""
    detail = model.selected_detail()
    if detail is None or not detail.passages:
        why = "its text is shown to its own key only" if not model.about.may_act else "no text yet"
        return [rule("what it says", width - 1), line(Span(f"{why:>20}", Tone.DIM))]
    growing = one.doing == "generate"
    lines = passage_lines(detail.passages, width, thoughts_shown=model.thoughts_shown, growing=growing)
    shown = lines[-max(room - 1, LEAST_TEXT_LINES) :]
    more = f", {counted(len(lines) - len(shown), 'line')} before" if len(shown) < len(lines) else ""
    return [rule(f"what it says{more}", width - 1), *shown]


def _growth(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """Its memory from the first token to the present one, drawn over what full attention would have taken."""
    own, full = _own_cost(model.about.comparison), _full_cost(model.about.comparison)
    if own is None or full is None or one.position == 0:
        return _history(model, one, width)
    cells = max(width - 13, 1)
    tokens = [one.position * (cell + 1) // cells for cell in range(cells)]
    mine = [own.session_bytes(count) for count in tokens]
    theirs = [full.session_bytes(count) for count in tokens]
    top = max(*mine, *theirs, 1)
    names = [bytes_text(top), *[""] * (PLOT_ROWS - 2), "0"]
    drawn = overlaid(mine, theirs, PLOT_ROWS, top=top)
    times = theirs[-1] / mine[-1] if mine[-1] else 0.0
    return [
        rule(f"memory from token 0 to {one.position:,}", width - 1),
        *(line(f" {fit_right(name, 9)} │", *row) for name, row in zip(names, drawn, strict=True)),
        line(
            Span(" █ ", Tone.GRAPH),
            f"a session here {bytes_text(mine[-1])}  ",
            Span("░ ", Tone.DIM),
            f"full attention {bytes_text(theirs[-1])}, ",
            Span(f"{times:.1f} times as much", Tone.STRONG),
        ),
    ]


def _own_cost(costs: Sequence[AttentionCost]) -> AttentionCost | None:
    return costs[0] if costs else None


def _full_cost(costs: Sequence[AttentionCost]) -> AttentionCost | None:
    """The last of what a model is compared with is attention that keeps everything (`memory.attention`)."""
    return costs[-1] if len(costs) > 1 else None


def _history(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """Its memory over time, where the model's costs aren't known."""
    values = list(model.history.of(one.id).own_bytes)
    top = max(values, default=0)
    drawn = overlaid(values[-max(width - 13, 1) :], (), PLOT_ROWS, top=top)
    names = [bytes_text(top), *[""] * (PLOT_ROWS - 2), "0"]
    return [
        rule(f"its own memory, the last {len(values)} statuses", width - 1),
        *(line(f" {fit_right(name, 9)} │", *row) for name, row in zip(names, drawn, strict=True)),
    ]


def _nodes(model: Model, width: int) -> list[Line]:
    """The latest nodes; the page of nodes has them all."""
    detail = model.selected_detail()
    if detail is None or not detail.nodes:
        return [rule("nodes", width - 1), line(Span(" none are known", Tone.DIM))]
    count = len(detail.nodes) + detail.earlier_nodes
    lines = [rule(f"{counted(count, 'node')}, the latest first (n lists them, f forks at one)", width - 1)]
    for node in detail.nodes[: -SHOWN_NODES - 1 : -1]:
        lines.append(line(" ", node_mark(node), f" {fit_right(f'{node.position:,}', 11)}  {node_text(node)}"))
    return lines


def _elsewhere(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """Memory at this position: here, and with attention of other kinds (`attention_memory.py`)."""
    here = one.own_bytes + one.shared_bytes
    costs: list[tuple[str, int]] = [("this session", here)] if here else []
    costs.extend((cost.name, cost.session_bytes(one.position)) for cost in (*model.about.comparison, *PUBLISHED))
    most = max((size for _, size in costs), default=0)
    name_cells = min(COST_NAME_CELLS, max(width - 30, 8))
    cells = max(width - name_cells - 22, 1)
    lines = [rule(f"{one.position:,} tokens elsewhere", width - 1)]
    for number, (name, size) in enumerate(costs):
        times = f"{size / here:6.1f}×" if here and number else "       "
        tone = Tone.GRAPH if number == 0 and here else Tone.DIM
        text = f" {fit(name, name_cells)} {fit_right(bytes_text(size), 9)} {times} "
        lines.append(line(text, Span(bar(size, most, cells), tone)))
    return lines


def _events(model: Model, one: SessionStatus, width: int) -> list[Line]:
    """What this monitor saw happen to it, the latest first."""
    entries = [entry for entry in model.log if entry.session_id == one.id]
    lines = [rule("seen by this monitor, the latest first", width - 1)]
    if not entries:
        lines.append(line(Span(" nothing yet", Tone.DIM)))
    for entry in entries[: -SHOWN_EVENTS - 1 : -1]:
        lines.append(
            line(f" {entry.time}  {fit(entry.what, 12)} ", Span(fit(entry.detail, max(width - 26, 1)), Tone.DIM))
        )
    return lines


def _name(session: SessionStatus | None, session_id: str) -> str:
    return session.label if session is not None and session.label else session_id[:8]
