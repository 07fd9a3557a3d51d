"""The mixture of experts over a ragged batch: each expert once, for all rows that picked it.

:mod:`serai.kernels.route` says which rows those are, :mod:`serai.kernels.experts` how an expert lies in memory. The
products have the bits of :mod:`serai.kernels.exact` and :mod:`serai.kernels.fast`, whichever rows and experts a call
has; every pair's output is kept, and a row's are summed in ascending expert id, so nothing depends on which expert
arrived first.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.activation import Activation, activate, betas
from serai.kernels.compile import inline, kernel
from serai.kernels.experts import ExpertLayout, pack_expert
from serai.kernels.lanes import load_lanes, store_lanes
from serai.kernels.matrix import Format
from serai.kernels.memory import addr, f32_at, f32_at_n, scalar_f32_at, scalar_i32_at, store_at, store_at_n
from serai.kernels.moe_exact import EXACT_EXPERTS
from serai.kernels.moe_fast import experts_fast
from serai.kernels.quantize import Quantized, check_room
from serai.kernels.route import group, look_up, route
from serai.kernels.simd import fma, splat_f32
from serai.kernels.threads import parallel_for

__all__ = [
    "Activation",
    "ExpertLayout",
    "Format",
    "activate",
    "combine",
    "combine_some",
    "experts",
    "group",
    "look_up",
    "pack_expert",
    "route",
]

_CHUNK = 512
"""Columns of a row that are one task of :func:`combine`."""
_STRIP = 128
"""Columns of all rows that are one task of :func:`combine_some`, which must take the pairs one after the other."""


def experts(
    x: NDArray[np.float32],
    x_col: int,
    layout: ExpertLayout,
    addresses: NDArray[np.int64],
    start: NDArray[np.int32],
    pairs: NDArray[np.int32],
    k: int,
    activation: Activation,
    mid: NDArray[np.float32],
    y: NDArray[np.float32],
    *,
    fast: bool = False,
    quantised: tuple[Quantized, Quantized] | None = None,
) -> None:
    """``y[pair] = w2 @ activation(w1 @ x[row], w3 @ x[row])`` for every pair of the visited experts.

    ``x`` float32 ``[R, W]``, latents from ``x_col``. Expert i's record lies at ``addresses[i]`` (the caller keeps it
    there) and its pairs ``row * k + pick`` are ``pairs[start[i] : start[i + 1]]``, as :func:`group` gives them. A call
    may have any run of the visited experts with their part of ``start``, and the rest come later. ``mid`` float32
    ``[at least start[-1], inner]`` is scratch, ``y`` float32 ``[R * k, latent]``.

    ``fast`` uses 8-bit activations with MXFP4 weights and needs ``quantised``: scratch for at least R rows of latent
    columns and start[-1] rows of inner ones; other formats ignore it. Raises ValueError when sizes do not fit.
    """
    if start.size != addresses.size + 1:
        raise ValueError(f"{addresses.size} experts need {addresses.size + 1} starts, not {start.size}.")
    if not addresses.size:
        return
    rows, places = len(x), int(start[-1])
    if x_col < 0 or x_col + layout.latent > x.shape[1]:
        raise ValueError(f"x of shape {list(x.shape)} has no {layout.latent} columns from {x_col}.")
    if places > pairs.size or y.shape != (rows * k, layout.latent):
        raise ValueError(f"{places} pairs of {rows} rows do not fit {pairs.size} pairs and outputs {list(y.shape)}.")
    visit, where = (addresses, start, pairs, k), (layout.offsets, (layout.latent, layout.inner))
    if fast and layout.format is Format.MXFP4:
        if quantised is None:
            raise ValueError("8-bit activations need scratch: quantised=(rows of latent, pairs of inner).")
        inputs = _room(quantised[0], rows, layout.latent, "rows")
        mids = _room(quantised[1], places, layout.inner, "pairs")
        check_room(x, x_col, inputs)
        experts_fast(visit, where, x, x_col, inputs.arrays, betas(activation), mids.arrays, y)
        return
    if len(mid) < places or mid.shape[1] != layout.inner:
        raise ValueError(f"mid has shape {list(mid.shape)}, not {[places, layout.inner]}.")
    EXACT_EXPERTS[layout.format](visit, where, x, x_col, betas(activation), mid, y)


def _room(held: Quantized, rows: int, columns: int, name: str) -> Quantized:
    """Room for ``rows`` quantised rows in ``held``; raises ValueError if it has less, or other columns."""
    if held.rows < rows or held.columns != columns:
        raise ValueError(f"quantised {name} have shape {(held.rows, held.columns)}, not {(rows, columns)}.")
    return held.first(rows)


@inline
def _combine_chunk(task: int, y: int, weights: int, k: int, latent: int, out: int) -> None:
    chunks = (latent + _CHUNK - 1) // _CHUNK
    row, first = task // chunks, task % chunks * _CHUNK
    last = min(first + _CHUNK, latent)
    y, out, weights = y + row * k * 4 * latent, out + row * 4 * latent, weights + row * 4 * k
    for c in range(first, last, 16):
        left = last - c
        if left >= 16:
            total = f32_at(y + 4 * c) * splat_f32(scalar_f32_at(weights))
            for j in range(1, k):
                total = fma(f32_at(y + 4 * (j * latent + c)), splat_f32(scalar_f32_at(weights + 4 * j)), total)
            store_at(out + 4 * c, total)
        else:
            total = f32_at_n(y + 4 * c, left) * splat_f32(scalar_f32_at(weights))
            for j in range(1, k):
                at = y + 4 * (j * latent + c)
                total = fma(f32_at_n(at, left), splat_f32(scalar_f32_at(weights + 4 * j)), total)
            store_at_n(out + 4 * c, total, left)


@kernel("void(f32[:, ::1], f32[:, ::1], f32[:, ::1])", before=threads.start)
def _combine(y: NDArray[np.float32], weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    rows, latent = out.shape
    args: Any = (addr(y, 0), addr(weights, 0), weights.shape[1], latent, addr(out, 0))
    parallel_for(rows * ((latent + _CHUNK - 1) // _CHUNK), y.size > 1 << 14, _combine_chunk, args)


def combine(y: NDArray[np.float32], weights: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """``out[row] = sum_j weights[row, j] * y[row * k + j]``: w0 y0, then one fused multiply-add a pick, ascending.

    ``y`` float32 ``[R * k, latent]``, ``weights`` float32 ``[R, k]``, ``out`` float32 ``[R, latent]``. Raises
    ValueError when the shapes do not fit.
    """
    rows, k = weights.shape
    if k < 1 or out.shape[0] != rows or y.shape != (rows * k, out.shape[1]):
        raise ValueError(f"outputs {y.shape} and weights {weights.shape} do not combine to {out.shape}.")
    _combine(y, weights, out)


@inline
def _combine_strip(task: int, y: Any, pairs: int, weights: Any, out: Any) -> None:
    k, latent = weights.shape[1], out.shape[1]
    first = task * _STRIP
    last = min(first + _STRIP, latent)
    for i in range(y.shape[0]):
        pair = scalar_i32_at(pairs + 4 * i)
        weight = splat_f32(scalar_f32_at(addr(weights, pair)))
        source, target = addr(y, i * latent), addr(out, pair // k * latent)
        for c in range(first, last, 16):
            left = last - c
            term = load_lanes(source + 4 * c, left)
            if pair % k == 0:
                store_lanes(target + 4 * c, term * weight, left)
            else:
                store_lanes(target + 4 * c, fma(term, weight, load_lanes(target + 4 * c, left)), left)


@kernel("void(f32[:, ::1], i32[::1], f32[:, ::1], f32[:, ::1])", before=threads.start)
def _combine_some(
    y: NDArray[np.float32], pairs: NDArray[np.int32], weights: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    args: Any = (y, addr(pairs, 0), weights, out)
    parallel_for((out.shape[1] + _STRIP - 1) // _STRIP, y.size > 1 << 14, _combine_strip, args)


def combine_some(
    y: NDArray[np.float32], pairs: NDArray[np.int32], weights: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """:func:`combine` a few pairs at a time, in calls that bring each row's picks in ascending order, from the first.

    ``y`` float32 ``[n, latent]`` are the outputs of ``pairs`` int32 ``[n]``, where pair ``row * k + j`` is a row's j-th
    pick; ``weights`` float32 ``[R, k]``; ``out`` float32 ``[R, latent]``, of which a row means nothing before its pair
    ``row * k`` has come. The bits are those of :func:`combine`. Raises ValueError when the shapes do not fit.
    """
    if y.shape != (pairs.size, out.shape[1]) or len(out) != len(weights):
        raise ValueError(f"{pairs.size} pairs, outputs {y.shape} and weights {weights.shape} do not make {out.shape}.")
    if pairs.size and not 0 <= int(pairs.min()) <= int(pairs.max()) < weights.size:
        raise ValueError(f"pairs {int(pairs.min())} to {int(pairs.max())} are not all among {weights.size}.")
    _combine_some(y, pairs, weights, out)
