"""Where the memory goes: one bar, its figures, what is on disk, and how it was over the last minutes."""

from serai.runtime.cli.output import bytes_text
from serai.runtime.monitor.figures import Share, plot, stacked_bar
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, fit, fit_right, line
from serai.runtime.status import BudgetStatus

PLOT_ROWS = 6

_MEANING = {
    "trunk": "the model but for its routed experts",
    "scratch": "working memory of a step",
    "experts": "routed experts in memory",
    "live": "states of sessions",
    "kept": "snapshots kept for reuse by others",
    "spare": "freed buffers, ready for the next step",
    "free": "",
}


def shares(budget: BudgetStatus) -> tuple[Share, ...]:
    """The parts of the budget, in the order they are drawn; free is never below zero."""
    return (
        Share("trunk", budget.trunk_bytes, Tone.TRUNK),
        Share("scratch", budget.scratch_bytes, Tone.SCRATCH),
        Share("experts", budget.expert_bytes, Tone.EXPERTS),
        Share("live", budget.live_bytes + budget.ids_bytes, Tone.LIVE),
        Share("kept", budget.kept_bytes, Tone.KEPT),
        Share("spare", budget.spare_bytes, Tone.SPARE),
        Share("free", max(budget.free_bytes, 0), Tone.FREE),
    )


def budget_page(model: Model, width: int) -> Page:
    """The budget at one moment and over time."""
    if model.status is None:
        return page_of((), (line(Span(" nothing is known yet", Tone.DIM)),))
    status = model.status
    budget = status.budget
    cells = max(width - 2, 1)
    body: list[Line] = [line(" ", *stacked_bar(shares(budget), cells)), ()]
    for share in shares(budget):
        percent = 100 * share.amount / budget.budget_bytes if budget.budget_bytes else 0.0
        body.append(
            line(
                " ",
                Span("  ", share.tone),
                f" {fit(share.name, 9)}{fit_right(bytes_text(share.amount), 9)} {percent:5.1f} %  ",
                Span(_MEANING[share.name], Tone.DIM),
            )
        )
    body.append(_total(budget))
    if budget.reserved_bytes:
        body.append(
            line(
                f"    {fit('promised', 9)}{fit_right(bytes_text(budget.reserved_bytes), 9)}          ",
                Span("to calls under way", Tone.DIM),
            )
        )
    if status.store_bytes is not None:
        body.append(
            line(
                f"    {fit('store', 9)}{fit_right(bytes_text(status.store_bytes), 9)}          ",
                Span("on disk, outside the budget", Tone.DIM),
            )
        )
    body.extend(((), *_work(model)))
    body.extend(((), *_history(model, width, budget)))
    return page_of((), body)


def _total(budget: BudgetStatus) -> Line:
    over = -budget.free_bytes
    told = f"    {fit('budget', 9)}{fit_right(bytes_text(budget.budget_bytes), 9)}"
    if over > 0:
        return line(told, Span(f"          over by {bytes_text(over)}", Tone.BAD))
    return line(Span(told, Tone.STRONG))


def _work(model: Model) -> list[Line]:
    status = model.status
    if status is None:
        return []
    work = status.work
    return [
        line(
            f" {work.prefilled_tokens:,} tokens read, {work.decoded_tokens:,} generated, {work.reused_tokens:,} reused"
        ),
        line(
            f" {work.demotions:,} sessions moved out, {work.promotions:,} brought back; "
            f"calls waiting: {work.waiting_calls:,} for a step, {work.waiting_for_memory:,} for memory"
        ),
        line(f" timers run up to {work.loop_delay_p99_s * 1000:.1f} ms late (99th percentile)"),
    ]


def _history(model: Model, width: int, budget: BudgetStatus) -> list[Line]:
    """Sessions' memory over the statuses received, scaled to what the model leaves of the budget."""
    samples = model.history.samples
    room = budget.budget_bytes - budget.trunk_bytes - budget.scratch_bytes - budget.expert_bytes
    values = [sample.live_bytes + sample.kept_bytes for sample in samples]
    top = max(room, *values, 1)
    rows = plot(values, max(width - 12, 1), PLOT_ROWS, top=top)
    labels = [bytes_text(top), *[""] * (PLOT_ROWS - 2), "0"]
    title = Span(f" sessions' memory (live + kept), the last {len(samples)} statuses", Tone.HEAD)
    return [
        line(title),
        *(line(f" {fit_right(name, 8)} │", Span(row, Tone.GRAPH)) for name, row in zip(labels, rows, strict=True)),
    ]
