"""Matrix products with float32 activations, for any number of rows.

:mod:`serai.kernels.exact` defines the bits. Here outputs are dealt to tasks: a task owns some blocks of sixteen outputs
for all rows of the call, so every weight is read once. :mod:`serai.kernels.exact_tiles` has plain weights times many
rows, :mod:`serai.kernels.matmul_fast` is the 8-bit counterpart.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import q8, threads
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.deal import deal, existing, put
from serai.kernels.exact import EXACT_ROWS, EXACT_STATE_BYTES, many_rows, one_row
from serai.kernels.exact_tiles import bf16_tiles, f32_tiles, is_worth_tiles, tiled_product
from serai.kernels.matrix import GROUP, Format, Matrix
from serai.kernels.memory import addr, f32_at
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


@inline
def _four(base: int, size: int, b0: int, b1: int, b2: int, b3: int) -> Any:
    return (base + b0 * size, base + b1 * size, base + b2 * size, base + b3 * size)


@thin
def _task(
    task: int, eight: Any, one: Any, scale: Any, sizes: Any, w: Any, shape: Any, chunk: int, x: Any, y: Any
) -> None:
    """``chunk`` units of outputs; a unit is four (one row) or two (more rows) distant blocks of one head.

    ``w = (data, scales)`` addresses, ``shape = (heads, outputs, columns)``, ``x = (address, row pitch, head pitch,
    rows)`` and ``y = (address, row pitch, head pitch, add)``, pitches in bytes.
    """
    heads, outputs, cols = shape
    x_at, x_pitch, x_head, count = x
    y_at, y_pitch, y_head, add = y
    blocks = (outputs + 15) // 16
    width = 4 if count == 1 else 2
    apart = (blocks + width - 1) // width
    block_bytes, scale_bytes = cols * sizes[0], cols // sizes[1] * sizes[2]
    state = stack_bytes(EXACT_STATE_BYTES)
    begin, end = task * chunk, min((task + 1) * chunk, heads * apart)
    # Groups of rows outside, so that a group and the weights of all the task's units stay in cache for each other.
    for row in range(0, count, EXACT_ROWS):
        for unit in range(begin, end):
            head, b0 = unit // apart, unit % apart
            b1, b2, b3 = b0 + apart, b0 + 2 * apart, b0 + 3 * apart
            r1, r2, r3 = existing(b1, blocks), existing(b2, blocks), existing(b3, blocks)
            data, scales = w[0] + head * blocks * block_bytes, w[1] + head * blocks * scale_bytes
            x_here, y_here = x_at + head * x_head, y_at + head * y_head
            if count == 1:
                streams = _four(data, block_bytes, b0, r1, r2, r3)
                factors = _four(scales, scale_bytes, b0, r1, r2, r3)
                v0, v1, v2, v3 = one_row(eight, one, scale, sizes, streams, factors, cols, x_here)
                put(y_here + 64 * b0, v0, outputs - 16 * b0, add)
                put(y_here + 64 * b1, v1, outputs - 16 * b1, add)
                put(y_here + 64 * b2, v2, outputs - 16 * b2, add)
                put(y_here + 64 * b3, v3, outputs - 16 * b3, add)
                continue
            pair = (data + b0 * block_bytes, data + r1 * block_bytes)
            pair_scales = (scales + b0 * scale_bytes, scales + r1 * scale_bytes)
            n = min(EXACT_ROWS, count - row)
            rows = (x_here + row * x_pitch, x_pitch, 0)
            many_rows(eight, one, scale, sizes, pair, pair_scales, cols, rows, n, state)
            for i in range(n):
                at, sums = y_here + (row + i) * y_pitch, state + 256 * i
                put(at + 64 * b0, f32_at(sums), outputs - 16 * b0, add)
                put(at + 64 * b1, f32_at(sums + 64), outputs - 16 * b1, add)


@inline
def _f32_task(task: int, w: Any, shape: Any, chunk: int, x: Any, y: Any) -> None:
    sizes = (F32_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _task(task, f32_columns, f32_column, unit_scale, sizes, w, shape, chunk, x, y)


@inline
def _bf16_task(task: int, w: Any, shape: Any, chunk: int, x: Any, y: Any) -> None:
    sizes = (BF16_COLUMN_BYTES, PLAIN_BLOCK, 0)
    _task(task, bf16_columns, bf16_column, unit_scale, sizes, w, shape, chunk, x, y)


@inline
def _mxfp4_task(task: int, w: Any, shape: Any, chunk: int, x: Any, y: Any) -> None:
    sizes = (COLUMN_BYTES, GROUP, SCALE_BYTES)
    _task(task, eight_columns, no_column, half_scales, sizes, w, shape, chunk, x, y)


@inline
def _q8_task(task: int, w: Any, shape: Any, chunk: int, x: Any, y: Any) -> None:
    sizes = (q8.COLUMN_BYTES, GROUP, q8.SCALE_BYTES)
    _task(task, q8.eight_columns, no_column, q8.block_scales, sizes, w, shape, chunk, x, y)


@thin
def _product(body: Any, column_bytes: int, w: Any, shape: Any, x: Any, x_at: Any, y: Any, y_at: Any) -> None:
    """Deal one product; ``x_at = (column, columns between heads)``, ``y_at`` the same and whether to add."""
    heads, outputs, cols = shape
    rows = x.shape[0]
    width = 4 if rows == 1 else 2
    units = heads * (((outputs + 15) // 16 + width - 1) // width)
    chunk, tasks, spread = deal(units, width * cols * column_bytes, rows)
    x_part = (addr(x, x_at[0]), 4 * x.shape[1], 4 * x_at[1], rows)
    y_part = (addr(y, y_at[0]), 4 * y.shape[1], 4 * y_at[1], y_at[2])
    parallel_for(tasks, spread, body, (w, shape, chunk, x_part, y_part))


_SIGNATURE = (
    "void(f32[:, ::1], UniTuple(i64, 2), {}[::1], u8[::1], UniTuple(i64, 3), f32[:, ::1], Tuple((i64, i64, b1)))"
)
_F32Array = NDArray[np.float32]
_Bytes = NDArray[np.uint8]
_XAt = tuple[int, int]
_YAt = tuple[int, int, bool]
_Shape = tuple[int, int, int]


@kernel(_SIGNATURE.format("f32"), before=threads.start)
def _matmul_f32(
    x: _F32Array, x_at: _XAt, data: _F32Array, scales: _Bytes, shape: _Shape, out: _F32Array, out_at: _YAt
) -> None:
    if is_worth_tiles(x.shape[0], shape):
        tiled_product(f32_tiles, F32_COLUMN_BYTES, addr(data, 0), shape, x, x_at, out, out_at)
    else:
        _product(_f32_task, F32_COLUMN_BYTES, (addr(data, 0), addr(scales, 0)), shape, x, x_at, out, out_at)


@kernel(_SIGNATURE.format("u16"), before=threads.start)
def _matmul_bf16(
    x: _F32Array, x_at: _XAt, data: NDArray[np.uint16], scales: _Bytes, shape: _Shape, out: _F32Array, out_at: _YAt
) -> None:
    if is_worth_tiles(x.shape[0], shape):
        tiled_product(bf16_tiles, BF16_COLUMN_BYTES, addr(data, 0), shape, x, x_at, out, out_at)
    else:
        _product(_bf16_task, BF16_COLUMN_BYTES, (addr(data, 0), addr(scales, 0)), shape, x, x_at, out, out_at)


@kernel(_SIGNATURE.format("u8"), before=threads.start)
def _matmul_mxfp4(
    x: _F32Array, x_at: _XAt, data: _Bytes, scales: _Bytes, shape: _Shape, out: _F32Array, out_at: _YAt
) -> None:
    _product(_mxfp4_task, COLUMN_BYTES, (addr(data, 0), addr(scales, 0)), shape, x, x_at, out, out_at)


@kernel(_SIGNATURE.format("u8"), before=threads.start)
def _matmul_q8(
    x: _F32Array, x_at: _XAt, data: _Bytes, scales: _Bytes, shape: _Shape, out: _F32Array, out_at: _YAt
) -> None:
    _product(_q8_task, q8.COLUMN_BYTES, (addr(data, 0), addr(scales, 0)), shape, x, x_at, out, out_at)


_KERNELS: dict[Format, Any] = {
    Format.F32: _matmul_f32,
    Format.BF16: _matmul_bf16,
    Format.MXFP4: _matmul_mxfp4,
    Format.Q8: _matmul_q8,
}


def matmul(
    x: NDArray[np.float32],
    x_col: int,
    w: Matrix,
    out: NDArray[np.float32],
    out_col: int,
    add: bool = False,
    *,
    x_stride: int = 0,
    out_stride: int = 0,
) -> None:
    """``out[:, out_col + n] = sum_k x[:, x_col + k] * w[n, k]`` with float32 activations; ``add`` adds to ``out``.

    ``x`` is float32 ``[R, Wx]``, ``out`` float32 ``[R, Wo]``, both C-contiguous and not overlapping. With several
    heads, head h reads from ``x_col + h * x_stride`` and writes from ``out_col + h * out_stride``. Raises ValueError
    when the columns do not fit, TypeError for another dtype or layout.
    """
    rows = x.shape[0]
    last = w.heads - 1
    check_columns("x", x, rows, x_col, x_col + last * x_stride, w.cols)
    check_columns("out", out, rows, out_col, out_col + last * out_stride, w.rows)
    if last and out_stride < w.rows:
        raise ValueError(f"heads of {w.rows} outputs overlap with out_stride {out_stride}.")
    shape = (w.heads, w.rows, w.cols)
    _KERNELS[w.format](x, (x_col, x_stride), w.data, w.scales, shape, out, (out_col, out_stride, add))


def check_columns(name: str, array: NDArray[Any], rows: int, first: int, last: int, columns: int) -> None:
    """Raise ValueError unless ``array`` has ``rows`` rows and the columns first.. and last..last + columns."""
    if (
        array.ndim != 2
        or array.shape[0] != rows
        or first < 0
        or last < 0
        or max(first, last) + columns > array.shape[1]
    ):
        raise ValueError(
            f"{name} of shape {list(array.shape)} has no {rows} rows with columns {first} to {last + columns}."
        )


# Rows of a packed matrix --------------------------------------------------------------------------------------------


@inline
def _gather_row(task: int, data: Any, shift: int, ids: Any, out: Any, cols: int) -> None:
    """Row ``ids[task]``; ``out`` holds float32 bits, elements are shifted up to them."""
    start = ids[task] // 16 * cols * 16 + ids[task] % 16
    for k in range(cols):
        out[task, k] = np.uint32(data[start + 16 * k]) << shift


@kernel("void(u16[::1], i32[::1], u32[:, ::1])", before=threads.start)
def _gather_bf16(data: NDArray[np.uint16], ids: NDArray[np.int32], out: NDArray[np.uint32]) -> None:
    parallel_for(ids.size, ids.size > 1, _gather_row, (data, 16, ids, out, out.shape[1]))


@kernel("void(u32[::1], i32[::1], u32[:, ::1])", before=threads.start)
def _gather_f32(data: NDArray[np.uint32], ids: NDArray[np.int32], out: NDArray[np.uint32]) -> None:
    parallel_for(ids.size, ids.size > 1, _gather_row, (data, 0, ids, out, out.shape[1]))


def gather_rows(matrix: Matrix, ids: NDArray[np.int32], out: NDArray[np.float32]) -> None:
    """``out[r] = matrix[ids[r]]``: F32 or BF16 weights of one head, ids int32 ``[R]``, out float32 ``[R, cols]``.

    Raises ValueError for another format, an id outside the matrix or an output of another shape.
    """
    if matrix.heads != 1 or matrix.format not in (Format.F32, Format.BF16):
        raise ValueError(f"rows can be read from F32 or BF16 matrices of one head, not from {matrix!r}.")
    if out.shape != (ids.size, matrix.cols):
        raise ValueError(f"out must have shape {[ids.size, matrix.cols]}, not {list(out.shape)}.")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < matrix.rows:
        raise ValueError(f"ids {int(ids.min())} to {int(ids.max())} are not all rows of a matrix of {matrix.rows}.")
    if matrix.format is Format.F32:
        _gather_f32(matrix.data.view(np.uint32), ids, out.view(np.uint32))
    else:
        _gather_bf16(matrix.data, ids, out.view(np.uint32))
