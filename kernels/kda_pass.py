"""One token through a whole KDA head of 128 columns, the writing of one head beside the reading of the next.

A step reads every state once from memory and writes it once, past the cache. Memory gives most when it is always
asked: so while a head's state goes out (read again from cache), the next one comes in, row by row, as in a copy. The
operations on a column, and so its bits, are those of `kernels/kda_state.py`.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from serai.kernels.compile import inline
from serai.kernels.cpu import chosen_path
from serai.kernels.kda_inputs import DECAY, DECAYED_KEY, DECAYED_QUERY, KEY, NUMBERS, VALUE, padded
from serai.kernels.lanes import LINE_BYTES
from serai.kernels.memory import f32_at, scalar_f32_at, store_at
from serai.kernels.simd import fma, splat_f32
from serai.kernels.vec import call_llvm, constant, f32x16, pointer_value, splat_value

COLUMNS = 128
_VECTORS = COLUMNS // 16
_ROW_BYTES = 4 * COLUMNS
_AHEAD_ROWS = 24
"""Rows between asking for one, into the second-level cache, and using it: what hides the way to memory."""

HAS_WIDE_PASS = chosen_path().is_avx512
"""Whether a row and the sums of two products fit the registers."""

SUMS_BYTES = 3 * _VECTORS * LINE_BYTES
"""Of a head between its reading and its writing: u, w and z."""

_WORD = ir.IntType(64)


@inline
def read_head(source: int, token: int, sums: int, ahead: int) -> None:
    """w = S'(a k) and z = S'(a q) of a head's state at `source`, to `sums`; asks for the first rows at `ahead`."""
    step = 4 * padded(COLUMNS)
    _pass(0, 1, 0, 0, 0, 0, 0, source, token + DECAYED_KEY * step, token + DECAYED_QUERY * step, sums, ahead)


@inline
def write_head(source: int, target: int, token: int, sums: int) -> None:
    """S <- a S + k u' of a head whose u `answer_head` has left in `sums`."""
    step = 4 * padded(COLUMNS)
    _pass(1, 0, source, target, token + DECAY * step, token + KEY * step, sums, 0, 0, 0, 0, 0)


@inline
def write_and_read_head(
    source: int, target: int, token: int, sums: int, next_source: int, next_token: int, next_sums: int, ahead: int
) -> None:
    """`write_head` of one head beside `read_head` of the next."""
    step = 4 * padded(COLUMNS)
    decays, keys = token + DECAY * step, token + KEY * step
    next_keys, next_queries = next_token + DECAYED_KEY * step, next_token + DECAYED_QUERY * step
    _pass(1, 1, source, target, decays, keys, sums, next_source, next_keys, next_queries, next_sums, ahead)


@inline
def answer_head(token: int, sums: int) -> None:
    """From w and z in `sums`: u there, and o in the place of v."""
    step = 4 * padded(COLUMNS)
    beta = splat_f32(scalar_f32_at(token + NUMBERS * step))
    qk = splat_f32(scalar_f32_at(token + NUMBERS * step + 4))
    for c in range(0, _ROW_BYTES, LINE_BYTES):
        v = token + VALUE * step + c
        u = beta * (f32_at(v) - f32_at(sums + _ROW_BYTES + c))
        store_at(sums + c, u)
        store_at(v, fma(qk, u, f32_at(sums + 2 * _ROW_BYTES + c)))


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _pass(
    typingctx: Any,
    writes: Any,
    reads: Any,
    source: Any,
    target: Any,
    decays: Any,
    keys: Any,
    sums: Any,
    next_source: Any,
    next_keys: Any,
    next_queries: Any,
    next_sums: Any,
    ahead: Any,
) -> Any:
    """The loop over key channels; `writes` and `reads`, 0 or 1 and literal, choose its two halves."""
    if not isinstance(writes, types.IntegerLiteral) or not isinstance(reads, types.IntegerLiteral):
        return None
    does_write, does_read = bool(writes.literal_value), bool(reads.literal_value)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_at, to_at, decays_at, keys_at, sums_at, next_at, next_keys_at, next_queries_at, next_sums_at, ahead_at = (
            args[2:]
        )
        u = [_load(builder, sums_at, i) for i in range(_VECTORS)] if does_write else []
        zeros = constant(f32x16, [0.0] * 16)
        totals = [cgutils.alloca_once_value(builder, zeros) for _ in range(2 * _VECTORS if does_read else 0)]
        with cgutils.for_range(builder, ir.Constant(_WORD, COLUMNS)) as loop:
            row = builder.mul(loop.index, ir.Constant(_WORD, _ROW_BYTES))
            number = builder.mul(loop.index, ir.Constant(_WORD, 4))
            if does_write:
                here, there = builder.add(from_at, row), builder.add(to_at, row)
                a, key = _number(builder, decays_at, number), _number(builder, keys_at, number)
                for i in range(_VECTORS):
                    kept = builder.fmul(a, _load(builder, here, i))
                    _stream(builder, there, i, _fma(builder, key, u[i], kept))
            if does_read:
                here = builder.add(next_at, row)
                _ask(builder, here, builder.add(ahead_at, row), loop.index)
                a, key = _number(builder, next_queries_at, number), _number(builder, next_keys_at, number)
                for i in range(_VECTORS):
                    value = _load(builder, here, i)
                    for factor, total in ((key, totals[i]), (a, totals[_VECTORS + i])):
                        builder.store(_fma(builder, factor, value, builder.load(total)), total)
        for i, total in enumerate(totals):
            place = pointer_value(builder, _at(builder, next_sums_at, _ROW_BYTES + LINE_BYTES * i), f32x16.llvm)
            builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return types.void(writes, reads, *[types.int64] * 10), codegen


def _ask(builder: Any, here: Any, row_at_ahead: Any, index: Any) -> None:
    """Prefetch the row some way on: of this head, or near its end of the next one."""
    is_inside = builder.icmp_signed("<", index, ir.Constant(_WORD, COLUMNS - _AHEAD_ROWS))
    back = ir.Constant(_WORD, (_AHEAD_ROWS - COLUMNS) * _ROW_BYTES)
    on = builder.add(here, ir.Constant(_WORD, _AHEAD_ROWS * _ROW_BYTES))
    address = builder.select(is_inside, on, builder.add(row_at_ahead, back))
    for i in range(_VECTORS):
        pointer = pointer_value(builder, _at(builder, address, LINE_BYTES * i), ir.IntType(8))
        is_read, second_level, data = (ir.Constant(ir.IntType(32), value) for value in (0, 2, 1))
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, is_read, second_level, data])


def _at(builder: Any, address: Any, nbytes: int) -> Any:
    return builder.add(address, ir.Constant(_WORD, nbytes))


def _load(builder: Any, address: Any, vector: int) -> Any:
    pointer = pointer_value(builder, _at(builder, address, LINE_BYTES * vector), f32x16.llvm)
    return builder.load(pointer, align=4, typ=f32x16.llvm)


def _number(builder: Any, address: Any, offset: Any) -> Any:
    pointer = pointer_value(builder, builder.add(address, offset), ir.FloatType())
    return splat_value(builder, builder.load(pointer, align=4, typ=ir.FloatType()), 16)


def _stream(builder: Any, address: Any, vector: int, value: Any) -> None:
    """Past the cache, as `lanes.stream_store_at`."""
    pointer = pointer_value(builder, _at(builder, address, LINE_BYTES * vector), f32x16.llvm)
    store = builder.store(value, pointer, align=LINE_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_llvm(builder, "llvm.fma.v16f32", f32x16.llvm, [a, b, c])
