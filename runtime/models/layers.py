"""The four kinds of sub-layer, each from its normalised input `[rows, hidden]` to the running sum it adds to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda import kda
from serai.kernels.latents import store_latents
from serai.kernels.matmul import matmul
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import Format, Matrix
from serai.kernels.mla import attend
from serai.kernels.moe import activate, combine, experts, group, look_up, route
from serai.kernels.norms import add as add_rows
from serai.kernels.norms import copy_heads, rms_norm, sigmoid_gate
from serai.kernels.quantize import Quantized
from serai.runtime.errors import SeraiError
from serai.runtime.experts.access import Experts, Visit, Wait, pairs_of
from serai.runtime.models.batch import Batch
from serai.runtime.models.config import ModelConfig, MoeConfig
from serai.runtime.models.scratch import Scratch
from serai.runtime.models.weights import DenseWeights, KdaWeights, MlaWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class Context:
    """What every sub-layer needs besides its weights.

    `fast` chooses 8-bit activations for packed experts and for quantised projections; `looks_ahead` has experts
    guessed and read before their layer comes. `failures` collects the rows of the present pass that lack an expert
    which could not be read.
    """

    config: ModelConfig
    layout: StateLayout
    scratch: Scratch
    held_experts: Experts | None
    fast: bool
    looks_ahead: bool
    failures: dict[int, SeraiError] = field(default_factory=dict)

    @property
    def moe(self) -> MoeConfig:
        """The sizes of the mixture of experts, in a model that has one."""
        if self.config.moe is None:
            raise AssertionError("a model with a mixture-of-experts layer has its sizes in the configuration")
        return self.config.moe

    @property
    def experts(self) -> Experts:
        """Where the routed experts are, in a model that has them."""
        if self.held_experts is None:
            raise AssertionError("a model with a mixture-of-experts layer is loaded with its experts")
        return self.held_experts


def product(
    context: Context,
    x: NDArray[np.float32],
    matrices: Sequence[tuple[Matrix, int]],
    out: NDArray[np.float32],
    *,
    add: bool = False,
) -> None:
    """`out[:, start:] (+)= x @ matrix.T` for each matrix and the column where its product starts.

    `x` is `[rows, columns]`. In `fast`, quantised matrices meet 8-bit activations; all others meet float32 ones.
    """
    activations: Quantized | None = None
    for matrix, start in matrices:
        if context.fast and matrix.format in (Format.Q8, Format.MXFP4):
            rows = None if activations is not None else x
            activations = activations or context.scratch.activations(len(x), matrix.cols)
            matmul_fast(activations, matrix, out, start, add, rows=rows)
        else:
            matmul(x, 0, matrix, out, start, add)


Do = Callable[..., Any]
"""Called with a name, a function and its arguments: calls it, or has what it does done (`replay.py`)."""

LooksAhead = Callable[[MoeWeights, NDArray[np.float32], NDArray[np.float32], NDArray[np.float32] | None], None]
"""Given a layer's weights, the outputs of its experts so far (zeros for the rest), the weights of the picks and the
shared experts' inner activations, has something read for the layer after it."""


def kda_layer(
    context: Context,
    weights: KdaWeights,
    index: int,
    batch: Batch,
    normed: NDArray[np.float32],
    running: NDArray[np.float32],
    *,
    add: bool,
) -> None:
    """Kimi Delta Attention, the `index`-th of its kind; writes (or adds to) `running`."""
    shape, scratch, rows = context.config.kda, context.scratch, batch.rows
    columns = weights.projections.columns
    projected = scratch.view("projected", rows, weights.projections.width)
    product(context, normed, weights.projections.matrices, projected)
    decay = scratch.view("wide", rows, shape.width)
    matmul(projected, columns["decay"], weights.decay, decay, 0)
    gate, gate_column = projected, columns["gate"]
    if weights.gate is not None:
        gate, gate_column = scratch.view("second", rows, shape.width), 0
        matmul(projected, columns["gate"], weights.gate, gate, 0)
    mixed = scratch.view("mixed", rows, shape.width)
    kda(
        projected,
        columns["q"],
        columns["k"],
        columns["v"],
        decay,
        0,
        projected,
        columns["beta"],
        gate,
        gate_column,
        weights.conv,
        weights.decay_rate,
        weights.dt_bias,
        weights.o_norm,
        context.config.rms_norm_eps,
        shape.gate_lower_bound or 0.0,
        shape.heads,
        shape.head_dim,
        batch.seg_start,
        batch.state_in,
        batch.state_out,
        index * prod(context.layout.kda_shape[1:]),
        prod(context.layout.kda_shape) + index * prod(context.layout.conv_shape[1:]),
        mixed,
        0,
        scratch.kda,
    )
    product(context, mixed, [(weights.out, 0)], running, add=add)


def mla_layer(
    context: Context,
    weights: MlaWeights,
    index: int,
    batch: Batch,
    normed: NDArray[np.float32],
    running: NDArray[np.float32],
    *,
    add: bool,
) -> None:
    """Multi-head latent attention in absorbed form, the `index`-th of its kind; writes (or adds to) `running`."""
    config, shape, scratch, rows = context.config, context.config.mla, context.scratch, batch.rows
    columns = weights.projections.columns
    projected = scratch.view("projected", rows, weights.projections.width)
    product(context, normed, weights.projections.matrices, projected)
    queries, query_column = projected, columns["q"]
    if weights.q_norm is not None and weights.q_b is not None:
        rank = len(weights.q_norm)
        low = scratch.view("wide", rows, rank)
        rms_norm(projected, columns["q"], rank, weights.q_norm, config.latent_norm_eps, low, 0)
        queries, query_column = scratch.view("mixed", rows, shape.heads * shape.query_dim), 0
        product(context, low, [(weights.q_b, 0)], queries)

    width, lora = shape.latent_width, shape.kv_lora_rank
    absorbed = scratch.view("wide", rows, shape.heads * width)
    matmul(queries, query_column, weights.key_up, absorbed, 0, x_stride=shape.query_dim, out_stride=width)
    # The last `rope_dim` numbers of query and key meet unchanged (no rotation), so they pass into latent space as is.
    last = query_column + shape.nope_dim
    copy_heads(queries, last, shape.query_dim, absorbed, lora, width, shape.heads, shape.rope_dim)

    pages = (batch.seg_start, batch.seg_pos, batch.page_addr, batch.page_start, context.layout.page_tokens)
    offset = index * context.layout.page_tokens * context.layout.row_items
    size = context.layout.latent_type.dtype.itemsize
    store_latents(
        projected, columns["latent"], weights.kv_norm, config.latent_norm_eps, shape.rope_dim, *pages, offset, size
    )
    latents = scratch.view("mixed", rows, shape.heads * lora)
    scale = shape.query_dim**-0.5
    pairs = context.fast and context.layout.latent_type is not LatentType.FLOAT32
    attend(absorbed, scale, shape.heads, lora, shape.rope_dim, *pages, offset, size, pairs, latents, scratch.mla)
    values = scratch.view("second", rows, shape.heads * shape.v_dim)
    matmul(latents, 0, weights.value_up, values, 0, x_stride=lora, out_stride=shape.v_dim)
    if shape.output_gate:
        sigmoid_gate(values, 0, projected, columns["gate"], shape.heads * shape.v_dim)
    product(context, values, [(weights.out, 0)], running, add=add)


def dense_layer(
    context: Context, weights: DenseWeights, normed: NDArray[np.float32], running: NDArray[np.float32]
) -> None:
    """A gated feed-forward layer; adds to `running`."""
    rows = len(normed)
    columns = weights.gate_up.columns
    projected = context.scratch.view("projected", rows, weights.gate_up.width)
    product(context, normed, weights.gate_up.matrices, projected)
    inner = context.scratch.view("wide", rows, weights.down.cols)
    activate(projected, columns["gate"], columns["up"], weights.down.cols, context.config.activation, inner, 0)
    product(context, inner, [(weights.down, 0)], running, add=True)


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
    scratch, picks = context.scratch, context.scratch.picks(len(normed))
    most = min(picks.size, context.moe.experts)
    look_up(addresses, scratch.distinct[:most], scratch.addresses[:most])
    beside = beside_experts(context, weights, normed)
    run_experts(context, beside, scratch.addresses[:most], scratch.starts[: most + 1], scratch.pairs[: picks.size])
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
            each = _outputs(context, len(normed))
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
    addresses: NDArray[np.int64],
    starts: NDArray[np.int32],
    pairs: NDArray[np.int32],
) -> None:
    """What the experts at `addresses` make of the rows of their pairs, each pair's output at its own place.

    Each is kept until all are there, since experts come in any order.
    """
    scratch, held, k = context.scratch, context.experts, context.moe.experts_per_token
    inner = scratch.view("inner", len(inputs.rows) * k, held.layout.inner)
    experts(
        inputs.rows,
        inputs.column,
        held.layout,
        addresses,
        starts,
        pairs,
        k,
        context.config.activation,
        inner,
        _outputs(context, len(inputs.rows)),
        fast=context.fast,
        quantised=scratch.quantised,
    )


def _outputs(context: Context, rows: int) -> NDArray[np.float32]:
    """Of each expert for each row that picked it, float32 `[rows * picks, latent]`."""
    return context.scratch.view("expert_out", rows * context.moe.experts_per_token, context.moe.latent)


def add_each(context: Context, weights: MoeWeights, beside: Beside, running: NDArray[np.float32]) -> None:
    """Sum what each routed expert gave, and add that and the shared ones' part."""
    moe, scratch, rows = context.moe, context.scratch, len(running)
    routed = scratch.view("mixed", rows, moe.latent)
    combine(_outputs(context, rows), scratch.view("pick_weights", rows, moe.experts_per_token), routed)
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
            run_experts(context, inputs, batch.addresses, some_starts, some_pairs)
        elif not visit.finished:
            if before_the_last is not None and visit.is_draining:
                before_the_last()
                before_the_last = None
            yield visit.wait
    for place, error in visit.failures.items():
        lost = pairs[starts[place] : starts[place + 1]]
        _outputs(context, len(inputs.rows))[lost] = 0
        context.failures.update((int(pair) // k, error) for pair in lost)
