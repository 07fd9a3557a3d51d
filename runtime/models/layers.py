"""Attention of both kinds and dense feed-forward layers, each from its normalised input `[rows, hidden]` to the running
sum it adds to; `mixture.py` has the fourth kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from serai.kernels.moe import activate
from serai.kernels.norms import copy_heads, rms_norm, sigmoid_gate
from serai.kernels.quantize import Quantized
from serai.runtime.errors import SeraiError
from serai.runtime.experts.access import Experts
from serai.runtime.models.batch import Batch
from serai.runtime.models.config import ModelConfig, MoeConfig
from serai.runtime.models.scratch import Scratch
from serai.runtime.models.weights import DenseWeights, KdaWeights, MlaWeights


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

    layout, tables = context.layout, (batch.seg_start, batch.seg_pos, batch.page_addr, batch.page_start)
    pages = (*tables, layout.page_tokens, index, layout.row_bytes, layout.latent_type.dtype.itemsize)
    store_latents(projected, columns["latent"], weights.kv_norm, config.latent_norm_eps, shape.rope_dim, *pages)
    latents = scratch.view("mixed", rows, shape.heads * lora)
    scale = shape.query_dim**-0.5
    pairs = context.fast and layout.latent_type is not LatentType.FLOAT32
    attend(absorbed, scale, shape.heads, lora, shape.rope_dim, *pages, pairs, latents, scratch.mla)
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
