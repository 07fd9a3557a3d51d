"""Interleaving weights for :mod:`serai.kernels.matrix`: sixteen rows side by side."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.memory import addr, scalar_u8_at, store_at, store_scalar_u8_at
from serai.kernels.simd import first_n, select, splat_i32
from serai.kernels.threads import parallel_for
from serai.kernels.vec import define, i32x16, pointer_value


@inline
def _interleave_block(task: int, source: Any, target: Any, rows: int, cols: int) -> None:
    """One block of sixteen rows of ``source [heads, rows, cols]``; ``task`` counts the blocks of all heads."""
    blocks = (rows + 15) // 16
    first = task // blocks * rows + task % blocks * 16
    held = min(16, rows - task % blocks * 16)
    out = task * cols * 16
    for k in range(cols):
        for lane in range(held):
            target[out + 16 * k + lane] = source[(first + lane) * cols + k]
        for lane in range(held, 16):
            target[out + 16 * k + lane] = 0


@kernel("void(u32[::1], u32[::1], i64, i64, i64, b1)", before=threads.start)
def interleave_u32(
    source: NDArray[np.uint32], target: NDArray[np.uint32], heads: int, rows: int, cols: int, spread: bool
) -> None:
    """32-bit elements ``[heads, rows, cols]`` to ``[heads][ceil(rows/16)][cols][16]``, on the pool if ``spread``."""
    parallel_for(heads * ((rows + 15) // 16), spread, _interleave_block, (source, target, rows, cols))


@kernel("void(u16[::1], u16[::1], i64, i64, i64, b1)", before=threads.start)
def interleave_u16(
    source: NDArray[np.uint16], target: NDArray[np.uint16], heads: int, rows: int, cols: int, spread: bool
) -> None:
    """16-bit elements ``[heads, rows, cols]`` to ``[heads][ceil(rows/16)][cols][16]``, on the pool if ``spread``."""
    parallel_for(heads * ((rows + 15) // 16), spread, _interleave_block, (source, target, rows, cols))


@define
def _gather_words(typingctx: Any, address: Any, pitch: Any, last: Any) -> Any:
    """The int32 at ``address + min(lane, last) * pitch`` for each of sixteen lanes."""
    if not all(isinstance(arg, types.Integer) for arg in (address, pitch, last)):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word, wide = ir.IntType(32), ir.IntType(64)
        gathered = ir.Constant(i32x16.llvm, ir.Undefined)
        for lane in range(16):
            here = ir.Constant(wide, lane)
            row = builder.select(builder.icmp_signed("<", here, args[2]), here, args[2])
            pointer = pointer_value(builder, builder.add(args[0], builder.mul(row, args[1])), word)
            loaded = builder.load(pointer, align=1, typ=word)
            gathered = builder.insert_element(gathered, loaded, ir.Constant(word, lane))
        return gathered

    return i32x16(types.int64, types.int64, types.int64), codegen


@inline
def _spread_nibbles(words: Any) -> Any:
    """Nibbles 0..7 of each lane to the order 0 4 1 5 2 6 3 7: the first four columns low, the others high."""
    out = words & 0xF
    for i in range(1, 4):
        out = out | (((words >> (4 * i)) & 0xF) << (8 * i))
    for i in range(4):
        out = out | (((words >> (16 + 4 * i)) & 0xF) << (8 * i + 4))
    return out


@inline
def _interleave_mxfp4_block(
    task: int, packed: int, scales: int, data: int, out_scales: int, rows: int, groups: int
) -> None:
    """Rows ``16 * task`` and on; addresses of the whole arrays, ``groups`` scale groups a row."""
    first = 16 * task
    held = min(16, rows - first)
    for group in range(groups):
        source = packed + first * groups * 16 + group * 16
        target = data + (task * groups + group) * 256
        for run in range(4):
            words = _gather_words(source + 4 * run, groups * 16, held - 1)
            store_at(target + 64 * run, select(first_n(held), _spread_nibbles(words), splat_i32(0)))
        for lane in range(16):
            code = scalar_u8_at(scales + (first + min(lane, held - 1)) * groups + group)
            store_scalar_u8_at(out_scales + (task * groups + group) * 16 + lane, code if lane < held else 0)


@kernel("void(u8[:, ::1], u8[:, ::1], u8[::1], u8[::1], b1)", before=threads.start)
def interleave_mxfp4(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    data: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
    spread: bool,
) -> None:
    """MXFP4 as shipped (``[N, K/2]``, ``[N, K/32]``) to blocks of 16 rows x 32 columns, on the pool if ``spread``."""
    rows, groups = scales.shape
    args = (addr(packed, 0), addr(scales, 0), addr(data, 0), addr(out_scales, 0), rows, groups)
    parallel_for((rows + 15) // 16, spread, _interleave_mxfp4_block, args)
