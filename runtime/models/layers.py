"""The four kinds of sub-layer, each from its normalised input `[rows, hidden]` to the running sum it adds to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda import kda
from serai.kernels.latents import store_latents
from serai.kernels.matmul import matmul
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import Format, Matrix
from serai.kernels.mla import attend
from serai.kernels.moe import activate, combine, experts, group, route
from serai.kernels.norms import add as add_rows
from serai.kernels.norms import rms_norm, sigmoid_gate
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
    heads = queries[:, query_column : query_column + shape.heads * shape.query_dim]
    absorbed.reshape(rows, shape.heads, width)[:, :, lora:] = heads.reshape(rows, shape.heads, shape.query_dim)[
        :, :, shape.nope_dim :
    ]

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


def moe_layer(
    context: Context,
    weights: MoeWeights,
    layer: int,
    normed: NDArray[np.float32],
    running: NDArray[np.float32],
    look_ahead: LooksAhead | None,
) -> Iterator[Wait]:
    """Routed experts (on a latent, where the model has one) and shared ones; adds to `running`.

    Pauses while experts are being read, saying what to wait for. `layer` counts all layers from 0. `look_ahead` is
    called at most once: when the last experts are being read and all others have been computed with.
    """
    moe, scratch, rows = context.moe, context.scratch, len(normed)
    scores = scratch.view("scores", rows, moe.experts)
    picks = scratch.picks(rows)
    pick_weights = scratch.view("pick_weights", rows, moe.experts_per_token)
    route_rows(context, weights, normed, scores, picks, pick_weights)
    found = group(picks, moe.experts, scratch.distinct, scratch.starts, scratch.pairs)
    # Reading begins here; what doesn't need the experts is computed meanwhile.
    visit = context.experts.visit(layer, scratch.distinct[:found], picks.size)
    try:
        source, column, projected = expert_inputs(context, weights, normed)
        shared = None
        if weights.shared_down is not None:
            shared = shared_inner(context, weights, projected, scratch.view("wide", rows, moe.shared_inner))
        each = scratch.view("expert_out", picks.size, moe.latent)
        early: Callable[[], None] | None = None
        if look_ahead is not None:
            each[:] = 0  # it sums what there is
            early = partial(look_ahead, weights, each, pick_weights, shared)
        yield from _routed_experts(context, visit, found, source, column, picks, each, early)
    finally:
        visit.close()
    routed = scratch.view("mixed", rows, moe.latent)
    combine(each, pick_weights, routed)
    add_experts(context, weights, routed, shared, running)


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


def _routed_experts(
    context: Context,
    visit: Visit,
    found: int,
    source: NDArray[np.float32],
    column: int,
    picks: NDArray[np.int32],
    each: NDArray[np.float32],
    before_the_last: Callable[[], None] | None,
) -> Iterator[Wait]:
    """What every pair's expert makes of its row's source, into `each` `[rows * picks, latent]`.

    Experts are computed with as they become available, which is why each pair's output is kept until all are there.
    """
    scratch, held = context.scratch, context.experts
    starts, pairs = scratch.starts[: found + 1], scratch.pairs[: picks.size]
    inner = scratch.view("inner", picks.size, held.layout.inner)
    while not visit.finished:
        batch = visit.take()
        if batch is not None:
            everything = len(batch.which) == found
            some_starts, some_pairs = (starts, pairs) if everything else pairs_of(batch.which, starts, pairs)
            experts(
                source,
                column,
                held.layout,
                batch.addresses,
                some_starts,
                some_pairs,
                picks.shape[1],
                context.config.activation,
                inner,
                each,
                fast=context.fast,
                quantised=scratch.quantised,
            )
        elif not visit.finished:
            if before_the_last is not None and visit.is_draining:
                before_the_last()
                before_the_last = None
            yield visit.wait
    for place, error in visit.failures.items():
        lost = pairs[starts[place] : starts[place + 1]]
        each[lost] = 0
        context.failures.update((int(pair) // picks.shape[1], error) for pair in lost)
