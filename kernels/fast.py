"""Products with 8-bit activations: MXFP4 weights, integer dots, one scale product a block of 32 columns.

Activations are quantised per 32 columns (:mod:`serai.kernels.quantize`). The dot of a block is exact in int32; it is
converted once, multiplied by the product of the two scales, and added to the running sum by one fused multiply-add,
blocks ascending. That is the definition of an output's bits for all row counts.

The weights of two blocks of outputs sit decoded in sixteen registers while the rows pass by.
"""

from typing import Any

from serai.kernels.chains import dot_chain
from serai.kernels.compile import inline
from serai.kernels.exact import pick, prefetch_ahead
from serai.kernels.memory import f32_at, scalar_f32_at, scalar_i32_at, store_at
from serai.kernels.mxfp4 import BLOCK_BYTES, block_weights, half_scales
from serai.kernels.simd import fma, splat_f32, splat_i32, to_f32

FAST_ROWS = 64
"""Rows that pass by the same weights in registers; more rows are taken in groups of as many."""
FAST_LIST_BYTES = FAST_ROWS * 4
"""Stack for a group's row numbers."""
FAST_STATE_BYTES = FAST_ROWS * 128
"""Stack for a group's running sums: two vectors of sixteen floats a row."""


@inline
def fast_rows(weights: Any, scales: Any, groups: int, x: Any, count: int, state: int) -> None:
    """Two blocks of outputs for ``count`` (1 to FAST_ROWS) rows; row i's 32 sums are left at ``state + 128 * i``.

    ``x = (codes, scales, starts, list of row numbers or 0)``: addresses of row 0 in the three arrays of
    :class:`serai.kernels.quantize.Quantized`, whose rows are ``groups`` blocks of 32 codes, one scale and one start.
    """
    w0, w1 = weights
    s0, s1 = scales
    codes, x_scales, starts, rows = x
    for at in range(state, state + 128 * count, 64):
        store_at(at, splat_f32(0.0))
    for group in range(groups):
        d0, d1 = block_weights(w0 + group * BLOCK_BYTES), block_weights(w1 + group * BLOCK_BYTES)
        c0, c1 = half_scales(s0 + group * 16), half_scales(s1 + group * 16)
        prefetch_ahead(w0 + group * BLOCK_BYTES, BLOCK_BYTES)
        prefetch_ahead(w1 + group * BLOCK_BYTES, BLOCK_BYTES)
        for i in range(count):
            at, block = state + 128 * i, pick(rows, i) * groups + group
            start = splat_i32(scalar_i32_at(starts + 4 * block))
            x_scale = splat_f32(scalar_f32_at(x_scales + 4 * block))
            a0, a1 = dot_chain(start, d0, codes + 32 * block), dot_chain(start, d1, codes + 32 * block)
            r0, r1 = fma(to_f32(a0), c0 * x_scale, f32_at(at)), fma(to_f32(a1), c1 * x_scale, f32_at(at + 64))
            store_at(at, r0)
            store_at(at + 64, r1)
