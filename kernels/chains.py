"""Chains of one multiply-add a column: the inner loop of every matrix product.

Weights of eight columns (or eight groups of four) sit in registers as a tuple of vectors, sixteen outputs a vector,
while the rows of activations pass by. A chain runs through the columns in ascending order.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from serai.kernels.simd_bytes import dot4_value, wide_dot4_value
from serai.kernels.vec import call_llvm, define, f32x16, i32x16, pointer_value, splat_value, u8x64


def _tuple_of(vec: Any, weights: Any) -> bool:
    return isinstance(weights, types.UniTuple) and weights.dtype == vec


def _offset(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(ir.IntType(64), nbytes))


@define
def fma_chain(typingctx: Any, acc: Any, weights: Any, x: Any) -> Any:
    """``acc = fma(weights[j], x[j], acc)`` for ascending j; ``x`` is the address of as many float32."""
    if acc != f32x16 or not _tuple_of(f32x16, weights) or not isinstance(x, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        total, packed, address = args
        for j, weight in enumerate(cgutils.unpack_tuple(builder, packed)):
            pointer = pointer_value(builder, _offset(builder, address, 4 * j), ir.FloatType())
            scalar = builder.load(pointer, align=4, typ=ir.FloatType())
            total = call_llvm(
                builder, "llvm.fma.v16f32", f32x16.llvm, [weight, splat_value(builder, scalar, 16), total]
            )
        return total

    return f32x16(acc, weights, types.int64), codegen


def _dot_chain(dot_value: Any, doc: str) -> Any:
    def typed(typingctx: Any, acc: Any, weights: Any, x: Any) -> Any:
        if acc != i32x16 or not _tuple_of(u8x64, weights) or not isinstance(x, types.Integer):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            total, packed, address = args
            for j, weight in enumerate(cgutils.unpack_tuple(builder, packed)):
                pointer = pointer_value(builder, _offset(builder, address, 4 * j), ir.IntType(32))
                word = builder.load(pointer, align=4, typ=ir.IntType(32))
                four = builder.bitcast(splat_value(builder, word, 16), u8x64.llvm)
                total = dot_value(builder, total, weight, four)
            return total

        return i32x16(acc, weights, types.int64), codegen

    typed.__doc__ = doc
    return define(typed)


dot_chain = _dot_chain(
    dot4_value,
    "``acc = dot4(acc, weights[j], x[4j .. 4j + 3])`` for ascending j; ``x`` is the address of four int8 a weight.",
)
wide_dot_chain = _dot_chain(wide_dot4_value, "As ``dot_chain``, for unsigned weights of any size up to 255.")


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def stack_bytes(typingctx: Any, size: Any) -> Any:
    """The address of ``size`` (a constant) bytes on the stack, aligned to 64, uninitialised; one block a call site.

    numba's own allocation writes zeros whenever the function begins: tens of kilobytes for each task of a product.
    """
    if not isinstance(size, types.IntegerLiteral):
        return None
    lines = -(-size.literal_value // 64)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        with builder.goto_entry_block():
            block = builder.alloca(ir.ArrayType(f32x16.llvm, lines))
        return builder.ptrtoint(block, ir.IntType(64))

    return types.int64(size), codegen
