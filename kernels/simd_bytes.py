"""Dots and look-ups of bytes, the operations on vectors that each kind of CPU has its own instructions for.

They are exact integer arithmetic, so the variants agree; :mod:`serai.kernels.cpu` chooses. All else is generic LLVM, in
:mod:`serai.kernels.simd`.
"""

from typing import Any

from llvmlite import ir

from serai.kernels import cpu
from serai.kernels.vec import Vec, call_llvm, constant, define, i8x64, i32x16, shuffle_value, u8x64, u32x16

SHUFFLE_IS_FAST = cpu.chosen_path() is not cpu.SimdPath.PLAIN
"""Whether :func:`shuffle_bytes` exists; without it, table lookups are written as arithmetic."""


def _split(builder: Any, value: Any, parts: int) -> list[Any]:
    lanes = value.type.count // parts
    return [shuffle_value(builder, value, value, list(range(i * lanes, (i + 1) * lanes))) for i in range(parts)]


def _join(builder: Any, values: list[Any]) -> Any:
    while len(values) > 1:
        lanes = values[0].type.count
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [shuffle_value(builder, a, b, list(range(2 * lanes))) for a, b in pairs]
    return values[0]


@define
def shuffle_bytes(typingctx: Any, table: Any, picks: Any) -> Any:
    """``table[picks]`` within each group of sixteen byte lanes; picks are 0..15. Only where :data:`SHUFFLE_IS_FAST`."""
    if not isinstance(table, Vec) or table.lanes != 64 or picks != u8x64 or not SHUFFLE_IS_FAST:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if cpu.chosen_path().is_avx512:
            return call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", table.llvm, list(args))
        half = ir.VectorType(ir.IntType(8), 32)
        tables, indices = _split(builder, args[0], 2), _split(builder, args[1], 2)
        pieces = [
            call_llvm(builder, "llvm.x86.avx2.pshuf.b", half, [t, i]) for t, i in zip(tables, indices, strict=True)
        ]
        return _join(builder, pieces)

    return table(table, picks), codegen


HAS_WIDE_LOOKUP = cpu.chosen_path().is_avx512 and bool(cpu.features().get("avx512vbmi"))
"""Whether :func:`lookup_64` exists: it needs no picks masked to 0..15."""


@define
def lookup_64(typingctx: Any, table: Any, picks: Any) -> Any:
    """``table[picks % 64]`` for each of 64 byte lanes. Only where :data:`HAS_WIDE_LOOKUP`."""
    if not isinstance(table, Vec) or table.lanes != 64 or picks != u8x64 or not HAS_WIDE_LOOKUP:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.x86.avx512.permvar.qi.512", table.llvm, list(args))

    return table(table, picks), codegen


def _dot4_plain(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    u, s = builder.bitcast(unsigned, u32x16.llvm), builder.bitcast(signed, i32x16.llvm)
    for byte in range(4):
        low = builder.and_(builder.lshr(u, constant(u32x16, [8 * byte] * 16)), constant(u32x16, [255] * 16))
        up = builder.shl(s, constant(i32x16, [24 - 8 * byte] * 16))
        acc = builder.add(acc, builder.mul(low, builder.ashr(up, constant(i32x16, [24] * 16))))
    return acc


def _dot4_half(builder: Any, path: cpu.SimdPath, acc: Any, unsigned: Any, signed: Any) -> Any:
    words = ir.VectorType(ir.IntType(32), 8)
    if path is cpu.SimdPath.AVX2_VNNI:
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.256", words, [acc, unsigned, signed])
    shorts = ir.VectorType(ir.IntType(16), 16)
    pairs = call_llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", shorts, [unsigned, signed])
    ones = ir.Constant(shorts, [1] * 16)
    return builder.add(acc, call_llvm(builder, "llvm.x86.avx2.pmadd.wd", words, [pairs, ones]))


def dot4_value(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """LLVM value of :func:`dot4`."""
    path = cpu.chosen_path()
    if path.is_avx512:
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", i32x16.llvm, [acc, unsigned, signed])
    if path is cpu.SimdPath.PLAIN:
        return _dot4_plain(builder, acc, unsigned, signed)
    accs, us, ss = (_split(builder, value, 2) for value in (acc, unsigned, signed))
    pieces = [_dot4_half(builder, path, a, u, s) for a, u, s in zip(accs, us, ss, strict=True)]
    return _join(builder, pieces)


def wide_dot4_value(builder: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """LLVM value of :func:`dot4` for unsigned values up to 255, whose pairs may not fit in int16."""
    if cpu.chosen_path() is not cpu.SimdPath.AVX2:
        return dot4_value(builder, acc, unsigned, signed)
    shorts, eight = ir.VectorType(ir.IntType(16), 32), ir.Constant(ir.VectorType(ir.IntType(16), 32), [8] * 32)
    u, s = builder.bitcast(unsigned, shorts), builder.bitcast(signed, shorts)
    odd = builder.lshr(u, eight), builder.ashr(s, eight)
    even = builder.lshr(builder.shl(u, eight), eight), builder.ashr(builder.shl(s, eight), eight)
    words = ir.VectorType(ir.IntType(32), 8)
    for a, b in (even, odd):
        halves = zip(_split(builder, a, 2), _split(builder, b, 2), strict=True)
        sums = [call_llvm(builder, "llvm.x86.avx2.pmadd.wd", words, [x, y]) for x, y in halves]
        acc = builder.add(acc, _join(builder, sums))
    return acc


@define
def dot4(typingctx: Any, acc: Any, unsigned: Any, signed: Any) -> Any:
    """``acc[i] + sum of unsigned[4i + j] * signed[4i + j], j = 0..3``, exact in int32.

    Pairs must fit in int16 (u0*s0 + u1*s1 within +-32767: true for unsigned values up to 128), the AVX2 form's limit.
    """
    if acc != i32x16 or unsigned != u8x64 or signed != i8x64:
        return None
    return i32x16(acc, unsigned, signed), lambda context, builder, sig, args: dot4_value(builder, *args)
