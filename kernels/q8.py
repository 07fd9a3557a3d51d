"""8-bit weights: a signed byte each, a bfloat16 scale per 32 columns of a row (:mod:`serai.kernels.matrix`).

A block is 16 outputs x 32 columns: eight runs of four columns, 64 bytes each, four a row; and sixteen scales. The
scale is the row's largest magnitude over 127, rounded up to a bfloat16 so that no weight is cut.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, kernel
from serai.kernels.memory import (
    addr,
    f32_at,
    i8x64_at,
    scalar_i32_at,
    store_at,
    store_scalar_i32_at,
    u8x64_at,
    u16_at,
)
from serai.kernels.naive import Q8_LARGEST, Q8_LEAST_PEAK
from serai.kernels.simd import (
    any_of,
    as_f32,
    as_i32,
    as_u32,
    bf16_to_f32,
    hmax,
    lane,
    round_i32,
    splat_f32,
    splat_u8x64,
    to_f32,
    to_i8,
    vabs,
    vmax,
)
from serai.kernels.threads import parallel_for

BLOCK_BYTES = 512
SCALE_BYTES = 32
COLUMN_BYTES = 16
CODE_OFFSET = 128
"""What makes a weight unsigned."""
_NAN_BITS = 0x7FC0


@inline
def block_weights(block: int) -> Any:
    """A block as eight vectors of sixteen outputs x four columns, plus 128: for ``dot_chain``."""
    flip = splat_u8x64(128)
    a, b = u8x64_at(block) ^ flip, u8x64_at(block + 64) ^ flip
    c, d = u8x64_at(block + 128) ^ flip, u8x64_at(block + 192) ^ flip
    e, f = u8x64_at(block + 256) ^ flip, u8x64_at(block + 320) ^ flip
    return (a, b, c, d, e, f, u8x64_at(block + 384) ^ flip, u8x64_at(block + 448) ^ flip)


@inline
def signed_block(block: int, room: int) -> int:
    """The address of a block as signed bytes: it lies as tiles want it."""
    return block


@inline
def block_scales(scales: int) -> Any:
    """Sixteen scales."""
    return bf16_to_f32(u16_at(scales))


@inline
def _column(words: Any, column: Any) -> Any:
    """Byte ``column`` of each lane's four as float32."""
    return to_f32((words << (24 - 8 * column)) >> 24)


@inline
def eight_columns(run: int) -> Any:
    """Eight columns from the address of their 128 bytes, as eight vectors of sixteen outputs."""
    a, b = as_i32(i8x64_at(run)), as_i32(i8x64_at(run + 64))
    low = (_column(a, 0), _column(a, 1), _column(a, 2), _column(a, 3))
    return (*low, _column(b, 0), _column(b, 1), _column(b, 2), _column(b, 3))


@inline
def _quantize_32(low: Any, high: Any, codes: int, room: int) -> Any:
    """32 weights of one row to their four bytes in each of eight runs; gives their scale's bits."""
    largest = splat_f32(hmax(vmax(vabs(low), vabs(high))))
    # Up to the next bfloat16, unless it is one already.
    bits = (as_u32(largest / Q8_LARGEST) + 0xFFFF) >> 16
    inverse = 1.0 / as_f32(bits << 16)
    scale = lane(bits, 0)
    # Not `<=`, as everywhere else: weights packed by earlier builds must keep their bits, one at the edge too.
    if lane(largest, 0) < Q8_LEAST_PEAK:
        inverse, scale = splat_f32(0.0), np.uint32(0)
    # x - x is 0 unless x is an infinity or NaN, which then shows in every output.
    if any_of(((low - low) != 0.0) | ((high - high) != 0.0)):
        inverse, scale = splat_f32(0.0), np.uint32(_NAN_BITS)
        low = high = splat_f32(0.0)
    store_at(room, to_i8(round_i32(low * inverse)))
    store_at(room + 16, to_i8(round_i32(high * inverse)))
    for run in range(8):
        store_scalar_i32_at(codes + 64 * run, scalar_i32_at(room + 4 * run))
    return scale


@inline
def _quantize_block(task: int, w: int, is_wide: bool, data: int, scales: Any, rows: int, cols: int) -> None:
    """Rows ``16 * task`` and on of float32 (``is_wide``) or bfloat16 weights; rows that don't exist are zero."""
    groups, room = cols // 32, stack_bytes(64)
    zero = splat_f32(0.0)
    for group in range(groups):
        block = task * groups + group
        for i in range(16):
            low = high = zero
            if 16 * task + i < rows:
                first = (16 * task + i) * cols + 32 * group
                if is_wide:
                    low, high = f32_at(w + 4 * first), f32_at(w + 4 * first + 64)
                else:
                    low, high = bf16_to_f32(u16_at(w + 2 * first)), bf16_to_f32(u16_at(w + 2 * first + 32))
            scales[16 * block + i] = _quantize_32(low, high, data + BLOCK_BYTES * block + 4 * i, room)


@kernel("void(f32[:, ::1], i8[::1], u16[::1], b1)", before=threads.start)
def quantize_f32(w: NDArray[np.float32], data: NDArray[np.int8], scales: NDArray[np.uint16], spread: bool) -> None:
    """float32 ``[N, K]`` to Q8, K a multiple of 32, on the pool if ``spread``."""
    rows, cols = w.shape
    args = (addr(w, 0), True, addr(data, 0), scales, rows, cols)
    parallel_for((rows + 15) // 16, spread, _quantize_block, args)


@kernel("void(u16[:, ::1], i8[::1], u16[::1], b1)", before=threads.start)
def quantize_bf16(w: NDArray[np.uint16], data: NDArray[np.int8], scales: NDArray[np.uint16], spread: bool) -> None:
    """bfloat16 bits ``[N, K]`` to Q8, K a multiple of 32, on the pool if ``spread``."""
    rows, cols = w.shape
    args = (addr(w, 0), False, addr(data, 0), scales, rows, cols)
    parallel_for((rows + 15) // 16, spread, _quantize_block, args)
