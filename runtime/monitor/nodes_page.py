"""A session's nodes: the points it can be forked at, the latest first, and what forking there costs."""

from serai.runtime.cli.output import counted
from serai.runtime.monitor.detail import NodeStatus, SessionDetail
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, fit, fit_right, line

_NOTHING = "nothing is known of its nodes; they come with the session's own key, while it is live"


def node_mark(node: NodeStatus) -> Span:
    """● in the store, ◆ in memory, ○ neither."""
    if node.stored:
        return Span("●", Tone.GOOD)
    return Span("◆", Tone.GRAPH) if node.in_memory else Span("○", Tone.DIM)


def node_text(node: NodeStatus) -> str:
    """A node in words, its position apart."""
    added = f"+{node.tokens:,}" if node.tokens else "·"
    return f"turn {node.turn:<4,} {fit(node.kind, 9)}{fit_right(added, 9)}"


def nodes_page(model: Model, width: int) -> Page:
    """One line a node; the cursor stands on the one that is forked at."""
    detail = model.selected_detail()
    if detail is None or not detail.nodes:
        return page_of((), (line(Span(f" {_NOTHING}", Tone.DIM)),))
    nodes = detail.nodes[::-1]
    one = model.session(detail.session_id)
    name = detail.session_id[:8] if one is None or not one.label else one.label
    head = (
        line(" ", Span(fit(name, max(width - 40, 1)).rstrip(), Tone.STRONG), Span(f"  {_counts(detail)}", Tone.DIM)),
        line(
            Span("  ● snapshot stored", Tone.GOOD),
            Span("  ◆ in memory", Tone.GRAPH),
            Span("  ○ rebuilt by reading again", Tone.DIM),
        ),
        line(Span(fit("       position  turn      call          added    to fork here", width), Tone.HEAD)),
    )
    costs = _costs(detail)
    return Page(
        head, len(nodes), lambda index: _line(nodes[index], costs[nodes[index].id]), tuple(node.id for node in nodes)
    )


def _counts(detail: SessionDetail) -> str:
    stored = sum(node.stored for node in detail.nodes)
    return f"{counted(len(detail.nodes) + detail.earlier_nodes, 'node')}, {counted(stored, 'snapshot')} stored"


def _costs(detail: SessionDetail) -> dict[str, int]:
    """How many tokens a fork at each node reads again: those since the nearest state at or before it. The node where
    the session stands costs nothing."""
    costs, last = {}, 0
    for node in detail.nodes:
        if node.stored or node.in_memory or node.position == detail.position:
            last = node.position
        costs[node.id] = node.position - last
    return costs


def _line(node: NodeStatus, replayed: int) -> Line:
    cost = "at once" if replayed == 0 else f"reads {replayed:,} again"
    return line(node_mark(node), f" {fit_right(f'{node.position:,}', 11)}  {node_text(node)}    ", Span(cost, Tone.DIM))
