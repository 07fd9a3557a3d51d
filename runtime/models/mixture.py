"""A mixture of experts: rows are sent to experts, which lie in memory or are visited, and their outputs summed.

`send_rows` says who is picked; then `resident_experts`, or `visited_experts` with pauses while some are being read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.matmul import matmul
from serai.kernels.moe import activate, combine, experts, group, look_up, route
from serai.kernels.norms import add as add_rows
from serai.kernels.norms import rms_norm
from serai.runtime.experts.access import Visit, Wait, pairs_of
from serai.runtime.models.layers import Context, product
from serai.runtime.models.weights import MoeWeights

Do = Callable[..., Any]
"""Called with a name, a function and its arguments: calls it, or has what it does done (`replay.py`)."""

LooksAhead = Callable[[MoeWeights, NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None], None]
"""Given a layer's weights, the outputs of its experts so far (zeros for the rest), the weights of the picks and the
shared experts' inner activations, has something read for the layer after it."""


def send_rows(context: Context, weights: MoeWeights, normed: NDArray[np.float32]) -> None:
    """Find the experts of all rows, and the rows of each expert; both are left in the scratch."""
    moe, scratch, rows = context.moe, context.scratch, len(normed)
    scores, picks = scratch.view("scores", rows, moe.experts), scratch.picks(rows)
    route_rows(context, weights, normed, scores, picks, scratch.view("pick_weights", rows, moe.experts_per_token))
    group(picks, moe.experts, scratch.distinct, scratch.starts, scratch.pairs, scratch.found)


def resident_experts(
    context: Context,
    weights: MoeWeights,
    addresses: NDArray[np.int64],
    normed: NDArray[np.float32],
    running: NDArray[np.float32],
) -> None:
    """After `send_rows`, routed experts that all lie in memory, at `addresses`, and shared ones; adds to `running`."""
    scratch, k = context.scratch, context.moe.experts_per_token
    places = len(normed) * k
    most = min(places, context.moe.experts)
    look_up(addresses, scratch.distinct[:most], scratch.addresses[:most])
    beside = beside_experts(context, weights, normed)
    run_experts(context, beside, k, scratch.addresses[:most], scratch.starts[: most + 1], scratch.pairs[:places])
    add_each(context, weights, beside, running)


def visited_experts(
    context: Context,
    weights: MoeWeights,
    layer: int,
    normed: NDArray[np.float32],
    running: NDArray[np.float32],
    look_ahead: LooksAhead | None,
    do: Do,
) -> Iterator[Wait]:
    """As `resident_experts`, of experts that have to be visited.

    Pauses while they are being read, saying what to wait for. `layer` counts all layers from 0. `look_ahead` is called
    at most once: when the last experts are being read and all others have been computed with. `do` makes the calls.
    """
    scratch, picks = context.scratch, context.scratch.picks(len(normed))
    # Reading begins here; what doesn't need the experts is computed meanwhile.
    visit = context.experts.visit(layer, scratch.distinct[: int(scratch.found[0])], picks.size)
    try:
        beside = do("beside experts", beside_experts, context, weights, normed)
        early: Callable[[], None] | None = None
        if look_ahead is not None:
            each = _outputs(context, picks.size)
            each[:] = 0  # it sums what there is
            pick_weights = scratch.view("pick_weights", *picks.shape)
            early = partial(look_ahead, weights, each, pick_weights, beside.shared)
        yield from _in_turn(context, visit, beside, early)
    finally:
        visit.close()
    do("sum of experts", add_each, context, weights, beside, running)


@dataclass(frozen=True, slots=True)
class Beside:
    """What a layer needs no routed expert for: their inputs, `rows` from `column` on, and the shared ones' inner
    activations, if there are any."""

    rows: NDArray[np.float32]
    column: int
    shared: NDArray[np.float32] | None


def beside_experts(context: Context, weights: MoeWeights, normed: NDArray[np.float32]) -> Beside:
    """Compute what needs no routed expert."""
    source, column, projected = expert_inputs(context, weights, normed)
    if weights.shared_down is None:
        return Beside(source, column, None)
    room = context.scratch.view("wide", len(normed), context.moe.shared_inner)
    return Beside(source, column, shared_inner(context, weights, projected, room))


def run_experts(
    context: Context,
    inputs: Beside,
    picks: int,
    addresses: NDArray[np.int64],
    starts: NDArray[np.int32],
    pairs: NDArray[np.int32],
) -> NDArray[np.float32]:
    """What the experts at `addresses` make of the rows of their pairs, pair `row * picks + j` being a row's j-th.

    Gives the outputs of all pairs, each at its own place, until other rows come: experts come in any order.
    """
    scratch, layout, places = context.scratch, context.experts.layout, len(inputs.rows) * picks
    inner, out = scratch.view("inner", places, layout.inner), _outputs(context, places)
    experts(
        inputs.rows,
        inputs.column,
        layout,
        addresses,
        starts,
        pairs,
        picks,
        context.config.activation,
        inner,
        out,
        fast=context.fast,
        quantised=scratch.quantised,
    )
    return out


def _outputs(context: Context, places: int) -> NDArray[np.float32]:
    """Of an expert for a row that picked it, each at its place: float32 `[places, latent]`."""
    return context.scratch.view("expert_out", places, context.moe.latent)


def add_each(context: Context, weights: MoeWeights, beside: Beside, running: NDArray[np.float32]) -> None:
    """Sum what each routed expert gave, and add that and the shared ones' part."""
    scratch, rows, k = context.scratch, len(running), context.moe.experts_per_token
    routed = scratch.view("mixed", rows, context.moe.latent)
    combine(_outputs(context, rows * k), scratch.view("pick_weights", rows, k), routed)
    add_experts(context, weights, routed, beside.shared, running)


def expert_inputs(
    context: Context, weights: MoeWeights, normed: NDArray[np.float32]
) -> tuple[NDArray[np.float32], int, NDArray[np.float32]]:
    """What the routed experts read: rows, and the column where `latent` numbers of each begin. Beside it the projected
    input in which the shared experts find theirs, if there are any."""
    if weights.projections is None:
        return normed, 0, normed
    projected = context.scratch.view("projected", len(normed), weights.projections.width)
    product(context, normed, weights.projections.matrices, projected)
    if context.moe.has_latent:
        return projected, weights.projections.columns["latent"], projected
    return normed, 0, projected


def shared_inner(
    context: Context, weights: MoeWeights, projected: NDArray[np.float32], out: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The shared experts' inner activations `[rows, shared_inner]`, into `out`."""
    if weights.projections is None:
        raise AssertionError("shared experts have projections")
    columns = weights.projections.columns
    gate, up = columns["shared_gate"], columns["shared_up"]
    activate(projected, gate, up, context.moe.shared_inner, context.config.activation, out, 0)
    return out


def add_experts(
    context: Context,
    weights: MoeWeights,
    routed: NDArray[np.float32],
    shared: NDArray[np.float32] | None,
    running: NDArray[np.float32],
) -> None:
    """Add the sum of the routed experts `[rows, latent]`, which is spoilt, and what the shared ones make of their inner
    activations."""
    if weights.latent_up is None:
        add_rows(running, routed, running)
    else:
        if weights.latent_norm is not None:
            rms_norm(routed, 0, context.moe.latent, weights.latent_norm, context.config.rms_norm_eps, routed, 0)
        product(context, routed, [(weights.latent_up, 0)], running, add=True)
    if weights.shared_down is not None and shared is not None:
        product(context, shared, [(weights.shared_down, 0)], running, add=True)


def route_rows(
    context: Context,
    weights: MoeWeights,
    normed: NDArray[np.float32],
    scores: NDArray[np.float32],
    picks: NDArray[np.int32],
    pick_weights: NDArray[np.float32],
) -> None:
    """Which experts a layer's router picks for each row, in ascending id, and how much each counts."""
    moe = context.moe
    matmul(normed, 0, weights.router, scores, 0)
    route(
        scores,
        0,
        weights.bias,
        moe.experts_per_token,
        moe.n_group,
        moe.topk_group,
        moe.renormalize,
        moe.scaling,
        picks,
        pick_weights,
    )


def _in_turn(
    context: Context, visit: Visit, inputs: Beside, before_the_last: Callable[[], None] | None
) -> Iterator[Wait]:
    """Compute with experts as they become available."""
    scratch, k = context.scratch, context.moe.experts_per_token
    found = int(scratch.found[0])
    starts, pairs = scratch.starts[: found + 1], scratch.pairs[: len(inputs.rows) * k]
    while not visit.finished:
        batch = visit.take()
        if batch is not None:
            everything = len(batch.which) == found
            some_starts, some_pairs = (starts, pairs) if everything else pairs_of(batch.which, starts, pairs)
            run_experts(context, inputs, k, batch.addresses, some_starts, some_pairs)
        elif not visit.finished:
            if before_the_last is not None and visit.is_draining:
                before_the_last()
                before_the_last = None
            yield visit.wait
    for place, error in visit.failures.items():
        lost = pairs[starts[place] : starts[place + 1]]
        _outputs(context, len(pairs))[lost] = 0
        context.failures.update((int(pair) // k, error) for pair in lost)
