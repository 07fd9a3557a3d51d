"""Products with float32 activations: one definition of every output's bits, for all weight formats and row counts.

Columns are taken in blocks of a format's fixed length. Within a block a chain of fused multiply-adds runs through the
columns in ascending order from 0; the finished block is multiplied by its scale (1 for F32 and BF16) and added to the
running sum by one more, blocks ascending. Blocks also keep rounding errors small: they grow with 128 + K/128 terms
instead of K.

Two loops here share that definition, :mod:`serai.kernels.exact_tiles` has a third. With one row, four distant blocks
of outputs are walked at once: memory gives its best with several streams, and four chains hide the latency. With more,
eight columns of two blocks of outputs stay in registers while all rows pass by, so weights are read and decoded once
for up to :data:`EXACT_ROWS` rows.

A format is given by three inlined functions and two sizes: ``eight(address)`` (eight columns as vectors of sixteen
outputs), ``one(address)`` (one column; formats whose columns are a multiple of 8 never use it), ``scale(address)``, and
``sizes = (bytes of a column of sixteen outputs, columns of a block, bytes of a block's sixteen scales)``.
"""

from typing import Any

from serai.kernels.chains import fma_chain
from serai.kernels.compile import inline
from serai.kernels.memory import f32_at, prefetch_l2, scalar_f32_at, scalar_i32_at, store_at
from serai.kernels.simd import fma, splat_f32

EXACT_ROWS = 64
"""Rows that pass by the same weights in registers; more rows are taken in groups of as many."""
EXACT_LIST_BYTES = EXACT_ROWS * 4
"""Stack for a group's row numbers."""
EXACT_STATE_BYTES = EXACT_ROWS * 256
"""Stack for a group's partial sums: two running sums and two block sums of sixteen floats a row."""
# How far ahead of the reads a stream is prefetched. On a Zen 4, of 0.5 to 16 KB, 1 KB is best for one row: by a
# twentieth over 8 when memory gives 35 GB/s, by a fifth when it gives 57. Rows that pass by take their time, and from
# four of them on 4 KB are better by a tenth.
_AHEAD_BYTES = 1024
_ROWS_AHEAD_BYTES = 4096


@inline
def pick(rows: int, i: int) -> Any:
    """The i-th row number: from a list of int32 at an address, or i itself without one (0)."""
    if rows == 0:
        return i
    return scalar_i32_at(rows + 4 * i)


@inline
def prefetch_ahead(address: int, nbytes: int) -> None:
    """Ask for the lines of a stream some way ahead of the ``nbytes`` being read."""
    for line in range(0, nbytes, 64):
        prefetch_l2(address + _AHEAD_BYTES + line)


@inline
def prefetch_for_rows(address: int, nbytes: int) -> None:
    """The same while several rows pass by what was read."""
    for line in range(0, nbytes, 64):
        prefetch_l2(address + _ROWS_AHEAD_BYTES + line)


@inline
def one_row(eight: Any, one: Any, scale: Any, sizes: Any, weights: Any, scales: Any, cols: int, x: int) -> Any:
    """Four blocks of outputs for the row at address ``x``: four vectors of sixteen sums.

    ``weights`` and ``scales`` are four addresses each, one a block.
    """
    column_bytes, block, scale_bytes = sizes
    w0, w1, w2, w3 = weights
    s0, s1, s2, s3 = scales
    r0 = r1 = r2 = r3 = splat_f32(0.0)
    for first in range(0, cols, block):
        last = min(first + block, cols)
        whole = first + (last - first) // 8 * 8
        a0 = a1 = a2 = a3 = splat_f32(0.0)
        for k in range(first, whole, 8):
            at, xk = k * column_bytes, x + 4 * k
            a0 = fma_chain(a0, eight(w0 + at), xk)
            a1 = fma_chain(a1, eight(w1 + at), xk)
            a2 = fma_chain(a2, eight(w2 + at), xk)
            a3 = fma_chain(a3, eight(w3 + at), xk)
            prefetch_ahead(w0 + at, 8 * column_bytes)
            prefetch_ahead(w1 + at, 8 * column_bytes)
            prefetch_ahead(w2 + at, 8 * column_bytes)
            prefetch_ahead(w3 + at, 8 * column_bytes)
        for k in range(whole, last):
            at = k * column_bytes
            x1 = splat_f32(scalar_f32_at(x + 4 * k))
            a0, a1 = fma(one(w0 + at), x1, a0), fma(one(w1 + at), x1, a1)
            a2, a3 = fma(one(w2 + at), x1, a2), fma(one(w3 + at), x1, a3)
        group = first // block * scale_bytes
        r0, r1 = fma(a0, scale(s0 + group), r0), fma(a1, scale(s1 + group), r1)
        r2, r3 = fma(a2, scale(s2 + group), r2), fma(a3, scale(s3 + group), r3)
    return (r0, r1, r2, r3)


@inline
def many_rows(
    eight: Any, one: Any, scale: Any, sizes: Any, weights: Any, scales: Any, cols: int, x: Any, count: int, state: int
) -> None:
    """Two blocks of outputs for ``count`` (1 to EXACT_ROWS) rows; row i's 32 sums are left at ``state + 256 * i``.

    ``x = (address of row 0, bytes between rows, list of row numbers or 0)``; ``weights`` and ``scales`` are two
    addresses each, one a block.
    """
    column_bytes, block, scale_bytes = sizes
    w0, w1 = weights
    s0, s1 = scales
    x_at, x_pitch, rows = x
    zero = splat_f32(0.0)
    for at in range(state, state + 256 * count, 64):
        store_at(at, zero)
    for first in range(0, cols, block):
        last = min(first + block, cols)
        whole = first + (last - first) // 8 * 8
        for k in range(first, whole, 8):
            d0, d1 = eight(w0 + k * column_bytes), eight(w1 + k * column_bytes)
            prefetch_for_rows(w0 + k * column_bytes, 8 * column_bytes)
            prefetch_for_rows(w1 + k * column_bytes, 8 * column_bytes)
            for i in range(count):
                at, xk = state + 256 * i, x_at + pick(rows, i) * x_pitch + 4 * k
                a0, a1 = fma_chain(f32_at(at + 128), d0, xk), fma_chain(f32_at(at + 192), d1, xk)
                store_at(at + 128, a0)
                store_at(at + 192, a1)
        for k in range(whole, last):
            v0, v1 = one(w0 + k * column_bytes), one(w1 + k * column_bytes)
            for i in range(count):
                at, x1 = state + 256 * i, splat_f32(scalar_f32_at(x_at + pick(rows, i) * x_pitch + 4 * k))
                store_at(at + 128, fma(v0, x1, f32_at(at + 128)))
                store_at(at + 192, fma(v1, x1, f32_at(at + 192)))
        group = first // block * scale_bytes
        c0, c1 = scale(s0 + group), scale(s1 + group)
        for at in range(state, state + 256 * count, 256):
            store_at(at, fma(f32_at(at + 128), c0, f32_at(at)))
            store_at(at + 64, fma(f32_at(at + 192), c1, f32_at(at + 64)))
            store_at(at + 128, zero)
            store_at(at + 192, zero)
