"""Decoding MXFP4 blocks (:mod:`serai.kernels.matrix`) into registers.

A block is 16 outputs x 32 columns: 256 bytes of codes, 16 scale bytes. Both decodings give twice the E2M1 value, an
integer in -12..12, and the scale is halved to match. The 8-bit dot wants one unsigned operand, so for it 12 is added to
every weight, and the sum starts from -12 times the sum of the block's activations.
"""

from typing import Any

import numpy as np

from serai.kernels.compile import inline
from serai.kernels.memory import i8_at, scalar_i32_at, store_at, u8_at, u8x64_at
from serai.kernels.simd import (
    as_f32,
    as_i32,
    as_u8,
    as_u16,
    hmax,
    hmin,
    select,
    splat_f32,
    splat_i32,
    splat_u8x64,
    to_f32,
    to_i32,
    vmax,
    vmin,
)
from serai.kernels.simd_bytes import HAS_WIDE_LOOKUP, SHUFFLE_IS_FAST, lookup_64, shuffle_bytes
from serai.kernels.vec import constant, define, u8x64

BLOCK_BYTES = 256
SCALE_BYTES = 16
COLUMN_BYTES = 8
CODE_OFFSET = 12
"""What is added to twice a weight's value to make it unsigned."""

_DOUBLED_MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)
_DOUBLED = _DOUBLED_MAGNITUDES + tuple(-magnitude for magnitude in _DOUBLED_MAGNITUDES)


@define
def _offset_table(typingctx: Any) -> Any:
    """Twice the value of each code, plus 12, once in every sixteen bytes."""
    values = [value + CODE_OFFSET for value in _DOUBLED] * 4
    return u8x64(), lambda context, builder, sig, args: constant(u8x64, values)


@define
def _signed_table(typingctx: Any) -> Any:
    """Twice the value of each code, as signed bytes, once in every sixteen bytes."""
    return u8x64(), lambda context, builder, sig, args: constant(u8x64, list(_DOUBLED * 4))


@inline
def _offset_codes(codes: Any) -> Any:
    """Codes 0..15 to twice their value plus 12."""
    if SHUFFLE_IS_FAST:
        return shuffle_bytes(_offset_table(), codes)
    # E2M1 magnitudes doubled are 0 1 2 3 4 6 8 12: the code itself up to 4, then steps of 2, 2 and 4.
    code = codes & 7
    extra = select(code > 4, code - 4, splat_u8x64(0)) + select(code > 6, splat_u8x64(2), splat_u8x64(0))
    doubled = code + extra
    return select(codes > 7, CODE_OFFSET - doubled, CODE_OFFSET + doubled)


@inline
def _low(packed: Any) -> Any:
    if HAS_WIDE_LOOKUP:
        return lookup_64(_offset_table(), packed)
    return _offset_codes(packed & 15)


@inline
def _high(packed: Any) -> Any:
    shifted = as_u8(as_u16(packed) >> 4)
    if HAS_WIDE_LOOKUP:
        return lookup_64(_offset_table(), shifted)
    return _offset_codes(shifted & 15)


@inline
def block_weights(block: int) -> Any:
    """A block as eight vectors of sixteen outputs x four columns, twice the value plus 12: for ``dot_chain``."""
    a, b = u8x64_at(block), u8x64_at(block + 64)
    c, d = u8x64_at(block + 128), u8x64_at(block + 192)
    return (_low(a), _high(a), _low(b), _high(b), _low(c), _high(c), _low(d), _high(d))


@inline
def signed_block(block: int, room: int) -> int:
    """A block as eight lines of sixteen outputs x four columns, twice the value, written to ``room``: for tiles."""
    for run in range(0, BLOCK_BYTES, 64):
        packed = u8x64_at(block + run)
        store_at(room + 2 * run, shuffle_bytes(_signed_table(), packed & 15))
        store_at(room + 2 * run + 64, shuffle_bytes(_signed_table(), as_u8(as_u16(packed) >> 4) & 15))
    return room


@inline
def _column(bytes4: Any, column: Any) -> Any:
    """Byte ``column`` of each lane's four, less 12, as float32."""
    return to_f32(((as_i32(bytes4) >> (8 * column)) & 255) - CODE_OFFSET)


@inline
def eight_columns(run: int) -> Any:
    """Eight columns from the address of their 64 bytes, as eight vectors of sixteen outputs, twice the value."""
    packed = u8x64_at(run)
    low, high = _low(packed), _high(packed)
    return (
        _column(low, 0),
        _column(low, 1),
        _column(low, 2),
        _column(low, 3),
        _column(high, 0),
        _column(high, 1),
        _column(high, 2),
        _column(high, 3),
    )


@inline
def half_scales(scales: int) -> Any:
    """Half of each of sixteen E8M0 scales: 2^(e - 128), also for e = 0, where it is below the normal numbers."""
    return as_f32(vmax(to_i32(u8_at(scales)) << 23, 0x00400000)) * 0.5


# Half a scale is a power of two, so multiplying by it is an addition to the exponent: the same number while that stays
# within a float32's normal ones. Units that add integers have time where those that multiply are what a dot waits for.
_NORMAL, _HALF = 254, 128


@inline
def exponent_steps(scales: int) -> Any:
    """What half of each of sixteen scales adds to the bits of a float32."""
    # e - 128 as a signed byte: a subtraction would be moved out to where each row's number is added.
    return to_i32(i8_at(scales) ^ np.int8(-_HALF)) << 23


@inline
def step_exponents(steps: Any, number: int) -> Any:
    """The float32 at an address times half of each of sixteen scales."""
    return as_f32(steps + splat_i32(scalar_i32_at(number)))


@inline
def steps_are_exact(scales: Any, groups: int, bits: Any) -> Any:
    """Whether :func:`step_exponents` gives the product for numbers in a range and two blocks' scales.

    ``bits`` are the lowest and the highest number's, ``scales`` two addresses.
    """
    low = high = u8_at(scales[0])
    for at in range(0, SCALE_BYTES * groups, SCALE_BYTES):
        a, b = u8_at(scales[0] + at), u8_at(scales[1] + at)
        low, high = vmin(low, vmin(a, b)), vmax(high, vmax(a, b))
    least, most = np.int64(hmin(to_i32(low))), np.int64(hmax(to_i32(high)))
    lowest, highest = bits[0] >> 23, bits[1] >> 23
    return (
        lowest >= 1
        and highest <= _NORMAL
        and most <= _NORMAL
        and lowest + least - _HALF >= 1
        and highest + most - _HALF <= _NORMAL
    )


@inline
def no_column(w: int) -> Any:
    """MXFP4 rows are whole blocks: no single column is ever left over."""
    return splat_f32(0.0)
