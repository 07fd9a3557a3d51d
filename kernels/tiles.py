"""Register tiles: a block of sums held in registers while numbers and vectors pass by, and the 16 x 16 transpose.

A tile of T x V vectors takes, at each step, T numbers and V vectors, and adds their products to its T*V vectors of
sums, one fused multiply-add each, from 0 and in the order of the steps. It is the inner loop of a product one of
whose factors gives vectors as it lies in memory, and the other numbers.

With `pairs`, a number and every lane are two bfloat16, and a step adds both products: first that of the upper halves,
then that of the lower ones, each by a fused multiply-add in float32. That is what AVX512-BF16 computes in one
instruction at twice the rate, except that it takes denormal numbers for zero. Where no operand but zero is under
`LEAST_HALF` none can arise (every product and sum is a multiple of 2^-114), so all CPUs give the same bits.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from serai.kernels import cpu
from serai.kernels.compile import inline
from serai.kernels.simd import f32_to_bf16
from serai.kernels.vec import (
    call_llvm,
    constant,
    f32x16,
    first_n_value,
    pointer_value,
    shuffle_value,
    splat_value,
    u16x16,
    u32x16,
)

_WORD = ir.IntType(64)

TILE_NUMBERS, TILE_VECTORS = (8, 3) if cpu.chosen_path().is_avx512 else (4, 1)
"""T and the largest V: what fits in 32 registers of 16 floats, or 16 registers of 8. Decides no bits."""


HAS_PAIR_DOT = cpu.chosen_path().is_avx512 and bool(cpu.features().get("avx512bf16"))
"""Whether one instruction multiplies and adds pairs of bfloat16; elsewhere two multiply-adds do."""

LEAST_HALF = 2.0**-50
"""The smallest size, but for 0, of the operands of `pairs`."""


class _BFloat(ir.HalfType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
_PAIRS = ir.VectorType(_BFloat(), 32)
_WORDS = ir.VectorType(ir.IntType(32), 16)
_HALVES = ir.VectorType(_BFloat(), 16)


@inline
def tile_product(
    pairs: bool,
    vectors: int,
    numbers: int,
    number_bytes: int,
    number_step: int,
    vector: int,
    vector_step: int,
    steps: int,
    target: int,
    factors: int,
) -> None:
    """target[t, v] = sum over steps of number[step, t] * vector[step, v], for `vectors` (1 to TILE_VECTORS) vectors.

    Byte addresses; `pairs`: of float32, or of pairs of bfloat16 (above). Numbers are `number_bytes` apart within a
    step, and steps `number_step` and `vector_step`. `target` holds T x V vectors. With `factors` (2 x V vectors) the
    sums are merged: target * factors[0, v] + sum * factors[1, v].
    """
    if pairs:
        if vectors == 1:
            _product(1, 1, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)
        elif vectors == 2:
            _product(1, 2, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)
        else:
            _product(1, TILE_VECTORS, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)
    elif vectors == 1:
        _product(0, 1, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)
    elif vectors == 2:
        _product(0, 2, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)
    else:
        _product(0, TILE_VECTORS, numbers, number_bytes, number_step, vector, vector_step, steps, target, factors)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _product(
    typingctx: Any,
    pairs: Any,
    vectors: Any,
    numbers: Any,
    number_bytes: Any,
    number_step: Any,
    vector: Any,
    vector_step: Any,
    steps: Any,
    target: Any,
    factors: Any,
) -> Any:
    """`tile_product` for a literal number of vectors, of pairs or not (1 or 0)."""
    if not isinstance(vectors, types.IntegerLiteral) or not isinstance(pairs, types.IntegerLiteral):
        return None
    count = vectors.literal_value
    load_number, load_vector, multiply_add = _PAIR_STEP if pairs.literal_value else _FLOAT_STEP
    places = [(t, v) for t in range(TILE_NUMBERS) for v in range(count)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, _, number_at, number_apart, number_stride, vector_at, vector_stride, step_count, target_at, factors_at = args
        sums = {place: cgutils.alloca_once_value(builder, constant(f32x16, [0.0] * 16)) for place in places}
        with cgutils.for_range(builder, step_count) as loop:
            numbers_here = builder.add(number_at, builder.mul(loop.index, number_stride))
            vectors_here = builder.add(vector_at, builder.mul(loop.index, vector_stride))
            loaded = [load_vector(builder, _at(builder, vectors_here, 64 * v)) for v in range(count)]
            for t in range(TILE_NUMBERS):
                number = load_number(builder, numbers_here)
                for v in range(count):
                    total = builder.load(sums[t, v])
                    builder.store(multiply_add(builder, number, loaded[v], total), sums[t, v])
                numbers_here = builder.add(numbers_here, number_apart)
        is_plain = builder.icmp_signed("==", factors_at, ir.Constant(_WORD, 0))
        with builder.if_else(is_plain) as (plain, merged):
            with plain:
                for t, v in places:
                    _store(builder, _at(builder, target_at, 64 * (t * count + v)), builder.load(sums[t, v]))
            with merged:
                scales = [_load(builder, _at(builder, factors_at, 64 * v)) for v in range(2 * count)]
                for t, v in places:
                    at = _at(builder, target_at, 64 * (t * count + v))
                    kept = builder.fmul(_load(builder, at), scales[v])
                    _store(builder, at, _fma(builder, builder.load(sums[t, v]), scales[count + v], kept))
        return context.get_dummy_value()

    return types.void(pairs, vectors, *[types.int64] * 8), codegen


@intrinsic  # type: ignore[untyped-decorator]
def transpose_16(
    typingctx: Any, source: Any, source_bytes: Any, rows: Any, columns: Any, target: Any, target_bytes: Any
) -> Any:
    """target[j, i] = source[i, j] for 16 x 16 floats; where i >= rows or j >= columns nothing is read and 0 written."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source_at, source_step, row_count, column_count, target_at, target_step = args
        vectors = []
        for i in range(16):
            is_row = builder.icmp_signed("<", ir.Constant(_WORD, i), row_count)
            lanes = builder.select(is_row, column_count, ir.Constant(_WORD, 0))
            pointer = pointer_value(builder, source_at, f32x16.llvm)
            operands = [pointer, ir.Constant(ir.IntType(32), 4), first_n_value(builder, lanes, 16)]
            operands.append(ir.Constant(f32x16.llvm, None))
            vectors.append(call_llvm(builder, "llvm.masked.load.v16f32.p0", f32x16.llvm, operands))
            source_at = builder.add(source_at, source_step)
        for distance in (8, 4, 2, 1):
            vectors = _exchange(builder, vectors, distance)
        for vector in vectors:
            _store(builder, target_at, vector)
            target_at = builder.add(target_at, target_step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6), codegen


def _exchange(builder: Any, vectors: list[Any], distance: int) -> list[Any]:
    """Swap the off-diagonal halves of every square of 2 * distance: one stage of a transpose."""
    first = [lane if not lane & distance else 16 + lane - distance for lane in range(16)]
    second = [lane + distance if not lane & distance else 16 + lane for lane in range(16)]
    result = list(vectors)
    for i in range(16):
        if not i & distance:
            a, b = vectors[i], vectors[i + distance]
            result[i] = shuffle_value(builder, a, b, first)
            result[i + distance] = shuffle_value(builder, a, b, second)
    return result


def _at(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(_WORD, nbytes))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", f32x16.llvm, [a, b, c])


def _load(builder: Any, address: Any) -> Any:
    return builder.load(pointer_value(builder, address, f32x16.llvm), align=4, typ=f32x16.llvm)


def _store(builder: Any, address: Any, value: Any) -> None:
    builder.store(value, pointer_value(builder, address, f32x16.llvm), align=4)


@intrinsic  # type: ignore[untyped-decorator]
def pair_dot(typingctx: Any, total: Any, a: Any, b: Any) -> Any:
    """`total` (f32x16) and the products of pairs of bfloat16, `a` and `b` u32x16: one step of a tile with `pairs`."""
    if total != f32x16 or a != u32x16 or b != u32x16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _pair_dot(builder, _halves(builder, args[1]), _halves(builder, args[2]), args[0])

    return f32x16(f32x16, u32x16, u32x16), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _to_bf16(typingctx: Any, v: Any) -> Any:
    """`f32_to_bf16` in one instruction, which takes denormal numbers for zero. Only where `HAS_PAIR_DOT`."""
    if v != f32x16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        halves = call_llvm(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALVES, list(args))
        return builder.bitcast(halves, u16x16.llvm)

    return u16x16(f32x16), codegen


operand_bf16 = _to_bf16 if HAS_PAIR_DOT else f32_to_bf16
"""Floats rounded to bfloat16 (u16), nearest even, for operands of `pairs`: numbers that are denormal may become 0."""


def _load_number(builder: Any, address: Any) -> Any:
    pointer = pointer_value(builder, address, ir.FloatType())
    return splat_value(builder, builder.load(pointer, align=4, typ=ir.FloatType()), 16)


def _load_pair(builder: Any, address: Any) -> Any:
    pointer = pointer_value(builder, address, ir.IntType(32))
    return _halves(builder, splat_value(builder, builder.load(pointer, align=4, typ=ir.IntType(32)), 16))


def _load_pairs(builder: Any, address: Any) -> Any:
    return _halves(builder, builder.load(pointer_value(builder, address, _WORDS), align=4, typ=_WORDS))


def _halves(builder: Any, words: Any) -> Any:
    """What `_pair_dot` takes: the words as they are, or their upper and lower halves as float32."""
    if HAS_PAIR_DOT:
        return builder.bitcast(words, _PAIRS)
    upper = builder.and_(words, ir.Constant(_WORDS, [-65536] * 16))
    lower = builder.shl(words, ir.Constant(_WORDS, [16] * 16))
    return builder.bitcast(upper, f32x16.llvm), builder.bitcast(lower, f32x16.llvm)


def _pair_dot(builder: Any, a: Any, b: Any, total: Any) -> Any:
    if HAS_PAIR_DOT:
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, [total, a, b])
    return _fma(builder, a[1], b[1], _fma(builder, a[0], b[0], total))


_FLOAT_STEP = (_load_number, _load, _fma)
_PAIR_STEP = (_load_pair, _load_pairs, _pair_dot)
