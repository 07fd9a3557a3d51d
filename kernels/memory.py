"""Loads and stores of vector values (:mod:`serai.kernels.simd`), by array and flat index or by byte address.

Array arguments are C-contiguous and indexed flat; addresses are int64 byte addresses. Neither needs alignment. Masked
loads read nothing beyond the mask and give 0 there; masked stores write nothing there.
"""

from typing import Any

from llvmlite import ir
from numba import types

from serai.kernels.vec import (
    KIND_OF_DTYPE,
    WIDTHS,
    Vec,
    call_llvm,
    define,
    f32x16,
    first_n_value,
    i8x16,
    i8x64,
    i32x16,
    pointer_value,
    u8x16,
    u8x64,
    u16x16,
)


def _load(builder: Any, address: Any, vec: Vec) -> Any:
    pointer = pointer_value(builder, address, vec.llvm)
    return builder.load(pointer, align=max(1, WIDTHS[vec.kind] // 8), typ=vec.llvm)


def _load_n(builder: Any, address: Any, vec: Vec, n: Any) -> Any:
    pointer = pointer_value(builder, address, vec.llvm)
    align = ir.Constant(ir.IntType(32), max(1, WIDTHS[vec.kind] // 8))
    args = [pointer, align, first_n_value(builder, n, vec.lanes), ir.Constant(vec.llvm, None)]
    return call_llvm(builder, f"llvm.masked.load.{vec.suffix}.p0", vec.llvm, args)


def _store(builder: Any, address: Any, vec: Vec, value: Any) -> None:
    builder.store(value, pointer_value(builder, address, vec.llvm), align=max(1, WIDTHS[vec.kind] // 8))


def _store_n(builder: Any, address: Any, vec: Vec, value: Any, n: Any) -> None:
    pointer = pointer_value(builder, address, vec.llvm)
    align = ir.Constant(ir.IntType(32), max(1, WIDTHS[vec.kind] // 8))
    args = [value, pointer, align, first_n_value(builder, n, vec.lanes)]
    call_llvm(builder, f"llvm.masked.store.{vec.suffix}.p0", ir.VoidType(), args)


def _element_address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    item_bytes = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    base = builder.ptrtoint(struct.data, ir.IntType(64))
    return builder.add(base, builder.mul(index, ir.Constant(ir.IntType(64), item_bytes)))


def _is_array(array: Any) -> bool:
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype in KIND_OF_DTYPE


@define
def addr(typingctx: Any, array: Any, index: Any) -> Any:
    """The byte address (int64) of flat element ``index`` of a C-contiguous array."""
    if not _is_array(array) or not isinstance(index, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _element_address(context, builder, array, args[0], args[1])

    return types.int64(array, types.int64), codegen


@define
def load16(typingctx: Any, array: Any, index: Any) -> Any:
    """Sixteen elements of ``array`` from flat element ``index``."""
    if not _is_array(array) or not isinstance(index, types.Integer):
        return None
    vec = Vec(KIND_OF_DTYPE[array.dtype], 16)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _element_address(context, builder, array, args[0], args[1]), vec)

    return vec(array, types.int64), codegen


@define
def load16_n(typingctx: Any, array: Any, index: Any, n: Any) -> Any:
    """The first ``n`` of sixteen elements of ``array`` from flat element ``index``; 0 in the other lanes."""
    if not _is_array(array) or not isinstance(index, types.Integer) or not isinstance(n, types.Integer):
        return None
    vec = Vec(KIND_OF_DTYPE[array.dtype], 16)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load_n(builder, _element_address(context, builder, array, args[0], args[1]), vec, args[2])

    return vec(array, types.int64, types.int64), codegen


def _fits(array: Any, v: Any) -> bool:
    return _is_array(array) and isinstance(v, Vec) and KIND_OF_DTYPE[array.dtype] == v.kind


@define
def store16_n(typingctx: Any, array: Any, index: Any, v: Any, n: Any) -> Any:
    """Write the first ``n`` lanes to ``array`` from flat element ``index``."""
    if not _fits(array, v) or not isinstance(index, types.Integer) or not isinstance(n, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store_n(builder, _element_address(context, builder, array, args[0], args[1]), v, args[2], args[3])
        return context.get_dummy_value()

    return types.void(array, types.int64, v, types.int64), codegen


def _load_at(vec: Vec) -> tuple[Any, Any]:
    def whole(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None
        return vec(types.int64), lambda context, builder, sig, args: _load(builder, args[0], vec)

    def masked(typingctx: Any, address: Any, n: Any) -> Any:
        if not isinstance(address, types.Integer) or not isinstance(n, types.Integer):
            return None
        return vec(types.int64, types.int64), lambda context, builder, sig, args: _load_n(
            builder, args[0], vec, args[1]
        )

    whole.__doc__ = f"{vec.lanes} {vec.kind} lanes from a byte address."
    masked.__doc__ = f"The first n of {vec.lanes} {vec.kind} lanes from a byte address; 0 in the others."
    return define(whole), define(masked)


f32_at, f32_at_n = _load_at(f32x16)
i32_at, i32_at_n = _load_at(i32x16)
u16_at, u16_at_n = _load_at(u16x16)
u8_at, u8_at_n = _load_at(u8x16)
i8_at, i8_at_n = _load_at(i8x16)
u8x64_at, u8x64_at_n = _load_at(u8x64)
i8x64_at, i8x64_at_n = _load_at(i8x64)


@define
def store_at(typingctx: Any, address: Any, v: Any) -> Any:
    """Write the vector to a byte address."""
    if not isinstance(address, types.Integer) or not isinstance(v, Vec):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[0], v, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, v), codegen


@define
def store_at_n(typingctx: Any, address: Any, v: Any, n: Any) -> Any:
    """Write the first ``n`` lanes to a byte address."""
    if not isinstance(address, types.Integer) or not isinstance(v, Vec) or not isinstance(n, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store_n(builder, args[0], v, args[1], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, v, types.int64), codegen


def _scalar_at(dtype: Any, doc: str) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            element = context.get_data_type(dtype)
            return builder.load(pointer_value(builder, args[0], element), align=1, typ=element)

        return dtype(types.int64), codegen

    typed.__doc__ = doc
    return define(typed)


scalar_f32_at = _scalar_at(types.float32, "The float32 at a byte address.")
scalar_i32_at = _scalar_at(types.int32, "The int32 at a byte address.")
scalar_u8_at = _scalar_at(types.uint8, "The byte at a byte address.")


def _store_scalar_at(dtype: Any, doc: str) -> Any:
    def typed(typingctx: Any, address: Any, value: Any) -> Any:
        if not isinstance(address, types.Integer) or not isinstance(value, types.Number):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = pointer_value(builder, args[0], context.get_data_type(dtype))
            builder.store(args[1], pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, dtype), codegen

    typed.__doc__ = doc
    return define(typed)


store_scalar_f32_at = _store_scalar_at(types.float32, "Write one float32 to a byte address.")
store_scalar_i32_at = _store_scalar_at(types.int32, "Write one int32 to a byte address.")
store_scalar_u8_at = _store_scalar_at(types.uint8, "Write one byte to a byte address.")


def _prefetch(level: int, doc: str) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        if not isinstance(address, types.Integer):
            return None

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pointer = pointer_value(builder, args[0], ir.IntType(8))
            hints = [ir.Constant(ir.IntType(32), value) for value in (0, level, 1)]
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *hints])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    typed.__doc__ = doc
    return define(typed)


prefetch = _prefetch(3, "Ask for the cache line at a byte address (a hint; any address is allowed).")
prefetch_l2 = _prefetch(2, "As ``prefetch``, no nearer than into the second-level cache.")
