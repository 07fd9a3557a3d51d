"""Matrix products with 8-bit activations and MXFP4 weights. :mod:`serai.kernels.fast` defines the bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel
from serai.kernels.deal import deal, existing, put
from serai.kernels.fast import FAST_ROWS, FAST_STATE_BYTES, fast_rows
from serai.kernels.matmul import check_columns
from serai.kernels.matrix import Format, Matrix
from serai.kernels.memory import addr, f32_at
from serai.kernels.mxfp4 import BLOCK_BYTES
from serai.kernels.quantize import Quantized
from serai.kernels.threads import parallel_for


@inline
def _task(task: int, w: Any, outputs: int, groups: int, chunk: int, x: Any, rows: int, y: Any) -> None:
    """``chunk`` units of two distant blocks; ``x = (codes, scales, starts)``, ``y = (address, row pitch, add)``."""
    y_at, y_pitch, add = y
    blocks = (outputs + 15) // 16
    apart = (blocks + 1) // 2
    state = stack_bytes(FAST_STATE_BYTES)
    for b0 in range(task * chunk, min((task + 1) * chunk, apart)):
        b1 = b0 + apart
        r1 = existing(b1, blocks)
        pair = (w[0] + b0 * groups * BLOCK_BYTES, w[0] + r1 * groups * BLOCK_BYTES)
        scales = (w[1] + b0 * groups * 16, w[1] + r1 * groups * 16)
        for row in range(0, rows, FAST_ROWS):
            n = min(FAST_ROWS, rows - row)
            first = row * groups
            fast_rows(pair, scales, groups, (x[0] + 32 * first, x[1] + 4 * first, x[2] + 4 * first, 0), n, state)
            for i in range(n):
                at, sums = y_at + (row + i) * y_pitch, state + 128 * i
                put(at + 64 * b0, f32_at(sums), outputs - 16 * b0, add)
                put(at + 64 * b1, f32_at(sums + 64), outputs - 16 * b1, add)


@kernel("void(i8[:, ::1], f32[:, ::1], i32[:, ::1], u8[::1], u8[::1], i64, f32[:, ::1], i64, b1)", before=threads.start)
def _matmul_fast(
    codes: NDArray[np.int8],
    x_scales: NDArray[np.float32],
    starts: NDArray[np.int32],
    data: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    outputs: int,
    out: NDArray[np.float32],
    out_col: int,
    add: bool,
) -> None:
    rows, groups = x_scales.shape
    units = ((outputs + 15) // 16 + 1) // 2
    chunk, tasks, spread = deal(units, 2 * groups * BLOCK_BYTES, rows)
    w = (addr(data, 0), addr(scales, 0))
    x = (addr(codes, 0), addr(x_scales, 0), addr(starts, 0))
    y = (addr(out, out_col), 4 * out.shape[1], add)
    parallel_for(tasks, spread, _task, (w, outputs, groups, chunk, x, rows, y))


def matmul_fast(x: Quantized, w: Matrix, out: NDArray[np.float32], out_col: int, add: bool = False) -> None:
    """``out[:, out_col + n] (+)= sum_k x[:, k] * w[n, k]`` with quantised activations and MXFP4 weights.

    ``out`` is float32 ``[R, Wo]``, C-contiguous. Raises ValueError for another weight format or when the columns do
    not fit, TypeError for another dtype or layout.
    """
    rows, columns = x.codes.shape
    if w.format is not Format.MXFP4:
        raise ValueError(f"8-bit activations meet MXFP4 weights only, not {w.format.value}.")
    if columns != w.cols:
        raise ValueError(f"activations of {columns} columns do not fit weights of {w.cols}.")
    check_columns("out", out, rows, out_col, out_col, w.rows)
    _matmul_fast(x.codes, x.scales, x.starts, w.data, w.scales, w.rows, out, out_col, add)
