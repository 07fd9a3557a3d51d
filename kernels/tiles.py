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
    numbers: Any,
    vector: int,
    vector_step: int,
    steps: int,
    parted: Any,
    target: int,
    factors: int,
) -> None:
    """target[t, v] = sum over steps of number[step, t] * vector[step, v], for `vectors` (1 to TILE_VECTORS) vectors.

    Byte addresses; `pairs`: of float32, or of pairs of bfloat16 (above). `numbers = (address, bytes from one to the
    next within a step, bytes from step to step)`; vectors are `vector_step` apart from step to step. `target` holds
    T x V vectors. With `factors` (2 x V vectors) the sums are merged: target * factors[0, v] + sum * factors[1, v].

    `parted = (more, left, apart)`: after the `steps` come `more`, which not all lanes take. The first `left` lanes
    leave out the first number of these, `apart` lanes more every next one; what it holds touches nothing of them. Of a
    pair, a lane may leave out the second alone: it takes 0 for it.
    """
    if pairs:
        if vectors == 1:
            _product(1, 1, numbers, vector, vector_step, steps, parted, target, factors)
        elif vectors == 2:
            _product(1, 2, numbers, vector, vector_step, steps, parted, target, factors)
        else:
            _product(1, TILE_VECTORS, numbers, vector, vector_step, steps, parted, target, factors)
    elif vectors == 1:
        _product(0, 1, numbers, vector, vector_step, steps, parted, target, factors)
    elif vectors == 2:
        _product(0, 2, numbers, vector, vector_step, steps, parted, target, factors)
    else:
        _product(0, TILE_VECTORS, numbers, vector, vector_step, steps, parted, target, factors)


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _product(
    typingctx: Any,
    pairs: Any,
    vectors: Any,
    numbers: Any,
    vector: Any,
    vector_step: Any,
    steps: Any,
    parted: Any,
    target: Any,
    factors: Any,
) -> Any:
    """`tile_product` for a literal number of vectors, of pairs or not (1 or 0)."""
    if not isinstance(vectors, types.IntegerLiteral) or not isinstance(pairs, types.IntegerLiteral):
        return None
    count = vectors.literal_value
    of_pairs = bool(pairs.literal_value)
    load_number, load_vector, multiply_add = _PAIR_STEP if of_pairs else _FLOAT_STEP
    places = [(t, v) for t in range(TILE_NUMBERS) for v in range(count)]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, _, numbers_value, vector_at, vector_stride, step_count, parted_value, target_at, factors_at = args
        number_at, number_apart, number_stride = cgutils.unpack_tuple(builder, numbers_value)
        sums = {place: cgutils.alloca_once_value(builder, constant(f32x16, [0.0] * 16)) for place in places}

        def step(index: Any, *passes: Any) -> None:
            """One step, in passes: the lanes that take it (a mask a vector, or None) and what they see of a number."""
            numbers_here = builder.add(number_at, builder.mul(index, number_stride))
            vectors_here = builder.add(vector_at, builder.mul(index, vector_stride))
            loaded = [load_vector(builder, _at(builder, vectors_here, 64 * v)) for v in range(count)]
            for t in range(TILE_NUMBERS):
                number = load_number(builder, numbers_here)
                for takers, view in passes:
                    spread = splat_value(builder, view(builder, number), 16)
                    for v in range(count):
                        total = builder.load(sums[t, v])
                        more = multiply_add(builder, spread, loaded[v], total)
                        builder.store(more if takers is None else builder.select(takers[v], more, total), sums[t, v])
                numbers_here = builder.add(numbers_here, number_apart)

        def beyond(left: Any) -> list[Any]:
            """The lanes but for the first `left`, as a mask a vector."""
            return [builder.not_(first_n_value(builder, _at(builder, left, -16 * v), 16)) for v in range(count)]

        with cgutils.for_range(builder, step_count) as loop:
            step(loop.index, (None, _whole))
        more_steps, left, apart = cgutils.unpack_tuple(builder, parted_value)
        with cgutils.for_range(builder, more_steps) as loop:
            at = builder.add(step_count, loop.index)
            if of_pairs:
                here = builder.add(left, builder.mul(builder.mul(loop.index, ir.Constant(_WORD, 2)), apart))
                first, second = beyond(here), beyond(builder.add(here, apart))
                alone = [builder.and_(a, builder.not_(b)) for a, b in zip(first, second, strict=True)]
                step(at, (alone, _first_of_pair), (second, _whole))
            else:
                step(at, (beyond(builder.add(left, builder.mul(loop.index, apart))), _whole))
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

    three = types.UniTuple(types.int64, 3)
    return types.void(pairs, vectors, three, *[types.int64] * 3, three, *[types.int64] * 2), codegen


@intrinsic  # type: ignore[untyped-decorator]
def transpose_16(
    typingctx: Any, source: Any, source_bytes: Any, rows: Any, columns: Any, target: Any, target_bytes: Any
) -> Any:
    """target[j, i] = source[i, j] for 16 x 16 floats; where i >= rows or j >= columns nothing is read and 0 written."""
    return types.void(*[types.int64] * 6), _transpose


@intrinsic  # type: ignore[untyped-decorator]
def scaled_transpose_16(
    typingctx: Any,
    source: Any,
    source_bytes: Any,
    rows: Any,
    columns: Any,
    target: Any,
    target_bytes: Any,
    factors: Any,
) -> Any:
    """As `transpose_16`, target[j, i] = source[i, j] * factors[j]."""
    if factors != f32x16:
        return None
    return types.void(*[types.int64] * 6, factors), _transpose


def _transpose(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    source_at, source_step, row_count, column_count, target_at, target_step, *factors = args
    vectors = []
    for i in range(16):
        is_row = builder.icmp_signed("<", ir.Constant(_WORD, i), row_count)
        lanes = builder.select(is_row, column_count, ir.Constant(_WORD, 0))
        pointer = pointer_value(builder, source_at, f32x16.llvm)
        operands = [pointer, ir.Constant(ir.IntType(32), 4), first_n_value(builder, lanes, 16)]
        operands.append(ir.Constant(f32x16.llvm, None))
        vector = call_llvm(builder, "llvm.masked.load.v16f32.p0", f32x16.llvm, operands)
        vectors.append(builder.fmul(vector, factors[0]) if factors else vector)
        source_at = builder.add(source_at, source_step)
    for distance in (8, 4, 2, 1):
        vectors = _exchange(builder, vectors, distance)
    for vector in vectors:
        _store(builder, target_at, vector)
        target_at = builder.add(target_at, target_step)
    return context.get_dummy_value()


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
        return _pair_dot(builder, args[1], args[2], args[0])

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
    return builder.load(pointer_value(builder, address, ir.FloatType()), align=4, typ=ir.FloatType())


def _load_pair(builder: Any, address: Any) -> Any:
    return builder.load(pointer_value(builder, address, ir.IntType(32)), align=4, typ=ir.IntType(32))


def _load_pairs(builder: Any, address: Any) -> Any:
    return builder.load(pointer_value(builder, address, _WORDS), align=4, typ=_WORDS)


def _whole(builder: Any, number: Any) -> Any:
    return number


def _first_of_pair(builder: Any, pair: Any) -> Any:
    """With 0 for the second, which is the upper half."""
    return builder.and_(pair, ir.Constant(ir.IntType(32), 0xFFFF))


def _pair_dot(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """One instruction on words of pairs, or two multiply-adds of their upper and then their lower halves."""
    if HAS_PAIR_DOT:
        pairs = [builder.bitcast(words, _PAIRS) for words in (a, b)]
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", f32x16.llvm, [total, *pairs])
    return _fma(
        builder, _lower(builder, a), _lower(builder, b), _fma(builder, _upper(builder, a), _upper(builder, b), total)
    )


def _upper(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, ir.Constant(_WORDS, [-65536] * 16)), f32x16.llvm)


def _lower(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, ir.Constant(_WORDS, [16] * 16)), f32x16.llvm)


_FLOAT_STEP = (_load_number, _load, _fma)
_PAIR_STEP = (_load_pair, _load_pairs, _pair_dot)
