"""Matrix products with 8-bit activations and packed weights. :mod:`serai.kernels.fast` defines the bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import mxfp4, q8, threads
from serai.kernels.amx import HAS_TILES
from serai.kernels.chains import dot_chain, stack_bytes, wide_dot_chain
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.deal import deal, existing, put
from serai.kernels.fast import FAST_STATE_BYTES, few_rows, group_rows, packed_row, packed_rows
from serai.kernels.matmul import check_columns
from serai.kernels.matrix import Format, Matrix
from serai.kernels.memory import addr, f32_at
from serai.kernels.quantize import SCALE_RANGE_ROWS, Quantized, check_room, quantize_into, range_of_scales
from serai.kernels.scale_tables import TABLE_LEAST_ROWS, TABLES_BYTES, products_are_exact, table_rows
from serai.kernels.threads import parallel_for


@thin
def mxfp4_rows(weights: Any, scales: Any, groups: int, x: Any, bits: Any, count: int, state: int) -> None:
    """:func:`serai.kernels.fast.packed_rows` for MXFP4; ``bits`` is what
    :func:`serai.kernels.quantize.range_of_scales` says of the rows."""
    sizes = (mxfp4.BLOCK_BYTES, mxfp4.SCALE_BYTES)
    unsigned = mxfp4.block_weights
    if not HAS_TILES and count >= SCALE_RANGE_ROWS and mxfp4.steps_are_exact(scales, groups, bits):
        scale, product = mxfp4.exponent_steps, mxfp4.step_exponents
        few_rows(dot_chain, unsigned, scale, product, sizes, weights, scales, groups, x, count, state)
    else:
        signed, scale = mxfp4.signed_block, mxfp4.half_scales
        packed_rows(dot_chain, unsigned, signed, scale, sizes, weights, scales, groups, x, count, state)


@thin
def _q8_rows(weights: Any, scales: Any, groups: int, x: Any, bits: Any, count: int, state: int) -> None:
    sizes, unsigned, scale = (q8.BLOCK_BYTES, q8.SCALE_BYTES), q8.block_weights, q8.block_scales
    is_long = not HAS_TILES and count >= TABLE_LEAST_ROWS
    if is_long and products_are_exact(scale, scales, groups, q8.SCALE_BYTES, bits):
        tables = stack_bytes(TABLES_BYTES)
        table_rows(wide_dot_chain, unsigned, scale, sizes, weights, scales, groups, x, count, state, tables)
    else:
        packed_rows(wide_dot_chain, unsigned, q8.signed_block, scale, sizes, weights, scales, groups, x, count, state)


@thin
def mxfp4_row(weights: Any, scales: Any, groups: int, x: Any) -> Any:
    """:func:`serai.kernels.fast.packed_row` for MXFP4."""
    sizes = (mxfp4.BLOCK_BYTES, mxfp4.SCALE_BYTES)
    return packed_row(dot_chain, mxfp4.block_weights, mxfp4.half_scales, sizes, weights, scales, groups, x)


@thin
def _q8_row(weights: Any, scales: Any, groups: int, x: Any) -> Any:
    sizes = (q8.BLOCK_BYTES, q8.SCALE_BYTES)
    return packed_row(wide_dot_chain, q8.block_weights, q8.block_scales, sizes, weights, scales, groups, x)


@thin
def _task(
    task: int, one_row: Any, some_rows: Any, sizes: Any, w: Any, outputs: int, groups: int, chunk: int, x: Any, y: Any
) -> None:
    """``chunk`` units of outputs; a unit is two distant blocks.

    ``x = (codes, scales, starts, rows, range of the scales)``, ``y = (address, row pitch, add)``.
    """
    y_at, y_pitch, add = y
    codes, x_scales, starts, count, bits = x
    together = group_rows(count)
    blocks = (outputs + 15) // 16
    apart = (blocks + 1) // 2
    block_bytes, scale_bytes = groups * sizes[0], groups * sizes[1]
    state = stack_bytes(FAST_STATE_BYTES)
    begin, end = task * chunk, min((task + 1) * chunk, apart)
    # Groups of rows outside, so that a group and the weights of all the task's units stay in cache for each other.
    for row in range(0, count, together):
        for b0 in range(begin, end):
            b1 = b0 + apart
            r1 = existing(b1, blocks)
            pair = (w[0] + b0 * block_bytes, w[0] + r1 * block_bytes)
            scales = (w[1] + b0 * scale_bytes, w[1] + r1 * scale_bytes)
            if count == 1:
                v0, v1 = one_row(pair, scales, groups, (codes, x_scales, starts, 1, 0))
                put(y_at + 64 * b0, v0, outputs - 16 * b0, add)
                put(y_at + 64 * b1, v1, outputs - 16 * b1, add)
                continue
            n = min(together, count - row)
            source = (codes + 32 * row, x_scales + 4 * row, starts + 4 * row, count, 0)
            some_rows(pair, scales, groups, source, bits, n, state)
            for i in range(n):
                at, sums = y_at + (row + i) * y_pitch, state + 128 * i
                put(at + 64 * b0, f32_at(sums), outputs - 16 * b0, add)
                put(at + 64 * b1, f32_at(sums + 64), outputs - 16 * b1, add)


@inline
def _mxfp4_task(task: int, w: Any, outputs: int, groups: int, chunk: int, x: Any, y: Any) -> None:
    _task(task, mxfp4_row, mxfp4_rows, (mxfp4.BLOCK_BYTES, mxfp4.SCALE_BYTES), w, outputs, groups, chunk, x, y)


@inline
def _q8_task(task: int, w: Any, outputs: int, groups: int, chunk: int, x: Any, y: Any) -> None:
    _task(task, _q8_row, _q8_rows, (q8.BLOCK_BYTES, q8.SCALE_BYTES), w, outputs, groups, chunk, x, y)


@thin
def _product(
    body: Any, block_bytes: int, codes: Any, x_scales: Any, starts: int, w: Any, outputs: int, out: Any, out_at: Any
) -> None:
    """Deal one product; ``out_at = (column, whether to add)``."""
    groups, rows = x_scales.shape
    units = ((outputs + 15) // 16 + 1) // 2
    chunk, tasks, spread = deal(units, 2 * groups * block_bytes, rows)
    bits = range_of_scales(addr(x_scales, 0), rows, groups, rows)
    x = (addr(codes, 0), addr(x_scales, 0), starts, rows, bits)
    y = (addr(out, out_at[0]), 4 * out.shape[1], out_at[1])
    parallel_for(tasks, spread, body, (w, outputs, groups, chunk, x, y))


_SIGNATURE = (
    "void(f32[:, ::1], b1, i8[:, :, ::1], f32[:, ::1], i32[:, :, ::1], u8[::1], u8[::1], i64, f32[:, ::1], "
    "Tuple((i64, b1)))"
)
_Codes = NDArray[np.int8]
_Floats = NDArray[np.float32]
_Starts = NDArray[np.int32]
_Bytes = NDArray[np.uint8]
_At = tuple[int, bool]


@kernel(_SIGNATURE, before=threads.start)
def _fast_mxfp4(
    x: _Floats,
    quantises: bool,
    codes: _Codes,
    x_scales: _Floats,
    starts: _Starts,
    data: _Bytes,
    scales: _Bytes,
    outputs: int,
    out: _Floats,
    at: _At,
) -> None:
    if quantises:
        quantize_into(x, 0, codes, x_scales, starts)
    w = (addr(data, 0), addr(scales, 0))
    _product(_mxfp4_task, mxfp4.BLOCK_BYTES, codes, x_scales, addr(starts, 0), w, outputs, out, at)


@kernel(_SIGNATURE, before=threads.start)
def _fast_q8(
    x: _Floats,
    quantises: bool,
    codes: _Codes,
    x_scales: _Floats,
    starts: _Starts,
    data: _Bytes,
    scales: _Bytes,
    outputs: int,
    out: _Floats,
    at: _At,
) -> None:
    if quantises:
        quantize_into(x, 0, codes, x_scales, starts)
    w = (addr(data, 0), addr(scales, 0))
    second = addr(starts, x_scales.size)
    _product(_q8_task, q8.BLOCK_BYTES, codes, x_scales, second, w, outputs, out, at)


_KERNELS = {Format.MXFP4: _fast_mxfp4, Format.Q8: _fast_q8}
_NONE: _Floats = np.empty((0, 0), np.float32)


def matmul_fast(
    x: Quantized, w: Matrix, out: NDArray[np.float32], out_col: int, add: bool = False, *, rows: _Floats | None = None
) -> None:
    """``out[:, out_col + n] (+)= sum_k x[:, k] * w[n, k]`` with quantised activations and MXFP4 or Q8 weights.

    ``out`` is float32 ``[R, Wo]``, C-contiguous. With ``rows`` (float32 ``[R, at least K]``) their first K columns are
    quantised into ``x`` before: one call where there would be two. Raises ValueError for another weight format or when
    the columns do not fit, TypeError for another dtype or layout.
    """
    if x.columns != w.cols:
        raise ValueError(f"activations of {x.columns} columns do not fit weights of {w.cols}.")
    check_columns("out", out, x.rows, out_col, out_col, w.rows)
    if w.format not in _KERNELS:
        raise ValueError(f"8-bit activations meet MXFP4 and Q8 weights only, not {w.format.value}.")
    if rows is not None:
        check_room(rows, 0, x)
    source = _NONE if rows is None else rows
    at = (out_col, add)
    _KERNELS[w.format](source, rows is not None, x.codes, x.scales, x.starts, w.data, w.scales, w.rows, out, at)
