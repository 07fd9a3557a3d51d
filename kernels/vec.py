"""The numba type of vector values, :class:`Vec`, and its operators; :mod:`serai.kernels.simd` tells how to use them."""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel, register_default
from numba.core.imputils import lower_builtin, lower_cast
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic

ELEMENTS: dict[str, ir.Type] = {
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
    "i8": ir.IntType(8),
    "u8": ir.IntType(8),
    "i16": ir.IntType(16),
    "u16": ir.IntType(16),
    "i32": ir.IntType(32),
    "u32": ir.IntType(32),
    "i64": ir.IntType(64),
    "u64": ir.IntType(64),
    "b1": ir.IntType(1),
}
WIDTHS = {kind: int(kind[1:]) for kind in ELEMENTS}
KIND_OF_DTYPE = {
    types.float32: "f32",
    types.float64: "f64",
    types.int8: "i8",
    types.uint8: "u8",
    types.int16: "i16",
    types.uint16: "u16",
    types.int32: "i32",
    types.uint32: "u32",
    types.int64: "i64",
    types.uint64: "u64",
}
DTYPE_OF_KIND = {kind: dtype for dtype, kind in KIND_OF_DTYPE.items()} | {"b1": types.boolean}


class Vec(types.Type):  # type: ignore[misc]
    """The numba type of a vector value: ``lanes`` elements of ``kind`` ("f32", "u8", ..., "b1" for a mask)."""

    def __init__(self, kind: str, lanes: int) -> None:
        self.kind = kind
        self.lanes = lanes
        super().__init__(name=f"{kind}x{lanes}")

    @property
    def is_float(self) -> bool:
        return self.kind in ("f32", "f64")

    @property
    def is_signed(self) -> bool:
        return self.kind[0] == "i"

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(ELEMENTS[self.kind], self.lanes)

    @property
    def suffix(self) -> str:
        """The name LLVM gives this type inside an intrinsic's name."""
        letter = "f" if self.is_float else "i"
        return f"v{self.lanes}{letter}{WIDTHS[self.kind]}"


@register_default(Vec)
class _VecModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Vec) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)


f32x16 = Vec("f32", 16)
i32x16 = Vec("i32", 16)
u32x16 = Vec("u32", 16)
u16x16 = Vec("u16", 16)
u8x16 = Vec("u8", 16)
i8x16 = Vec("i8", 16)
u8x64 = Vec("u8", 64)
i8x64 = Vec("i8", 64)
mask16 = Vec("b1", 16)


# Helpers -----------------------------------------------------------------------------------


def constant(vec: Vec, values: list[Any]) -> ir.Constant:
    """An LLVM constant vector of ``vec``'s type."""
    return ir.Constant(vec.llvm, [ir.Constant(ELEMENTS[vec.kind], value) for value in values])


def splat_value(builder: Any, scalar: Any, lanes: int) -> Any:
    """LLVM value: ``scalar`` in every lane."""
    shape = ir.VectorType(scalar.type, lanes)
    single = builder.insert_element(ir.Constant(shape, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    return builder.shuffle_vector(single, ir.Constant(shape, ir.Undefined), zeros)


def call_llvm(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    """Call the LLVM intrinsic ``name`` (declared on first use)."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def shuffle_value(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """LLVM value: the lanes of ``a`` followed by ``b`` picked by the constant list ``lanes``."""
    picks = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    return builder.shuffle_vector(a, b, picks)


def pointer_value(builder: Any, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def first_n_value(builder: Any, n: Any, lanes: int) -> Any:
    wide = Vec("i64", lanes)
    return builder.icmp_signed("<", constant(wide, list(range(lanes))), splat_value(builder, n, lanes))


def define(function: Callable[..., Any]) -> Any:
    """Register an operation: ``function(typingctx, *types)`` gives (signature, codegen), or None to refuse."""
    return intrinsic(function)


def _scalar_to_lanes(context: Any, builder: Any, value: Any, source: Any, vec: Vec) -> Any:
    return splat_value(builder, context.cast(builder, value, source, DTYPE_OF_KIND[vec.kind]), vec.lanes)


@lower_cast(types.Number, Vec)  # type: ignore[untyped-decorator]
@lower_cast(types.Boolean, Vec)  # type: ignore[untyped-decorator]
def _cast_scalar(context: Any, builder: Any, source: Any, target: Vec, value: Any) -> Any:
    return _scalar_to_lanes(context, builder, value, source, target)


def common(*args: Any) -> Vec | None:
    """The one vector type among ``args`` if the others are the same or scalars that spread to it, else None."""
    vectors = {arg for arg in args if isinstance(arg, Vec)}
    scalars_fit = all(isinstance(arg, Vec | types.Number | types.Boolean) for arg in args)
    return vectors.pop() if len(vectors) == 1 and scalars_fit else None


# Operators ---------------------------------------------------------------------------------


def arithmetic(name: str, vec: Vec, builder: Any, a: Any, b: Any) -> Any:
    if vec.is_float:
        return {"add": builder.fadd, "sub": builder.fsub, "mul": builder.fmul, "div": builder.fdiv}[name](a, b)
    if name == "shr":
        return builder.ashr(a, b) if vec.is_signed else builder.lshr(a, b)
    table = {
        "add": builder.add,
        "sub": builder.sub,
        "mul": builder.mul,
        "and": builder.and_,
        "or": builder.or_,
        "xor": builder.xor,
        "shl": builder.shl,
    }
    return table[name](a, b)


_FLOAT_OPS = ("add", "sub", "mul", "div")
_INTEGER_OPS = ("add", "sub", "mul", "and", "or", "xor", "shl", "shr")
_MASK_OPS = ("and", "or", "xor")


def _allowed(name: str, vec: Vec) -> bool:
    if vec.is_float:
        return name in _FLOAT_OPS
    return name in (_MASK_OPS if vec.kind == "b1" else _INTEGER_OPS)


def _register_binary(python_operator: Any, name: str) -> None:
    @infer_global(python_operator)
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vec = common(*args) if len(args) == 2 else None
            return signature(vec, vec, vec) if vec is not None and _allowed(name, vec) else None

    @lower_builtin(python_operator, Vec, Vec)  # type: ignore[untyped-decorator]
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return arithmetic(name, sig.return_type, builder, args[0], args[1])


def compare(symbol: str, vec: Vec, builder: Any, a: Any, b: Any) -> Any:
    if vec.is_float:
        ordered = builder.fcmp_unordered if symbol == "!=" else builder.fcmp_ordered
        return ordered(symbol, a, b)
    compare = builder.icmp_signed if vec.is_signed else builder.icmp_unsigned
    return compare(symbol, a, b)


def _register_comparison(python_operator: Any, symbol: str) -> None:
    @infer_global(python_operator)
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vec = common(*args) if len(args) == 2 else None
            return signature(Vec("b1", vec.lanes), vec, vec) if vec is not None and vec.kind != "b1" else None

    @lower_builtin(python_operator, Vec, Vec)  # type: ignore[untyped-decorator]
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return compare(symbol, sig.args[0], builder, args[0], args[1])


for _operator, _name in (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
    (operator.truediv, "div"),
    (operator.and_, "and"),
    (operator.or_, "or"),
    (operator.xor, "xor"),
    (operator.lshift, "shl"),
    (operator.rshift, "shr"),
):
    _register_binary(_operator, _name)

for _operator, _symbol in (
    (operator.lt, "<"),
    (operator.le, "<="),
    (operator.gt, ">"),
    (operator.ge, ">="),
    (operator.eq, "=="),
    (operator.ne, "!="),
):
    _register_comparison(_operator, _symbol)


@infer_global(operator.neg)
@infer_global(operator.invert)
class _UnaryTyping(AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        return signature(args[0], args[0]) if len(args) == 1 and isinstance(args[0], Vec) else None


@lower_builtin(operator.neg, Vec)  # type: ignore[untyped-decorator]
def _lower_neg(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.fneg(args[0]) if sig.return_type.is_float else builder.neg(args[0])


@lower_builtin(operator.invert, Vec)  # type: ignore[untyped-decorator]
def _lower_invert(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.not_(args[0])
