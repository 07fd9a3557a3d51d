"""The tile unit: sixteen rows of activations times two blocks of sixteen outputs, 32 columns, in two instructions.

A tile register holds sixteen lines of 64 bytes. One instruction multiplies sixteen rows of 32 signed bytes with eight
lines of sixteen outputs x four signed bytes, exactly, into int32: what sixteen rows times eight 8-bit dots
(:mod:`serai.kernels.chains`) give, in a sixth of the time. Only on `SimdPath.AVX512_AMX`; a task that uses it calls
`tiles_begin` first and `tiles_end` last.
"""

from typing import Any

from llvmlite import ir
from numba import types

from serai.kernels import cpu
from serai.kernels.vec import call_llvm, define, pointer_value

HAS_TILES = cpu.chosen_path() is cpu.SimdPath.AVX512_AMX

TILE_ROWS = 16
WEIGHT_TILE_BYTES = 512
SUM_TILE_BYTES = 1024

_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
# The registers: rows of activations; two blocks of weights; their sums.
_ROWS, _FIRST, _SECOND, _FIRST_SUMS, _SECOND_SUMS = range(5)
# Lines of each register, and bytes of a line.
_SHAPES = ((TILE_ROWS, 32), (8, 64), (8, 64), (TILE_ROWS, 64), (TILE_ROWS, 64))
_PALETTE = 1


def _configuration() -> list[int]:
    """The 64 bytes that name each register's shape: palette, 15 zeros, line bytes as sixteen words, line counts."""
    line_bytes = [nbytes for _, nbytes in _SHAPES] + [0] * (16 - len(_SHAPES))
    lines = [count for count, _ in _SHAPES] + [0] * (16 - len(_SHAPES))
    return [_PALETTE, *[0] * 15, *(byte for nbytes in line_bytes for byte in (nbytes & 255, nbytes >> 8)), *lines]


def _number(register: int) -> ir.Constant:
    return ir.Constant(_BYTE, register)


def _load(builder: Any, register: int, address: Any, line_bytes: int) -> None:
    pointer = pointer_value(builder, address, _BYTE)
    stride = ir.Constant(_WORD, line_bytes)
    call_llvm(builder, "llvm.x86.tileloadd64", ir.VoidType(), [_number(register), pointer, stride])


@define
def tiles_begin(typingctx: Any) -> Any:
    """Shape this thread's tile registers."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        values = ir.Constant(ir.ArrayType(_BYTE, 64), _configuration())
        block = context.insert_unique_const(builder.module, ".serai_tiles", values)
        call_llvm(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [builder.bitcast(block, _BYTE.as_pointer())])
        return context.get_dummy_value()

    return types.void(), codegen


@define
def tiles_end(typingctx: Any) -> Any:
    """Give the tile registers up, so that the system need not save them."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call_llvm(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@define
def tile_weights(typingctx: Any, first: Any, second: Any) -> Any:
    """Take up two blocks of weights: the addresses of 512 signed bytes each, `[8 groups of 4 columns, 16, 4]`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _load(builder, _FIRST, args[0], 64)
        _load(builder, _SECOND, args[1], 64)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@define
def tile_dots(typingctx: Any, rows: Any, target: Any) -> Any:
    """Sixteen rows of 32 signed bytes, one after the other, times the weights: int32 `[2 blocks, 16 rows, 16]`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _load(builder, _ROWS, args[0], 32)
        for place, (sums, weights) in enumerate(((_FIRST_SUMS, _FIRST), (_SECOND_SUMS, _SECOND))):
            call_llvm(builder, "llvm.x86.tilezero", ir.VoidType(), [_number(sums)])
            operands = [_number(sums), _number(_ROWS), _number(weights)]
            call_llvm(builder, "llvm.x86.tdpbssd", ir.VoidType(), operands)
            at = builder.add(args[1], ir.Constant(_WORD, place * SUM_TILE_BYTES))
            operands = [_number(sums), pointer_value(builder, at, _BYTE), ir.Constant(_WORD, 64)]
            call_llvm(builder, "llvm.x86.tilestored64", ir.VoidType(), operands)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
