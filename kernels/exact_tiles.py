"""F32 and BF16 weights times many rows of float32 activations, in register tiles: the bits of `kernels/exact.py`.

A tile (`kernels/tiles.py`) holds the sums of some rows and some blocks of sixteen outputs in registers for a whole
chain, so that sums are loaded and stored once a block of columns, not once for every eight. That wants the blocks'
weights side by side and widened, which costs as much as three rows do; so it is for many rows.
"""

from typing import Any

from serai.kernels.chains import stack_bytes
from serai.kernels.compile import inline, thin
from serai.kernels.deal import deal, put
from serai.kernels.lanes import LINE_BYTES
from serai.kernels.memory import addr, f32_at, store_at
from serai.kernels.plain import BF16_COLUMN_BYTES, F32_COLUMN_BYTES, PLAIN_BLOCK, bf16_column, f32_column
from serai.kernels.simd import splat_f32
from serai.kernels.threads import parallel_for
from serai.kernels.tiles import TILE_NUMBERS, TILE_VECTORS, tile_product

_LEAST_ROWS, _LEAST_UNITS = 128, 16
"""Rows and units of outputs from which on tiles are faster (measured with AVX-512); fewer units can't be dealt out
evenly. Decides no bits."""

_TILES = 256 // TILE_NUMBERS
"""Tiles, of 256 rows, that pass by the same widened weights: their sums, 48 KB of sixteen lanes, stay in a second-level
cache with these."""
_WIDE_BYTES = PLAIN_BLOCK * TILE_VECTORS * LINE_BYTES
_TILE_BYTES = TILE_NUMBERS * TILE_VECTORS * LINE_BYTES
_SUMS_BYTES = _TILES * _TILE_BYTES
_FACTORS_BYTES = 2 * TILE_VECTORS * LINE_BYTES


@inline
def _widen(one: Any, column_bytes: int, source: int, block_bytes: int, vectors: int, columns: int, target: int) -> None:
    """Columns of `vectors` blocks of outputs as float32 `[columns, vectors, 16]`."""
    for k in range(columns):
        for v in range(vectors):
            weights = one(source + v * block_bytes + k * column_bytes)
            store_at(target + (k * vectors + v) * LINE_BYTES, weights)


@inline
def _put_tile(sums: int, done: int, vectors: int, target: int, pitch: int, left: int, add: bool) -> None:
    """Write a tile's rows but for those `done` before; soon, so that stores wait while the next tile is computed."""
    for t in range(done, TILE_NUMBERS):
        for v in range(vectors):
            # Running sums start from 0 in the other loops: what begins as -0 becomes 0.
            total = f32_at(sums + (t * vectors + v) * LINE_BYTES) + splat_f32(0.0)
            put(target + (t - done) * pitch + v * LINE_BYTES, total, left - 16 * v, add)


@thin
def _task(task: int, one: Any, column_bytes: int, w: int, shape: Any, chunk: int, x: Any, y: Any) -> None:
    """`chunk` units of outputs: TILE_VECTORS neighbouring blocks of one head, or what is left of them.

    `w` is the weights' address, `shape`, `x` and `y` are as for the tasks of `kernels/matmul.py`.
    """
    heads, outputs, cols = shape
    x_at, x_pitch, x_head, count = x
    y_at, y_pitch, y_head, add = y
    blocks, tiles = (outputs + 15) // 16, (count + TILE_NUMBERS - 1) // TILE_NUMBERS
    units, block_bytes = (blocks + TILE_VECTORS - 1) // TILE_VECTORS, cols * column_bytes
    wide, sums, ones = stack_bytes(_WIDE_BYTES), stack_bytes(_SUMS_BYTES), stack_bytes(_FACTORS_BYTES)
    for at in range(0, _FACTORS_BYTES, LINE_BYTES):
        store_at(ones + at, splat_f32(1.0))
    for first_tile in range(0, tiles, _TILES):
        last_tile = min(first_tile + _TILES, tiles)
        for unit in range(task * chunk, min((task + 1) * chunk, heads * units)):
            head, block = unit // units, unit % units * TILE_VECTORS
            vectors = min(TILE_VECTORS, blocks - block)
            weights = w + (head * blocks + block) * block_bytes
            for first in range(0, cols, PLAIN_BLOCK):
                columns = min(PLAIN_BLOCK, cols - first)
                _widen(one, column_bytes, weights + first * column_bytes, block_bytes, vectors, columns, wide)
                for tile in range(first_tile, last_tile):
                    # The last tile goes back to have all its rows.
                    row = min(tile * TILE_NUMBERS, count - TILE_NUMBERS)
                    numbers = (x_at + head * x_head + row * x_pitch + 4 * first, x_pitch, 4)
                    here, factors, step = sums + (tile - first_tile) * _TILE_BYTES, 0, vectors * LINE_BYTES
                    if first > 0:
                        factors = ones
                    tile_product(False, vectors, numbers, wide, step, columns, (0, 0, 0), here, factors)
                    if first + columns == cols:
                        done = tile * TILE_NUMBERS - row
                        target = y_at + head * y_head + (row + done) * y_pitch + block * LINE_BYTES
                        _put_tile(here, done, vectors, target, y_pitch, outputs - 16 * block, add)


@inline
def _units(shape: Any) -> Any:
    heads, outputs, _ = shape
    return heads * (((outputs + 15) // 16 + TILE_VECTORS - 1) // TILE_VECTORS)


@inline
def is_worth_tiles(rows: int, shape: Any) -> Any:
    """Whether a product of so many rows is for `tiled_product`."""
    return rows >= _LEAST_ROWS and _units(shape) >= _LEAST_UNITS


@inline
def f32_tiles(task: int, w: int, shape: Any, chunk: int, x: Any, y: Any) -> None:
    """A task of F32 weights."""
    _task(task, f32_column, F32_COLUMN_BYTES, w, shape, chunk, x, y)


@inline
def bf16_tiles(task: int, w: int, shape: Any, chunk: int, x: Any, y: Any) -> None:
    """A task of BF16 weights."""
    _task(task, bf16_column, BF16_COLUMN_BYTES, w, shape, chunk, x, y)


@thin
def tiled_product(body: Any, column_bytes: int, w: int, shape: Any, x: Any, x_at: Any, y: Any, y_at: Any) -> None:
    """Deal one product of at least TILE_NUMBERS rows; arguments as for `_product` of `kernels/matmul.py`."""
    rows = x.shape[0]
    chunk, tasks, spread = deal(_units(shape), TILE_VECTORS * shape[2] * column_bytes, rows)
    x_part = (addr(x, x_at[0]), 4 * x.shape[1], 4 * x_at[1], rows)
    y_part = (addr(y, y_at[0]), 4 * y.shape[1], 4 * y_at[1], y_at[2])
    parallel_for(tasks, spread, body, (w, shape, chunk, x_part, y_part))
