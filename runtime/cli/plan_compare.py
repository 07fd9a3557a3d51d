"""`serai plan --compare`: what a context costs in this model, in it were it built otherwise, and in others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from serai.runtime.cli.output import bytes_text, table

if TYPE_CHECKING:
    from serai.runtime.memory.attention import AttentionCost

COMPARED_CONTEXTS = (4_096, 32_768, 131_072, 1_048_576)


def comparison_table(costs: "Sequence[AttentionCost]") -> Table:
    """A line for each kind of attention, 16-bit values, a column for each context; fixed states are counted in."""
    contexts = [f"{tokens:,} tokens" for tokens in COMPARED_CONTEXTS]
    shown = table("", "each token", "whatever the context", *contexts, title="What a context costs (16-bit values)")
    for cost in costs:
        sizes = (bytes_text(cost.session_bytes(tokens)) for tokens in COMPARED_CONTEXTS)
        shown.add_row(cost.name, bytes_text(cost.token_bytes), bytes_text(cost.fixed_bytes), *sizes)
    return shown
