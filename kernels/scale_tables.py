"""Many rows by 8-bit weights, with the products of scales looked up.

A block of 32 columns costs a row eight dots, then a product of two scales and a multiply-add. All ten wait for the same
units, so a fifth of the time of a long product goes into scales. A row's scale has a mantissa of five bits
(:mod:`serai.kernels.quantize`): sixteen scales of weights have only 32 products with it, but for a power of two.
These are written down once for all rows that pass by, and a row's power of two is added to the bits of its entry by
units that have time. An entry holds the product's bits less the mantissa's, so that the row's scale can be added as it
is. Weights' scales are bfloat16, so all these products are exact: the same numbers as :func:`serai.kernels.fast.times`
gives, as long as none leaves the normal range.

The entries of the next block are written beside the first 32 rows of this one: in one go, storing them would hold
up the dots.
"""

from typing import Any

from serai.kernels.compile import inline
from serai.kernels.exact import prefetch_for_rows
from serai.kernels.fast import ROWS_SCALES_AHEAD_BYTES
from serai.kernels.memory import f32_at, i32_at, prefetch_l2, scalar_i32_at, scalar_u8_at, store_at
from serai.kernels.quantize import SCALE_BITS
from serai.kernels.simd import as_f32, as_i32, fma, hmax, hmin, select, splat_f32, splat_i32, to_f32, vmax, vmin

ENTRIES = 1 << SCALE_BITS
TABLE_LEAST_ROWS = ENTRIES
"""Rows beside which the next entries are written."""
_ENTRY_BYTES = 128
_TABLE_BYTES = ENTRIES * _ENTRY_BYTES
TABLES_BYTES = 2 * _TABLE_BYTES
"""Stack for the entries of two blocks of outputs, of the block of columns in hand and of the next."""

_ONE = 0x3F800000
_STEP = 1 << (23 - SCALE_BITS)
# Of a scale's third byte: the exponent's last bit, the mantissa's first.
_TO_MANTISSA = 7 - SCALE_BITS
_BIAS = 127
# A 32nd of a scale must be a normal number too: entries grow by it.
_LOWEST_WEIGHTS, _LARGEST = 1 + SCALE_BITS, 254


@inline
def products_are_exact(scale: Any, scales: Any, groups: int, scale_bytes: int, bits: Any) -> Any:
    """Whether all products of two blocks' scales with numbers in a range are normal numbers, or of a scale of 0.

    ``bits`` are the lowest and the highest number's, whose mantissas have SCALE_BITS bits; ``scales`` two addresses.
    """
    low = high = splat_i32(_ONE)
    for at in range(0, scale_bytes * groups, scale_bytes):
        a, b = as_i32(_not_zero(scale(scales[0] + at))), as_i32(_not_zero(scale(scales[1] + at)))
        low, high = vmin(low, vmin(a, b)), vmax(high, vmax(a, b))
    least, most = hmin(low) >> 23, hmax(high) >> 23
    lowest, highest = bits[0] >> 23, bits[1] >> 23
    return (
        lowest >= 1
        and highest <= _LARGEST
        and least >= _LOWEST_WEIGHTS
        and most < _LARGEST
        and lowest + least - _BIAS >= 1
        and highest + most - _BIAS < _LARGEST
    )


@inline
def _not_zero(scales: Any) -> Any:
    """A scale of 0 belongs to weights of 0, which any other serves as well."""
    return select(scales == splat_f32(0.0), splat_f32(1.0), scales)


@inline
def _store_entry(table: int, entry: int, c0: Any, c1: Any) -> None:
    less = splat_i32(_ONE + entry * _STEP)
    at = table + entry * _ENTRY_BYTES
    store_at(at, as_i32(c0) - less)
    store_at(at + 64, as_i32(c1) - less)


@inline
def _add_row(chain: Any, d0: Any, d1: Any, table: int, x: Any, block: int, at: int) -> None:
    """A row's dots with two decoded blocks, scaled and added to its sums."""
    start, scale, codes = splat_i32(scalar_i32_at(x[2] + 4 * block)), x[1] + 4 * block, x[0] + 32 * block
    # The byte with the mantissa is loaded by itself, so that the scale goes straight from memory to all lanes.
    entry = table + _ENTRY_BYTES * ((scalar_u8_at(scale + 2) >> _TO_MANTISSA) & (ENTRIES - 1))
    bits = splat_i32(scalar_i32_at(scale))
    a0, a1 = chain(start, d0, codes), chain(start, d1, codes)
    s0, s1 = as_f32(i32_at(entry) + bits), as_f32(i32_at(entry + 64) + bits)
    store_at(at, fma(to_f32(a0), s0, f32_at(at)))
    store_at(at + 64, fma(to_f32(a1), s1, f32_at(at + 64)))


@inline
def table_rows(
    chain: Any,
    unsigned: Any,
    scale: Any,
    sizes: Any,
    weights: Any,
    scales: Any,
    groups: int,
    x: Any,
    count: int,
    state: int,
    tables: int,
) -> None:
    """:func:`serai.kernels.fast.few_rows` of TABLE_LEAST_ROWS rows and more that lie side by side, where
    :func:`products_are_exact`; the list in ``x`` must be 0, and ``tables`` is the address of TABLES_BYTES."""
    block_bytes, scale_bytes = sizes
    w0, w1 = weights
    s0, s1 = scales
    pitch = x[3]
    for at in range(state, state + 128 * count, 64):
        store_at(at, splat_f32(0.0))
    this, following = tables, tables + _TABLE_BYTES
    c0, c1 = _not_zero(scale(s0)), _not_zero(scale(s1))
    step0, step1 = c0 * splat_f32(1.0 / ENTRIES), c1 * splat_f32(1.0 / ENTRIES)
    for entry in range(ENTRIES):
        _store_entry(this, entry, c0, c1)
        c0, c1 = c0 + step0, c1 + step1
    for group in range(groups):
        here, scale_here = group * block_bytes, group * scale_bytes
        d0, d1 = unsigned(w0 + here), unsigned(w1 + here)
        prefetch_for_rows(w0 + here, block_bytes)
        prefetch_for_rows(w1 + here, block_bytes)
        next_scale = min(group + 1, groups - 1) * scale_bytes
        c0, c1 = _not_zero(scale(s0 + next_scale)), _not_zero(scale(s1 + next_scale))
        prefetch_l2(s0 + scale_here + ROWS_SCALES_AHEAD_BYTES)
        prefetch_l2(s1 + scale_here + ROWS_SCALES_AHEAD_BYTES)
        step0, step1 = c0 * splat_f32(1.0 / ENTRIES), c1 * splat_f32(1.0 / ENTRIES)
        block = group * pitch
        for i in range(ENTRIES):
            _add_row(chain, d0, d1, this, x, block + i, state + 128 * i)
            _store_entry(following, i, c0, c1)
            c0, c1 = c0 + step0, c1 + step1
        for i in range(ENTRIES, count):
            _add_row(chain, d0, d1, this, x, block + i, state + 128 * i)
        this, following = following, this
