"""Quantising to MXFP4, the format Kimi K3 is published in (OCP Microscaling: E2M1 under E8M0).

Each run of 32 weights of a row shares a power of two. Two powers are tried and the one with the smaller squared error
kept: the smallest that makes the largest weight fit, and half of that, which cuts the largest weight off at 6 steps but
is finer for the other 31. The result is laid out as such checkpoints are, for `matrix.pack_mxfp4`.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel
from serai.kernels.memory import addr, f32_at, scalar_i32_at, store_at, store_scalar_i32_at
from serai.kernels.simd import any_of, as_f32, hmax, hsum, select, splat_i32, to_f32, to_i8, vabs, vmax
from serai.kernels.threads import parallel_for

GROUP = 32
_BIAS = 127
_LEAST_BYTE = 1
"""Scale byte 0 is read as 2^-127 by some engines and as zero by others. No float32 needs one over 253."""


@inline
def _codes(size: Any) -> Any:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 by its place; from the middle between two to the even place."""
    one, none = splat_i32(1), splat_i32(0)
    low = select(size > 0.25, one, none) + select(size >= 0.75, one, none) + select(size > 1.25, one, none)
    high = select(size > 2.5, one, none) + select(size >= 3.5, one, none) + select(size > 5.0, one, none)
    return low + select(size >= 1.75, one, none) + high


@inline
def _squared_errors(v: Any, factor: Any) -> Any:
    """Of sixteen weights rounded in steps of 1 / `factor`, in such steps."""
    size = vabs(v) * factor
    code = _codes(size)
    doubled = code + vmax(code - 4, splat_i32(0)) + select(code > 6, splat_i32(2), splat_i32(0))
    missed = size - 0.5 * to_f32(doubled)
    return missed * missed


@inline
def _nibbles(v: Any, factor: Any) -> Any:
    return _codes(vabs(v) * factor) | select(v < 0.0, splat_i32(8), splat_i32(0))


@inline
def _power(scale: int) -> Any:
    """2^(127 - scale), for scales from 1 to 253."""
    return as_f32(splat_i32(254 - scale) << 23)


@inline
def _two_bytes(codes: int) -> int:
    """Four codes, a byte each, as nibbles: the even column's is the low one."""
    pairs = codes | codes >> 4
    return pairs & 0xFF | pairs >> 8 & 0xFF00


@inline
def _quantize_32(low: Any, high: Any, packed: int, room: int) -> Any:
    """32 weights of a row to 16 bytes; gives their scale byte and the squared error."""
    largest = hmax(vmax(vabs(low), vabs(high)))
    # largest / 6 is m * 2^e with m in [0.5, 1): 2^e is the smallest power that fits, exact powers aside.
    mantissa, exponent = math.frexp(float(largest / np.float32(6)))
    if mantissa == 0.5:
        exponent -= 1
    scale = max(exponent + _BIAS, _LEAST_BYTE)
    factor = _power(scale)
    error = float(hsum(_squared_errors(low, factor) + _squared_errors(high, factor)))
    if scale > _LEAST_BYTE:
        finer = _power(scale - 1)
        other = float(hsum(_squared_errors(low, finer) + _squared_errors(high, finer)))
        if other < 4.0 * error:  # a step of the finer scale is half one of the other
            scale, factor, error = scale - 1, finer, other
    store_at(room, to_i8(_nibbles(low, factor)))
    store_at(room + 16, to_i8(_nibbles(high, factor)))
    for word in range(4):
        first, second = scalar_i32_at(room + 8 * word), scalar_i32_at(room + 8 * word + 4)
        store_scalar_i32_at(packed + 4 * word, _two_bytes(first) | _two_bytes(second) << 16)
    return scale, error * math.ldexp(1.0, 2 * (scale - _BIAS))


@inline
def _quantize_row(row: int, w: int, packed: int, scales: Any, errors: Any) -> None:
    groups, room = scales.shape[1], stack_bytes(32)
    total = 0.0
    for group in range(groups):
        block = row * groups + group
        low, high = f32_at(w + 128 * block), f32_at(w + 128 * block + 64)
        # x - x is 0 unless x is an infinity or NaN.
        if any_of(((low - low) != 0.0) | ((high - high) != 0.0)):
            total = np.nan
        else:
            scale, error = _quantize_32(low, high, packed + 16 * block, room)
            scales[row, group] = scale
            total += error
    errors[row] = total


@kernel("void(f32[:, ::1], u8[:, ::1], u8[:, ::1], f64[::1], b1)", before=threads.start)
def quantize_mxfp4_rows(
    w: NDArray[np.float32],
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    errors: NDArray[np.float64],
    spread: bool,
) -> None:
    """Float32 ``[N, K]``, K a multiple of 32, to ``packed [N, K/2]`` and ``scales [N, K/32]``, on the pool or not.

    ``errors [N]`` are the rows' squared errors, NaN for a row with a weight that is not finite.
    """
    parallel_for(len(errors), spread, _quantize_row, (addr(w, 0), addr(packed, 0), scales, errors))


def quantise_mxfp4(
    weights: NDArray[np.float32], *, spread: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], float]:
    """Float32 `[N, K]`, K a multiple of 32, as packed uint8 `[N, K/2]` (low nibble = even column) and scale bytes
    `[N, K/32]`; and the sum of the squared errors. On the pool if `spread`, else on the calling thread, of which there
    may be several. Raises ValueError for weights that are not finite, and for other numbers of columns."""
    rows, columns = weights.shape
    if columns % GROUP:
        raise ValueError(f"MXFP4 weights need a multiple of {GROUP} columns, not {columns}.")
    packed, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // GROUP), np.uint8)
    errors = np.empty(rows)
    quantize_mxfp4_rows(np.ascontiguousarray(weights), packed, scales, errors, spread)
    if np.isnan(errors).any():
        raise ValueError("weights that are not finite can't be quantised")
    return packed, scales, float(errors.sum())
