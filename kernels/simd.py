"""Vector values for numba: sixteen-lane arithmetic written once as generic LLVM vector operations.

numba has no vector types. :mod:`serai.kernels.vec` adds one; here are its operations, and loads and stores are in
:mod:`serai.kernels.memory`. They are generic LLVM, which the code generator legalises for AVX-512 (one register), AVX2
(two), SSE or NEON (four), so every machine computes the same bits. What is written for each kind of CPU, the 8-bit dot
and the byte look-ups, is in :mod:`serai.kernels.simd_bytes`.

Inside a kernel::

    acc = splat_f32(0.0)
    for k in range(n):
        acc = fma(load16(w, 16 * k), splat_f32(x[k]), acc)
    store16_n(out, 0, acc, tail)

Rules. ``+ - * /`` and the comparisons work on vectors of one kind; a scalar operand is spread over the lanes. Integer
vectors have ``& | ^ << >> ~`` (``>>`` is arithmetic for signed kinds, logical for unsigned ones). No operation is ever
contracted, reassociated or approximated: ``a * b + c`` rounds twice, ``fma(a, b, c)`` once. ``vmax`` and ``vmin`` give
the second operand when either is NaN.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from serai.kernels.vec import (
    DTYPE_OF_KIND,
    WIDTHS,
    Vec,
    arithmetic,
    call_llvm,
    common,
    compare,
    constant,
    define,
    f32x16,
    first_n_value,
    i32x16,
    mask16,
    shuffle_value,
    u8x64,
    u32x16,
)

# Splat, arithmetic, masks ------------------------------------------------------------------


def _splat(vec: Vec) -> Any:
    def typed(typingctx: Any, x: Any) -> Any:
        if not isinstance(x, types.Number | types.Boolean):
            return None
        return vec(vec), lambda context, builder, sig, args: args[0]

    typed.__name__ = f"splat_{vec.kind}"
    typed.__doc__ = f"The scalar ``x`` (converted to {vec.kind}) in all {vec.lanes} lanes."
    return define(typed)


splat_f32 = _splat(f32x16)
splat_i32 = _splat(i32x16)
splat_u32 = _splat(u32x16)
splat_u8x64 = _splat(u8x64)


@define
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once."""
    vec = common(a, b, c)
    if vec is None or not vec.is_float:
        return None
    name = f"llvm.fma.{vec.suffix}"
    return vec(vec, vec, vec), lambda context, builder, sig, args: call_llvm(builder, name, vec.llvm, list(args))


def _choose(symbol: str, doc: str) -> Any:
    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        vec = common(a, b)
        if vec is None:
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(compare(symbol, vec, builder, args[0], args[1]), args[0], args[1])

        return vec(vec, vec), codegen

    typed.__doc__ = doc
    return define(typed)


vmax = _choose(">", "The larger operand lane by lane: ``a > b ? a : b`` (so ``b`` when either is NaN).")
vmin = _choose("<", "The smaller operand lane by lane: ``a < b ? a : b`` (so ``b`` when either is NaN).")


def _float_unary(llvm_name: str, doc: str) -> Any:
    def typed(typingctx: Any, a: Any) -> Any:
        if not isinstance(a, Vec) or not a.is_float:
            return None
        name = f"llvm.{llvm_name}.{a.suffix}"
        return a(a), lambda context, builder, sig, args: call_llvm(builder, name, a.llvm, list(args))

    typed.__doc__ = doc
    return define(typed)


vabs = _float_unary("fabs", "Absolute value (clears the sign bit, also of NaN).")
vsqrt = _float_unary("sqrt", "Square root, correctly rounded.")
vfloor = _float_unary("floor", "Largest integer not above.")
vrint = _float_unary("rint", "Nearest integer, ties to even.")


@define
def copysign(typingctx: Any, magnitude: Any, sign: Any) -> Any:
    """The magnitude of the first operand with the sign of the second."""
    vec = common(magnitude, sign)
    if vec is None or not vec.is_float:
        return None
    name = f"llvm.copysign.{vec.suffix}"
    return vec(vec, vec), lambda context, builder, sig, args: call_llvm(builder, name, vec.llvm, list(args))


@define
def select(typingctx: Any, mask: Any, a: Any, b: Any) -> Any:
    """``a`` where the mask is set, else ``b``."""
    vec = common(a, b)
    if vec is None or mask != Vec("b1", vec.lanes):
        return None
    return vec(mask, vec, vec), lambda context, builder, sig, args: builder.select(*args)


@define
def first_n(typingctx: Any, n: Any) -> Any:
    """The mask whose lanes 0..n-1 are set (n may be negative or above 16)."""
    if not isinstance(n, types.Integer):
        return None
    return mask16(types.int64), lambda context, builder, sig, args: first_n_value(builder, args[0], 16)


def _mask_reduction(llvm_name: str, doc: str) -> Any:
    def typed(typingctx: Any, mask: Any) -> Any:
        if not isinstance(mask, Vec) or mask.kind != "b1":
            return None
        name = f"llvm.vector.reduce.{llvm_name}.{mask.suffix}"

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return call_llvm(builder, name, ir.IntType(1), list(args))

        return types.boolean(mask), codegen

    typed.__doc__ = doc
    return define(typed)


any_of = _mask_reduction("or", "Whether some lane of the mask is set.")
all_of = _mask_reduction("and", "Whether every lane of the mask is set.")


# Conversions -------------------------------------------------------------------------------


def _bitcast(kind: str) -> Any:
    def typed(typingctx: Any, v: Any) -> Any:
        if not isinstance(v, Vec) or v.kind == "b1" or v.lanes * WIDTHS[v.kind] % WIDTHS[kind]:
            return None
        out = Vec(kind, v.lanes * WIDTHS[v.kind] // WIDTHS[kind])
        return out(v), lambda context, builder, sig, args: builder.bitcast(args[0], out.llvm)

    typed.__doc__ = f"The same bits seen as {kind} lanes (lane 0 first in memory)."
    return define(typed)


as_f32 = _bitcast("f32")
as_i32 = _bitcast("i32")
as_u32 = _bitcast("u32")
as_u16 = _bitcast("u16")
as_u8 = _bitcast("u8")
as_i8 = _bitcast("i8")


def _convert_value(builder: Any, value: Any, source: Vec, target: Vec) -> Any:
    """LLVM value: ``value`` converted lane by lane, integers by extension or truncation."""
    if source.is_float and target.is_float:
        return (builder.fpext if target.kind == "f64" else builder.fptrunc)(value, target.llvm)
    if source.is_float:
        return (builder.fptosi if target.is_signed else builder.fptoui)(value, target.llvm)
    if target.is_float:
        return (builder.sitofp if source.is_signed else builder.uitofp)(value, target.llvm)
    if WIDTHS[target.kind] < WIDTHS[source.kind]:
        return builder.trunc(value, target.llvm)
    if WIDTHS[target.kind] == WIDTHS[source.kind]:
        return value
    return (builder.sext if source.is_signed else builder.zext)(value, target.llvm)


def _convert(kind: str, doc: str) -> Any:
    def typed(typingctx: Any, v: Any) -> Any:
        if not isinstance(v, Vec):
            return None
        out = Vec(kind, v.lanes)
        return out(v), lambda context, builder, sig, args: _convert_value(builder, args[0], v, out)

    typed.__doc__ = doc
    return define(typed)


to_f32 = _convert("f32", "Each lane converted to float32 (rounded to nearest even).")
to_i32 = _convert("i32", "Each lane as int32: integers extended or cut, floats cut toward zero (must be in range).")
to_u32 = _convert("u32", "Each lane as uint32: integers extended or cut.")
to_u16 = _convert("u16", "The low 16 bits of each integer lane.")
to_u8 = _convert("u8", "The low 8 bits of each integer lane.")
to_i8 = _convert("i8", "The low 8 bits of each integer lane.")


@define
def round_i32(typingctx: Any, v: Any) -> Any:
    """float32 lanes to the nearest int32, ties to even (must be in range)."""
    if v != f32x16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.lrint.v16i32.v16f32", i32x16.llvm, list(args))

    return i32x16(v), codegen


@define
def bf16_to_f32(typingctx: Any, v: Any) -> Any:
    """bfloat16 bits (u16) widened to float32: exact."""
    if not isinstance(v, Vec) or v.kind != "u16":
        return None
    wide, out = Vec("u32", v.lanes), Vec("f32", v.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shifted = builder.shl(builder.zext(args[0], wide.llvm), constant(wide, [16] * v.lanes))
        return builder.bitcast(shifted, out.llvm)

    return out(v), codegen


@define
def f32_to_bf16(typingctx: Any, v: Any) -> Any:
    """float32 rounded to bfloat16 bits (u16), nearest even; NaN stays a (quiet) NaN with its sign."""
    if not isinstance(v, Vec) or v.kind != "f32":
        return None
    wide, out = Vec("u32", v.lanes), Vec("u16", v.lanes)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def many(value: int) -> ir.Constant:
            return constant(wide, [value] * v.lanes)

        bits = builder.bitcast(args[0], wide.llvm)
        odd = builder.and_(builder.lshr(bits, many(16)), many(1))
        rounded = builder.add(bits, builder.add(odd, many(0x7FFF)))
        quiet = builder.or_(bits, many(0x00400000))
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        high = builder.lshr(builder.select(is_nan, quiet, rounded), many(16))
        return builder.trunc(high, out.llvm)

    return out(v), codegen


# Reductions, lanes -------------------------------------------------------------------------


def _tree(doc: str, combine: Callable[[Any, Vec, Any, Any], Any]) -> Any:
    def typed(typingctx: Any, v: Any) -> Any:
        if not isinstance(v, Vec) or v.kind == "b1":
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value, lanes = args[0], v.lanes
            while lanes > 1:
                lanes //= 2
                low = shuffle_value(builder, value, value, list(range(lanes)))
                high = shuffle_value(builder, value, value, list(range(lanes, 2 * lanes)))
                value = combine(builder, Vec(v.kind, lanes), low, high)
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return DTYPE_OF_KIND[v.kind](v), codegen

    typed.__doc__ = doc
    return define(typed)


hsum = _tree(
    "Sum of the lanes in a fixed order: the upper half added to the lower half until one lane is left.",
    lambda builder, vec, a, b: arithmetic("add", vec, builder, a, b),
)
hmax = _tree(
    "Largest lane (halves combined as by ``vmax``).",
    lambda builder, vec, a, b: builder.select(compare(">", vec, builder, a, b), a, b),
)
hmin = _tree(
    "Smallest lane (halves combined as by ``vmin``).",
    lambda builder, vec, a, b: builder.select(compare("<", vec, builder, a, b), a, b),
)


@define
def lane(typingctx: Any, v: Any, i: Any) -> Any:
    """Lane ``i`` of a vector as a scalar."""
    if not isinstance(v, Vec) or not isinstance(i, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return DTYPE_OF_KIND[v.kind](v, types.int64), codegen
