"""Activations as 8-bit integers with a scale per 32 columns.

For each block of 32: ``scale = max|x| / 127``, rounded up to a mantissa of five bits (:mod:`serai.kernels.scale_tables`
says what for), ``code = round(x * (1 / scale))`` to nearest even. A block with an infinity or NaN gets a NaN scale, so
that it shows in the output. Relative error on Gaussian data: 0.55 %, against 0.54 with scales as they come.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.amx import HAS_TILES
from serai.kernels.arrays import aligned
from serai.kernels.compile import inline, kernel
from serai.kernels.matrix import GROUP
from serai.kernels.memory import addr, f32_at, i32_at, store_at, store_scalar_f32_at, store_scalar_i32_at
from serai.kernels.mxfp4 import CODE_OFFSET as MXFP4_OFFSET
from serai.kernels.naive import Q8_LARGEST, Q8_LEAST_PEAK
from serai.kernels.q8 import CODE_OFFSET as Q8_OFFSET
from serai.kernels.simd import (
    as_f32,
    as_i32,
    hmax,
    hmin,
    hsum,
    lane,
    round_i32,
    splat_f32,
    splat_i32,
    to_i8,
    vabs,
    vmax,
    vmin,
)
from serai.kernels.threads import parallel_for

# Any scale serves a block that counts as zero, and one that is a normal number keeps the others of its rows within a
# range.
_LEAST_BITS, _OF_ZEROS = int(Q8_LEAST_PEAK.view(np.int32)), np.float32(1.0)
_INFINITY_BITS = 0x7F800000
# Blocks, of about 10 ns each.
_WORTH_SPREADING = 1 << 7
_TILE_ROWS, _TILE_GROUPS = 16, 16
_NAN = float("nan")

SCALE_BITS = 5
"""Of a scale's mantissa, beside the one that every float32 has."""
_BELOW_SCALE_BITS = (1 << (23 - SCALE_BITS)) - 1

SCALE_RANGE_ROWS = 16
"""Rows from which :func:`range_of_scales` tells something: the lanes of a vector."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """R quantised rows of K columns, the rows of a block of columns side by side.

    ``codes`` int8 ``[K/32, R, 32]``, ``scales`` float32 ``[K/32, R]``, whose mantissas must have no more than
    SCALE_BITS bits, ``starts`` int32 ``[2, K/32, R]``: -12 and -128 times the sum of a block's codes, what a dot with
    weights raised by 12 or 128 starts from.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    starts: NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, columns: int) -> "Quantized":
        """Uninitialised room for ``rows`` rows of ``columns`` (a multiple of 32) columns."""
        if columns <= 0 or columns % GROUP:
            raise ValueError(f"8-bit activations need a multiple of {GROUP} columns, not {columns}.")
        groups = columns // GROUP
        codes = aligned(rows * columns, np.int8).reshape(groups, rows, GROUP)
        return cls(codes, np.empty((groups, rows), np.float32), np.empty((2, groups, rows), np.int32))

    @staticmethod
    def bytes_needed(rows: int, columns: int) -> int:
        """What :meth:`empty` allocates."""
        return rows * (columns + columns // GROUP * 12)

    @property
    def rows(self) -> int:
        return int(self.codes.shape[1])

    @property
    def columns(self) -> int:
        return GROUP * int(self.codes.shape[0])

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.starts.nbytes

    @property
    def arrays(self) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]]:
        return self.codes, self.scales, self.starts

    def first(self, rows: int) -> "Quantized":
        """Room for ``rows`` rows at the beginning of this one's (no copy); what it holds is unknown."""
        return self.part(rows, self.columns)

    def part(self, rows: int, columns: int) -> "Quantized":
        """Room for that many rows and (a multiple of 32) columns in this one's (no copy); what it holds is unknown."""
        groups = columns // GROUP
        if columns % GROUP or rows * groups > self.scales.size:
            raise ValueError(f"{rows} rows of {columns} columns do not fit into {self.rows} of {self.columns}.")
        return Quantized(
            self.codes.reshape(-1)[: groups * rows * GROUP].reshape(groups, rows, GROUP),
            self.scales.reshape(-1)[: groups * rows].reshape(groups, rows),
            self.starts.reshape(-1)[: 2 * groups * rows].reshape(2, groups, rows),
        )


@inline
def quantize_block(low: Any, high: Any, out: Any, block: int) -> None:
    """Quantise 32 floats in two vectors to a block of ``out = (codes, scales, starts, second starts)``, addresses."""
    codes, scale = out[0] + 32 * block, out[1] + 4 * block
    # Sizes order as their bits do, with infinity and NaN above all numbers.
    bits = hmax(vmax(as_i32(vabs(low)), as_i32(vabs(high))))
    largest = as_f32(splat_i32(bits))
    rounded = (as_i32(largest * splat_f32(1.0 / Q8_LARGEST)) + _BELOW_SCALE_BITS) & ~_BELOW_SCALE_BITS
    unit = lane(as_f32(rounded), 0)
    inverse = np.float32(1.0) / unit
    if bits <= _LEAST_BITS:
        inverse, unit = np.float32(0.0), _OF_ZEROS
    elif bits >= _INFINITY_BITS:
        inverse, unit = np.float32(0.0), np.float32(_NAN)
    a, b = round_i32(low * splat_f32(inverse)), round_i32(high * splat_f32(inverse))
    store_at(codes, to_i8(a))
    store_at(codes + 16, to_i8(b))
    store_scalar_f32_at(scale, unit)
    total = hsum(a + b)
    store_scalar_i32_at(out[2] + 4 * block, -MXFP4_OFFSET * total)
    store_scalar_i32_at(out[3] + 4 * block, -Q8_OFFSET * total)


@inline
def range_of_scales(scales: int, pitch: int, groups: int, rows: int) -> Any:
    """The lowest and the highest of ``rows`` rows' scales, each as the bits of a float32 read as an integer; (0, 0) for
    fewer than sixteen rows, and where the tile unit takes them, which has no use for it. ``scales`` is the address of
    the first row's in an array of ``pitch`` rows."""
    if HAS_TILES or rows < SCALE_RANGE_ROWS:
        return np.int64(0), np.int64(0)
    low = high = i32_at(scales)
    for group in range(groups):
        for row in range(0, rows, SCALE_RANGE_ROWS):
            bits = i32_at(scales + 4 * (group * pitch + min(row, rows - SCALE_RANGE_ROWS)))
            low, high = vmin(low, bits), vmax(high, bits)
    return np.int64(hmin(low)), np.int64(hmax(high))


@inline
def _quantize_tile(task: int, x: int, x_pitch: int, groups: int, rows: int, out: Any) -> None:
    """A block of columns of all the tile's rows before the next: side by side as they are written."""
    across = (groups + _TILE_GROUPS - 1) // _TILE_GROUPS
    row, group = task // across * _TILE_ROWS, task % across * _TILE_GROUPS
    for g in range(group, min(group + _TILE_GROUPS, groups)):
        for r in range(row, min(row + _TILE_ROWS, rows)):
            at = x + r * x_pitch + 128 * g
            quantize_block(f32_at(at), f32_at(at + 64), out, g * rows + r)


@inline
def quantize_into(x: Any, x_col: int, codes: Any, scales: Any, starts: Any) -> None:
    """:func:`quantize_rows` inside a kernel that goes on with the arrays of a `Quantized`."""
    groups, rows = scales.shape
    out = (addr(codes, 0), addr(scales, 0), addr(starts, 0), addr(starts, groups * rows))
    args = (addr(x, x_col), 4 * x.shape[1], groups, rows, out)
    tasks = ((rows + _TILE_ROWS - 1) // _TILE_ROWS) * ((groups + _TILE_GROUPS - 1) // _TILE_GROUPS)
    parallel_for(tasks, rows * groups > _WORTH_SPREADING, _quantize_tile, args)


@kernel("void(f32[:, ::1], i64, i8[:, :, ::1], f32[:, ::1], i32[:, :, ::1])", before=threads.start)
def _quantize(
    x: NDArray[np.float32],
    x_col: int,
    codes: NDArray[np.int8],
    scales: NDArray[np.float32],
    starts: NDArray[np.int32],
) -> None:
    quantize_into(x, x_col, codes, scales, starts)


def check_room(x: NDArray[np.float32], x_col: int, out: Quantized) -> None:
    """Raise ValueError unless ``x[:, x_col : x_col + K]`` is there and ``out`` has its R rows of K columns."""
    rows, columns = out.rows, out.columns
    if x.shape[0] != rows or x_col < 0 or x_col + columns > x.shape[1]:
        raise ValueError(f"cannot quantise columns {x_col}..{x_col + columns} of {list(x.shape)} into {rows} rows.")


def quantize_rows(x: NDArray[np.float32], x_col: int, out: Quantized) -> None:
    """Quantise ``x[:, x_col : x_col + K]`` (float32 ``[R, W]``) into ``out``, which has R rows of K columns."""
    check_room(x, x_col, out)
    _quantize(x, x_col, out.codes, out.scales, out.starts)
