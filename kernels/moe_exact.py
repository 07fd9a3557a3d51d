"""The products of visited experts with float32 activations, for all weight formats."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.activation import activate16
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.deal import existing, put
from serai.kernels.exact import EXACT_LIST_BYTES, EXACT_ROWS, EXACT_STATE_BYTES, many_rows, one_row
from serai.kernels.matrix import GROUP, Format
from serai.kernels.memory import addr, f32_at, scalar_i32_at
from serai.kernels.mxfp4 import COLUMN_BYTES, SCALE_BYTES, eight_columns, half_scales, no_column
from serai.kernels.plain import (
    BF16_COLUMN_BYTES,
    F32_COLUMN_BYTES,
    PLAIN_BLOCK,
    bf16_column,
    bf16_columns,
    f32_column,
    f32_columns,
    unit_scale,
)
from serai.kernels.threads import parallel_for
from serai.kernels.visits import cut, list_rows, range_of, record_of, visited_of


@thin
def _inner_task(
    task: int,
    eight: Any,
    one: Any,
    scale: Any,
    sizes: Any,
    call: Any,
    offsets: Any,
    dims: Any,
    part: Any,
    x: Any,
    betas: Any,
    mid: Any,
) -> None:
    """The activation of gate and up: a unit is two blocks of sixteen inner columns of one expert."""
    latent, inner = dims
    blocks = (inner + 15) // 16
    block_bytes, scale_bytes = latent * sizes[0], latent // sizes[1] * sizes[2]
    e, first_unit = task // part[0], task % part[0] * part[1]
    record = record_of(call, e)
    w1, w3, s1, s3 = record + offsets[0], record + offsets[1], record + offsets[3], record + offsets[4]
    begin, end = range_of(call, e)
    state, rows = stack_bytes(EXACT_STATE_BYTES), stack_bytes(EXACT_LIST_BYTES)
    for first in range(begin, end, EXACT_ROWS):
        n = min(EXACT_ROWS, end - first)
        list_rows(call, first, n, rows)
        y = mid[0] + first * mid[1]
        for unit in range(first_unit, min(first_unit + part[1], (blocks + 1) // 2)):
            b0, b1 = 2 * unit, 2 * unit + 1
            if n == 1:
                r1 = existing(b1, blocks)
                weights = (w1 + b0 * block_bytes, w3 + b0 * block_bytes, w1 + r1 * block_bytes, w3 + r1 * block_bytes)
                scales = (s1 + b0 * scale_bytes, s3 + b0 * scale_bytes, s1 + r1 * scale_bytes, s3 + r1 * scale_bytes)
                x_row = x[0] + scalar_i32_at(rows) * x[1]
                g0, u0, g1, u1 = one_row(eight, one, scale, sizes, weights, scales, latent, x_row)
                put(y + 64 * b0, activate16(g0, u0, betas[0], betas[1]), inner - 16 * b0, False)
                put(y + 64 * b1, activate16(g1, u1, betas[0], betas[1]), inner - 16 * b1, False)
                continue
            for b in range(b0, min(b0 + 2, blocks)):
                pair, pair_scales = (
                    (w1 + b * block_bytes, w3 + b * block_bytes),
                    (s1 + b * scale_bytes, s3 + b * scale_bytes),
                )
                many_rows(eight, one, scale, sizes, pair, pair_scales, latent, (x[0], x[1], rows), n, state)
                for i in range(n):
                    gate, up = f32_at(state + 256 * i), f32_at(state + 256 * i + 64)
                    put(y + i * mid[1] + 64 * b, activate16(gate, up, betas[0], betas[1]), inner - 16 * b, False)


@thin
def _outer_task(
    task: int,
    eight: Any,
    one: Any,
    scale: Any,
    sizes: Any,
    call: Any,
    offsets: Any,
    dims: Any,
    part: Any,
    mid: Any,
    y: Any,
) -> None:
    """The second product: a unit is four distant blocks of sixteen latent columns of one expert."""
    latent, inner = dims
    blocks = (latent + 15) // 16
    apart = (blocks + 3) // 4
    block_bytes, scale_bytes = inner * sizes[0], inner // sizes[1] * sizes[2]
    e, first_unit = task // part[0], task % part[0] * part[1]
    w2, s2 = record_of(call, e) + offsets[2], record_of(call, e) + offsets[5]
    begin, end = range_of(call, e)
    state = stack_bytes(EXACT_STATE_BYTES)
    for first in range(begin, end, EXACT_ROWS):
        n = min(EXACT_ROWS, end - first)
        x, pairs = mid[0] + first * mid[1], call[2] + 4 * first
        for b0 in range(first_unit, min(first_unit + part[1], apart)):
            b1, b2, b3 = b0 + apart, b0 + 2 * apart, b0 + 3 * apart
            r1, r2, r3 = existing(b1, blocks), existing(b2, blocks), existing(b3, blocks)
            if n == 1:
                weights = (w2 + b0 * block_bytes, w2 + r1 * block_bytes, w2 + r2 * block_bytes, w2 + r3 * block_bytes)
                scales = (s2 + b0 * scale_bytes, s2 + r1 * scale_bytes, s2 + r2 * scale_bytes, s2 + r3 * scale_bytes)
                v0, v1, v2, v3 = one_row(eight, one, scale, sizes, weights, scales, inner, x)
                out = y[0] + scalar_i32_at(pairs) * y[1]
                put(out + 64 * b0, v0, latent - 16 * b0, False)
                put(out + 64 * b1, v1, latent - 16 * b1, False)
                put(out + 64 * b2, v2, latent - 16 * b2, False)
                put(out + 64 * b3, v3, latent - 16 * b3, False)
                continue
            for half in range(2):
                low, high = (b0, b1) if half == 0 else (b2, b3)
                r_low, r_high = existing(low, blocks), existing(high, blocks)
                pair = (w2 + r_low * block_bytes, w2 + r_high * block_bytes)
                pair_scales = (s2 + r_low * scale_bytes, s2 + r_high * scale_bytes)
                many_rows(eight, one, scale, sizes, pair, pair_scales, inner, (x, mid[1], 0), n, state)
                for i in range(n):
                    out = y[0] + scalar_i32_at(pairs + 4 * i) * y[1]
                    put(out + 64 * low, f32_at(state + 256 * i), latent - 16 * low, False)
                    put(out + 64 * high, f32_at(state + 256 * i + 64), latent - 16 * high, False)


@thin
def _products(
    inner_body: Any,
    outer_body: Any,
    column_bytes: int,
    visit: Any,
    layout: Any,
    x: Any,
    x_col: int,
    betas: Any,
    mid: Any,
    y: Any,
) -> None:
    """Both launches of a call; ``visit = (addresses, start, pairs, k)`` arrays, ``layout = (offsets, dims)``."""
    addresses, start, pairs, k = visit
    offsets, (latent, inner) = layout
    visited = visited_of(addresses, start)
    call = (addr(addresses, 0), addr(start, 0), addr(pairs, 0), k)
    mid_at, y_at = (addr(mid, 0), 4 * mid.shape[1]), (addr(y, 0), 4 * y.shape[1])
    units = ((inner + 15) // 16 + 1) // 2
    part, tasks, spread = cut(visited, units, 4 * latent * column_bytes, pairs.size)
    x_at = (addr(x, x_col), 4 * x.shape[1])
    parallel_for(tasks, spread, inner_body, (call, offsets, (latent, inner), part, x_at, betas, mid_at))
    units = ((latent + 15) // 16 + 3) // 4
    part, tasks, spread = cut(visited, units, 4 * inner * column_bytes, pairs.size)
    parallel_for(tasks, spread, outer_body, (call, offsets, (latent, inner), part, mid_at, y_at))


@inline
def _f32_inner(task: int, call: Any, offsets: Any, dims: Any, part: Any, x: Any, betas: Any, mid: Any) -> None:
    sizes = (F32_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _inner_task(task, f32_columns, f32_column, unit_scale, sizes, call, offsets, dims, part, x, betas, mid)


@inline
def _f32_outer(task: int, call: Any, offsets: Any, dims: Any, part: Any, mid: Any, y: Any) -> None:
    sizes = (F32_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _outer_task(task, f32_columns, f32_column, unit_scale, sizes, call, offsets, dims, part, mid, y)


@inline
def _bf16_inner(task: int, call: Any, offsets: Any, dims: Any, part: Any, x: Any, betas: Any, mid: Any) -> None:
    sizes = (BF16_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _inner_task(task, bf16_columns, bf16_column, unit_scale, sizes, call, offsets, dims, part, x, betas, mid)


@inline
def _bf16_outer(task: int, call: Any, offsets: Any, dims: Any, part: Any, mid: Any, y: Any) -> None:
    sizes = (BF16_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _outer_task(task, bf16_columns, bf16_column, unit_scale, sizes, call, offsets, dims, part, mid, y)


@inline
def _mxfp4_inner(task: int, call: Any, offsets: Any, dims: Any, part: Any, x: Any, betas: Any, mid: Any) -> None:
    sizes = (COLUMN_BYTES, GROUP, SCALE_BYTES)
    _inner_task(task, eight_columns, no_column, half_scales, sizes, call, offsets, dims, part, x, betas, mid)


@inline
def _mxfp4_outer(task: int, call: Any, offsets: Any, dims: Any, part: Any, mid: Any, y: Any) -> None:
    sizes = (COLUMN_BYTES, GROUP, SCALE_BYTES)
    _outer_task(task, eight_columns, no_column, half_scales, sizes, call, offsets, dims, part, mid, y)


_Floats = NDArray[np.float32]
_Visit = tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], int]
_Layout = tuple[tuple[int, ...], tuple[int, int]]
_Betas = tuple[float, float]
_SIGNATURE = (
    "void(Tuple((i64[::1], i32[::1], i32[::1], i64)), Tuple((UniTuple(i64, 7), UniTuple(i64, 2))), "
    "f32[:, ::1], i64, UniTuple(f32, 2), f32[:, ::1], f32[:, ::1])"
)


@kernel(_SIGNATURE, before=threads.start)
def _experts_f32(
    visit: _Visit, layout: _Layout, x: _Floats, x_col: int, betas: _Betas, mid: _Floats, y: _Floats
) -> None:
    _products(_f32_inner, _f32_outer, F32_COLUMN_BYTES, visit, layout, x, x_col, betas, mid, y)


@kernel(_SIGNATURE, before=threads.start)
def _experts_bf16(
    visit: _Visit, layout: _Layout, x: _Floats, x_col: int, betas: _Betas, mid: _Floats, y: _Floats
) -> None:
    _products(_bf16_inner, _bf16_outer, BF16_COLUMN_BYTES, visit, layout, x, x_col, betas, mid, y)


@kernel(_SIGNATURE, before=threads.start)
def _experts_mxfp4(
    visit: _Visit, layout: _Layout, x: _Floats, x_col: int, betas: _Betas, mid: _Floats, y: _Floats
) -> None:
    _products(_mxfp4_inner, _mxfp4_outer, COLUMN_BYTES, visit, layout, x, x_col, betas, mid, y)


EXACT_EXPERTS: dict[Format, Any] = {
    Format.F32: _experts_f32,
    Format.BF16: _experts_bf16,
    Format.MXFP4: _experts_mxfp4,
}
"""``kernel((addresses, start, pairs, k), (offsets, (latent, inner)), x, x_col, betas, mid, y)`` for each format."""
