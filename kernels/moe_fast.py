"""The products of visited MXFP4 experts with 8-bit activations."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.activation import activate16
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.deal import existing, put
from serai.kernels.fast import FAST_LIST_BYTES, FAST_STATE_BYTES, group_rows
from serai.kernels.matmul_fast import mxfp4_row, mxfp4_rows
from serai.kernels.matrix import GROUP
from serai.kernels.memory import addr, f32_at, scalar_i32_at, store_at
from serai.kernels.mxfp4 import BLOCK_BYTES, SCALE_BYTES
from serai.kernels.quantize import quantize_block, quantize_into, range_of_scales
from serai.kernels.threads import parallel_for
from serai.kernels.visits import cut, list_rows, range_of, record_of, visited_of


@inline
def _inner_task(
    task: int, call: Any, offsets: Any, dims: Any, part: Any, x: Any, bits: Any, betas: Any, mid: Any
) -> None:
    """The activation of gate and up, quantised for the second product: a unit is 32 inner columns of one expert."""
    groups, mid_groups = dims[0] // GROUP, dims[1] // GROUP
    e, first_unit = task // part[0], task % part[0] * part[1]
    record = record_of(call, e)
    begin, end = range_of(call, e)
    low, high, rows = stack_bytes(FAST_STATE_BYTES), stack_bytes(FAST_STATE_BYTES), stack_bytes(FAST_LIST_BYTES)
    together = group_rows(end - begin)
    for first in range(begin, end, together):
        n = min(together, end - first)
        list_rows(call, first, n, rows)
        for unit in range(first_unit, min(first_unit + part[1], mid_groups)):
            if n == 1:
                a, b = _one_row_of_inner(record, offsets, groups, unit, x, scalar_i32_at(rows), betas)
                quantize_block(a, b, mid, unit * mid[4] + first)
                continue
            for half in range(2):
                at, scale_at = (2 * unit + half) * groups * BLOCK_BYTES, (2 * unit + half) * groups * SCALE_BYTES
                pair = (record + offsets[0] + at, record + offsets[1] + at)
                scales = (record + offsets[3] + scale_at, record + offsets[4] + scale_at)
                source = (x[0], x[1], x[2], x[3], rows)
                mxfp4_rows(pair, scales, groups, source, bits, n, low if half == 0 else high)
            # Two loops: the long chains of both in one would leave no room to overlap rows.
            for at in range(low, low + 128 * n, 128):
                store_at(at, activate16(f32_at(at), f32_at(at + 64), betas[0], betas[1]))
            for at in range(high, high + 128 * n, 128):
                store_at(at, activate16(f32_at(at), f32_at(at + 64), betas[0], betas[1]))
            for i in range(n):
                quantize_block(f32_at(low + 128 * i), f32_at(high + 128 * i), mid, unit * mid[4] + first + i)


@inline
def _one_row_of_inner(record: int, offsets: Any, groups: int, unit: int, x: Any, row: int, betas: Any) -> Any:
    """A unit's 32 activations of one row."""
    source = (x[0] + 32 * row, x[1] + 4 * row, x[2] + 4 * row, x[3], 0)
    g0, u0 = _gate_and_up(record, offsets, groups, 2 * unit, source)
    g1, u1 = _gate_and_up(record, offsets, groups, 2 * unit + 1, source)
    return activate16(g0, u0, betas[0], betas[1]), activate16(g1, u1, betas[0], betas[1])


@thin
def _gate_and_up(record: int, offsets: Any, groups: int, block: int, source: Any) -> Any:
    at, scale_at = block * groups * BLOCK_BYTES, block * groups * SCALE_BYTES
    weights = (record + offsets[0] + at, record + offsets[1] + at)
    scales = (record + offsets[3] + scale_at, record + offsets[4] + scale_at)
    return mxfp4_row(weights, scales, groups, source)


@inline
def _outer_task(task: int, call: Any, offsets: Any, dims: Any, part: Any, mid: Any, y: Any) -> None:
    """The second product: a unit is four distant blocks of sixteen latent columns of one expert."""
    latent, groups = dims[0], dims[1] // GROUP
    blocks = (latent + 15) // 16
    apart = (blocks + 3) // 4
    block_bytes, scale_bytes = groups * BLOCK_BYTES, groups * SCALE_BYTES
    e, first_unit = task // part[0], task % part[0] * part[1]
    w2, s2 = record_of(call, e) + offsets[2], record_of(call, e) + offsets[5]
    begin, end = range_of(call, e)
    state = stack_bytes(FAST_STATE_BYTES)
    together = group_rows(end - begin)
    for first in range(begin, end, together):
        n, pairs = min(together, end - first), call[2] + 4 * first
        x = (mid[0] + 32 * first, mid[1] + 4 * first, mid[2] + 4 * first, mid[4], 0)
        bits = range_of_scales(x[1], mid[4], groups, n)
        for b0 in range(first_unit, min(first_unit + part[1], apart)):
            for half in range(2):
                low, high = b0 + half * apart, b0 + (half + 2) * apart
                r_low, r_high = existing(low, blocks), existing(high, blocks)
                pair = (w2 + r_low * block_bytes, w2 + r_high * block_bytes)
                pair_scales = (s2 + r_low * scale_bytes, s2 + r_high * scale_bytes)
                if n == 1:
                    v0, v1 = mxfp4_row(pair, pair_scales, groups, x)
                    store_at(state, v0)
                    store_at(state + 64, v1)
                else:
                    mxfp4_rows(pair, pair_scales, groups, x, bits, n, state)
                for i in range(n):
                    out = y[0] + scalar_i32_at(pairs + 4 * i) * y[1]
                    put(out + 64 * low, f32_at(state + 128 * i), latent - 16 * low, False)
                    put(out + 64 * high, f32_at(state + 128 * i + 64), latent - 16 * high, False)


@kernel(
    "void(Tuple((i64[::1], i32[::1], i32[::1], i64)), Tuple((UniTuple(i64, 7), UniTuple(i64, 2))), "
    "f32[:, ::1], i64, Tuple((i8[:, :, ::1], f32[:, ::1], i32[:, :, ::1])), UniTuple(f32, 2), "
    "Tuple((i8[:, :, ::1], f32[:, ::1], i32[:, :, ::1])), f32[:, ::1])",
    before=threads.start,
)
def experts_fast(
    visit: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int],
    layout: tuple[tuple[int, ...], tuple[int, int]],
    rows: NDArray[np.float32],
    column: int,
    x: tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]],
    betas: tuple[float, float],
    mid: tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]],
    y: NDArray[np.float32],
) -> None:
    """``visit = (addresses, start, pairs, k)``, ``layout = (offsets, (latent, inner))``.

    ``x`` and ``mid`` are room for quantised rows: of the latents of ``rows``, from ``column`` on, and of the inner
    activations.
    """
    quantize_into(rows, column, x[0], x[1], x[2])
    addresses, start, pairs, k = visit
    offsets, (latent, inner) = layout
    visited = visited_of(addresses, start)
    call = (addr(addresses, 0), addr(start, 0), addr(pairs, 0), k)
    x_at = (addr(x[0], 0), addr(x[1], 0), addr(x[2], 0), x[1].shape[1])
    second = addr(mid[2], mid[1].size)
    mid_at = (addr(mid[0], 0), addr(mid[1], 0), addr(mid[2], 0), second, mid[1].shape[1])
    dims = (latent, inner)
    bits = range_of_scales(x_at[1], x_at[3], latent // GROUP, x_at[3])
    part, tasks, spread = cut(visited, inner // GROUP, 4 * (latent // GROUP) * BLOCK_BYTES, pairs.size)
    parallel_for(tasks, spread, _inner_task, (call, offsets, dims, part, x_at, bits, betas, mid_at))
    units = ((latent + 15) // 16 + 3) // 4
    part, tasks, spread = cut(visited, units, 4 * (inner // GROUP) * BLOCK_BYTES, pairs.size)
    parallel_for(tasks, spread, _outer_task, (call, offsets, dims, part, mid_at, (addr(y, 0), 4 * y.shape[1])))
