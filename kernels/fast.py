"""Products with 8-bit activations: packed weights, integer dots, one scale product a block of 32 columns.

Activations are quantised per 32 columns (:mod:`serai.kernels.quantize`). The dot of a block is exact in int32; it is
converted once, multiplied by the product of the two scales, and added to the running sum by one fused multiply-add,
blocks ascending. That is the definition of an output's bits for all row counts and every loop: few rows pass by the
weights of two blocks of outputs that sit decoded in sixteen registers, many go through the tile unit where there is
one; :mod:`serai.kernels.scale_tables` has a third loop.

A format is given by four inlined functions and two sizes: ``unsigned(address)`` (a block of 32 columns as eight vectors
of sixteen outputs x four columns, raised by the format's offset), ``chain`` (the dots that can take them),
``signed(address, room)`` (the address of the same as signed bytes, written to 512 bytes of room unless they lie so
already), ``scale(address)``, and ``sizes = (bytes of a block, bytes of its scales)``.
"""

from typing import Any

from serai.kernels.amx import (
    HAS_TILES,
    SUM_TILE_BYTES,
    TILE_ROWS,
    WEIGHT_TILE_BYTES,
    tile_dots,
    tile_weights,
    tiles_begin,
    tiles_end,
)
from serai.kernels.compile import inline, thin
from serai.kernels.exact import pick, prefetch_ahead, prefetch_for_rows
from serai.kernels.memory import (
    f32_at,
    i32_at,
    prefetch_l2,
    scalar_f32_at,
    scalar_i32_at,
    store_at,
    store_scalar_f32_at,
    u8_at,
)
from serai.kernels.simd import fma, splat_f32, splat_i32, to_f32

FAST_ROWS = 128
"""Rows that pass by the same weights at most: their sums fill half a first-level cache."""
FAST_LIST_BYTES = FAST_ROWS * 4
"""Stack for a group's row numbers."""
_SUM_BYTES = FAST_ROWS * 128
_TILE_ROOM_BYTES = 2 * WEIGHT_TILE_BYTES + 4 * SUM_TILE_BYTES + 32 * TILE_ROWS + 128 if HAS_TILES else 0
FAST_STATE_BYTES = _SUM_BYTES + _TILE_ROOM_BYTES
"""Stack for a group's running sums, two vectors of sixteen floats a row, and what the tile unit needs beside them."""
_SCALES_AHEAD_BYTES, ROWS_SCALES_AHEAD_BYTES = 256, 512
# Rows from which the tile unit is faster: it always takes sixteen.
_TILE_LEAST = 12


@inline
def group_rows(count: int) -> int:
    """Rows that pass by together when there are ``count``: as few groups as can be, of about as many rows each."""
    groups = max(1, (count + FAST_ROWS - 1) // FAST_ROWS)
    rows = max(1, (count + groups - 1) // groups)
    if HAS_TILES:
        # Whole tiles, and an even number of them: see what `_tile_rows` says of pages.
        return (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS) * (2 * TILE_ROWS)
    return rows


@thin
def packed_rows(
    chain: Any,
    unsigned: Any,
    signed: Any,
    scale: Any,
    sizes: Any,
    weights: Any,
    scales: Any,
    groups: int,
    x: Any,
    n: int,
    at: int,
) -> None:
    """Two blocks of outputs for ``n`` (1 to FAST_ROWS) rows; row i's 32 sums are left at ``at + 128 * i``.

    ``x = (codes, scales, starts, rows of the arrays, list of row numbers or 0)``: addresses of row 0 in the arrays of
    :class:`serai.kernels.quantize.Quantized`, ``starts`` those for the format's offset. ``weights`` and ``scales`` are
    two addresses each, one a block.
    """
    if HAS_TILES:
        if n >= _TILE_LEAST:
            _tile_rows(signed, scale, sizes, weights, scales, groups, x, n, at)
        else:
            few_rows(chain, unsigned, scale, times, sizes, weights, scales, groups, x, n, at)
    else:
        few_rows(chain, unsigned, scale, times, sizes, weights, scales, groups, x, n, at)


@inline
def packed_row(
    chain: Any, unsigned: Any, scale: Any, sizes: Any, weights: Any, scales: Any, groups: int, x: Any
) -> Any:
    """Two blocks of outputs for row 0 of ``x``: two vectors of sixteen sums. Memory likes two streams a thread best."""
    w0, w1 = weights
    s0, s1 = scales
    codes, x_scales, starts, pitch, _ = x
    r0 = r1 = splat_f32(0.0)
    for group in range(groups):
        at, s, block = group * sizes[0], group * sizes[1], group * pitch
        prefetch_ahead(w0 + at, sizes[0])
        prefetch_ahead(w1 + at, sizes[0])
        # A line of scales serves several blocks, and one miss would stall them all.
        prefetch_l2(s0 + s + _SCALES_AHEAD_BYTES)
        prefetch_l2(s1 + s + _SCALES_AHEAD_BYTES)
        start = splat_i32(scalar_i32_at(starts + 4 * block))
        x_scale = splat_f32(scalar_f32_at(x_scales + 4 * block))
        here = codes + 32 * block
        r0 = fma(to_f32(chain(start, unsigned(w0 + at), here)), scale(s0 + s) * x_scale, r0)
        r1 = fma(to_f32(chain(start, unsigned(w1 + at), here)), scale(s1 + s) * x_scale, r1)
    return r0, r1


@inline
def times(scale: Any, x_scale: int) -> Any:
    """The product of sixteen scales of weights and the scale at an address."""
    return scale * splat_f32(scalar_f32_at(x_scale))


@inline
def few_rows(
    chain: Any,
    unsigned: Any,
    scale: Any,
    product: Any,
    sizes: Any,
    weights: Any,
    scales: Any,
    groups: int,
    x: Any,
    count: int,
    state: int,
) -> None:
    """Rows pass by the decoded weights, one by one; ``product`` makes of what ``scale`` gives and of a row's the same
    numbers as :func:`times`."""
    block_bytes, scale_bytes = sizes
    w0, w1 = weights
    s0, s1 = scales
    codes, x_scales, starts, pitch, rows = x
    for at in range(state, state + 128 * count, 64):
        store_at(at, splat_f32(0.0))
    for group in range(groups):
        here, scale_here = group * block_bytes, group * scale_bytes
        d0, d1 = unsigned(w0 + here), unsigned(w1 + here)
        c0, c1 = scale(s0 + scale_here), scale(s1 + scale_here)
        prefetch_for_rows(w0 + here, block_bytes)
        prefetch_for_rows(w1 + here, block_bytes)
        prefetch_l2(s0 + scale_here + ROWS_SCALES_AHEAD_BYTES)
        prefetch_l2(s1 + scale_here + ROWS_SCALES_AHEAD_BYTES)
        first = group * pitch
        codes_here, x_scales_here, starts_here = codes + 32 * first, x_scales + 4 * first, starts + 4 * first
        for i in range(count):
            at, row = state + 128 * i, pick(rows, i)
            start, x_scale = splat_i32(scalar_i32_at(starts_here + 4 * row)), x_scales_here + 4 * row
            a0, a1 = chain(start, d0, codes_here + 32 * row), chain(start, d1, codes_here + 32 * row)
            r0 = fma(to_f32(a0), product(c0, x_scale), f32_at(at))
            r1 = fma(to_f32(a1), product(c1, x_scale), f32_at(at + 64))
            store_at(at, r0)
            store_at(at + 64, r1)


@inline
def _tile_inputs(codes: int, scales: int, rows: int, first: int, n: int, code_room: int, scale_room: int) -> Any:
    """Where sixteen rows' codes and scales of one block lie as runs, from the ``first``-th on: in place, or copied.

    They are copied when they don't lie side by side or when only ``n`` < 16 are left; the scales of others become 0.
    """
    if rows == 0 and n >= TILE_ROWS:
        return codes + 32 * first, scales + 4 * first
    store_at(scale_room, splat_f32(0.0))
    for i in range(min(n, TILE_ROWS)):
        row = pick(rows, first + i)
        store_at(code_room + 32 * i, u8_at(codes + 32 * row))
        store_at(code_room + 32 * i + 16, u8_at(codes + 32 * row + 16))
        store_scalar_f32_at(scale_room + 4 * i, scalar_f32_at(scales + 4 * row))
    return code_room, scale_room


@inline
def _add_tile(dots: int, x_scales: int, c0: Any, c1: Any, sums: int) -> None:
    """Scale the dots of sixteen rows and add them to their sums."""
    for i in range(TILE_ROWS):
        at, dot = sums + 128 * i, dots + 64 * i
        x_scale = splat_f32(scalar_f32_at(x_scales + 4 * i))
        store_at(at, fma(to_f32(i32_at(dot)), c0 * x_scale, f32_at(at)))
        store_at(at + 64, fma(to_f32(i32_at(dot + SUM_TILE_BYTES)), c1 * x_scale, f32_at(at + 64)))


@inline
def _tile_rows(
    signed: Any, scale: Any, sizes: Any, weights: Any, scales: Any, groups: int, x: Any, count: int, state: int
) -> None:
    """Sixteen rows' dots come from the tile unit, while those of the sixteen before are scaled and added."""
    block_bytes, scale_bytes = sizes
    w0, w1 = weights
    s0, s1 = scales
    codes, x_scales, _, pitch, rows = x
    # Dots right behind the sums: a tile's dots are written to the half of a page where the sums that are being read do
    # not lie, or loads would wait for stores whose addresses look the same in their low twelve bits.
    dots = state + _SUM_BYTES
    room = dots + 4 * SUM_TILE_BYTES
    code_room = room + 2 * WEIGHT_TILE_BYTES
    scale_room = code_room + 32 * TILE_ROWS
    tiles = (count + TILE_ROWS - 1) // TILE_ROWS
    for at in range(state, state + 128 * TILE_ROWS * tiles, 64):
        store_at(at, splat_f32(0.0))
    tiles_begin()
    odd = 0
    # The tile before this one: its rows' scales and sums, and its weights' scales.
    last_scales, last_sums = scale_room, 0
    e0 = e1 = splat_f32(0.0)
    for group in range(groups):
        here, scale_here = group * block_bytes, group * scale_bytes
        tile_weights(signed(w0 + here, room), signed(w1 + here, room + WEIGHT_TILE_BYTES))
        c0, c1 = scale(s0 + scale_here), scale(s1 + scale_here)
        prefetch_for_rows(w0 + here, block_bytes)
        prefetch_for_rows(w1 + here, block_bytes)
        block = group * pitch
        for tile in range(tiles):
            first = TILE_ROWS * tile
            run, run_scales = _tile_inputs(
                codes + 32 * block, x_scales + 4 * block, rows, first, count - first, code_room, scale_room + 64 * odd
            )
            tile_dots(run, dots + odd * 2 * SUM_TILE_BYTES)
            odd = 1 - odd
            if last_sums != 0:
                _add_tile(dots + odd * 2 * SUM_TILE_BYTES, last_scales, e0, e1, last_sums)
            last_scales, last_sums, e0, e1 = run_scales, state + 128 * first, c0, c1
    _add_tile(dots + (1 - odd) * 2 * SUM_TILE_BYTES, last_scales, e0, e1, last_sums)
    tiles_end()
