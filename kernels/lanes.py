"""Sixteen floats at a time over rows of any length; stores that bypass the cache.

The norm and KDA kernels walk a row in steps of sixteen with `n` floats left: whole vectors by plain loads, the last
few by masked ones. (Always masking would be simpler, but machines without mask registers do it float by float.)
"""

from typing import Any

from llvmlite import ir
from numba import types

from serai.kernels.compile import inline
from serai.kernels.memory import f32_at, f32_at_n, store_at, store_at_n
from serai.kernels.simd import fma, hsum, splat_f32
from serai.kernels.vec import Vec, define, pointer_value

LINE_BYTES = 64
"""A cache line, and a vector of sixteen floats."""


@inline
def load_lanes(address: int, n: int) -> Any:
    """The next sixteen floats at a byte address, or the `n` that are left and zeros."""
    if n >= 16:
        return f32_at(address)
    return f32_at_n(address, n)


@inline
def store_lanes(address: int, v: Any, n: int) -> None:
    """Write the vector, or its first `n` floats if fewer are left."""
    if n >= 16:
        store_at(address, v)
    else:
        store_at_n(address, v, n)


@inline
def copy_floats(source: int, target: int, n: int) -> None:
    """Copy `n` floats between byte addresses that do not overlap."""
    for c in range(0, n, 16):
        store_lanes(target + 4 * c, load_lanes(source + 4 * c, n - c), n - c)


@inline
def fill_zero(target: int, n: int) -> None:
    """Write `n` zeros, `n` a multiple of 16."""
    for c in range(0, n, 16):
        store_at(target + 4 * c, splat_f32(0.0))


@inline
def sum_of_squares(address: int, n: int) -> Any:
    """Sum of x^2 over `n` floats: four vectors of partial sums by position modulo 64, then pairwise."""
    s0 = s1 = s2 = s3 = splat_f32(0.0)
    whole = n // 64 * 64
    for c in range(0, whole, 64):
        x = address + 4 * c
        x0, x1, x2, x3 = f32_at(x), f32_at(x + 64), f32_at(x + 128), f32_at(x + 192)
        s0, s1, s2, s3 = fma(x0, x0, s0), fma(x1, x1, s1), fma(x2, x2, s2), fma(x3, x3, s3)
    for c in range(whole, n, 16):
        x0 = load_lanes(address + 4 * c, n - c)
        s0 = fma(x0, x0, s0)
    return hsum((s0 + s1) + (s2 + s3))


@define
def stream_store_at(typingctx: Any, address: Any, v: Any) -> Any:
    """Write a vector to a byte address that is a multiple of 64 without bringing its line into the cache.

    Other threads may see it late: a :func:`stream_fence` must follow before they are told that it is there.
    """
    if not isinstance(address, types.Integer) or not isinstance(v, Vec):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        store = builder.store(args[1], pointer_value(builder, args[0], v.llvm), align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, v), codegen


@define
def stream_fence(typingctx: Any) -> Any:
    """Make this thread's earlier stores visible before its later ones."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
