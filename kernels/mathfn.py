"""exp, sigmoid, SiLU, tanh and softplus of sixteen float32 lanes: the one routine each that every kernel uses.

Each lane depends on its own input alone, so a masked tail gives the bits of a full vector. Built from correctly rounded
operations only (fused multiply-add, division, no reciprocal estimates), so every CPU with a fused multiply-add agrees.
Against float64: exp within 1.1 ulp, softplus within 2, tanh, sigmoid and SiLU within 3. NaN gives NaN; results below
the smallest normal number are denormal, not flushed; infinities are what the limits say.

Polynomials are minimax fits in relative error, made by reweighted least squares in high precision and rounded to
float32.
"""

from typing import Any

from llvmlite import ir

from serai.kernels import cpu
from serai.kernels.compile import inline
from serai.kernels.naive import SOFTPLUS_THRESHOLD
from serai.kernels.simd import as_f32, as_i32, copysign, fma, select, splat_f32, vabs
from serai.kernels.vec import call_llvm, constant, define, f32x16, i32x16

LOG2_E = 1.4426950408889634
# ln 2 in two float32 parts: the upper as rounded, the lower what that leaves out.
LN2_HIGH = 0.693147182464599609375
LN2_LOW = -1.904654299957768e-09
# Adding and taking away 1.5 * 2^23 rounds a float32 to the nearest integer.
ROUNDER = 12582912.0
ROUNDER_BITS = 0x4B400000
# Below the first exp rounds to 0, above the second to infinity; beyond them the exponent arithmetic would wrap.
EXP_LOWEST = -104.0
EXP_HIGHEST = 89.0
# From here on tanh rounds to 1; bounding it keeps products of its fractions finite.
TANH_IS_ONE = 10.0


@define
def _scale(typingctx: Any, v: Any, n: Any) -> Any:
    """v * 2^n for integral float lanes n in -150..128, rounded once: one AVX-512 instruction, or two products."""
    if v != f32x16 or n != f32x16:
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if cpu.chosen_path().is_avx512:
            every_lane = ir.Constant(ir.IntType(16), 0xFFFF)
            current_rounding = ir.Constant(ir.IntType(32), 4)
            operands = [*args, args[0], every_lane, current_rounding]
            return call_llvm(builder, "llvm.x86.avx512.mask.scalef.ps.512", f32x16.llvm, operands)
        # The integer is in the low bits of n + ROUNDER (a conversion would be undefined for the NaN lanes).
        shifted = builder.fadd(args[1], constant(f32x16, [ROUNDER] * 16))
        whole = builder.sub(builder.bitcast(shifted, i32x16.llvm), constant(i32x16, [ROUNDER_BITS] * 16))
        half = builder.ashr(whole, constant(i32x16, [1] * 16))
        value = args[0]
        for part in (half, builder.sub(whole, half)):
            biased = builder.add(part, constant(i32x16, [127] * 16))
            power = builder.shl(biased, constant(i32x16, [23] * 16))
            value = builder.fmul(value, builder.bitcast(power, f32x16.llvm))
        return value

    return f32x16(f32x16, f32x16), codegen


@inline
def _exp_less_one16(x: Any, n: Any) -> Any:
    """e^r - 1 for r = x - n ln 2, n being x / ln 2 rounded to an integer, so |r| <= ln2 / 2."""
    r = fma(n, splat_f32(-LN2_HIGH), x)
    r = fma(n, splat_f32(-LN2_LOW), r)
    tail = fma(splat_f32(0.001395049155689776), r, splat_f32(0.008368889801204205))
    tail = fma(tail, r, splat_f32(0.04166620597243309))
    tail = fma(tail, r, splat_f32(0.166665181517601))
    tail = fma(tail, r, splat_f32(0.5))
    return fma(r * r, tail, r)


@inline
def exp16(x: Any) -> Any:
    """e^x, as 2^n * e^r with |r| <= ln2 / 2."""
    clamped = select(x < splat_f32(EXP_LOWEST), splat_f32(EXP_LOWEST), x)
    clamped = select(clamped > splat_f32(EXP_HIGHEST), splat_f32(EXP_HIGHEST), clamped)
    n = fma(clamped, splat_f32(LOG2_E), splat_f32(ROUNDER)) - splat_f32(ROUNDER)
    return _scale(_exp_less_one16(clamped, n) + splat_f32(1.0), n)


@inline
def sigmoid_fraction16(x: Any) -> Any:
    """1 / (1 + e^-x) as a numerator and a denominator of 1 to 2, to full relative precision at both ends."""
    small = exp16(-vabs(x))
    return select(x >= splat_f32(0.0), splat_f32(1.0), small), splat_f32(1.0) + small


@inline
def sigmoid16(x: Any) -> Any:
    """1 / (1 + e^-x), to full relative precision at both ends."""
    numerator, denominator = sigmoid_fraction16(x)
    return numerator / denominator


@inline
def silu16(x: Any) -> Any:
    """x * sigmoid(x) as x / (1 + e^-x); 0 at minus infinity, as the limit."""
    x = select(x < splat_f32(EXP_LOWEST), splat_f32(EXP_LOWEST), x)
    return x / (splat_f32(1.0) + exp16(-x))


@inline
def tanh_fraction16(x: Any) -> Any:
    """Hyperbolic tangent as a numerator and a denominator of 2 to e^20 + 1: a product of some needs only one division.

    (e^2x - 1) / (e^2x + 1) with e^2x = 2^n + 2^n (e^r - 1); near 0, where the numerator must be precise, n is 0.
    """
    size = select(vabs(x) > splat_f32(TANH_IS_ONE), splat_f32(TANH_IS_ONE), vabs(x))
    twice = size + size
    shifted = fma(twice, splat_f32(LOG2_E), splat_f32(ROUNDER))
    power = as_f32((as_i32(shifted) + (127 - ROUNDER_BITS)) << 23)
    rest = power * _exp_less_one16(twice, shifted - splat_f32(ROUNDER))
    return copysign(rest + (power - splat_f32(1.0)), x), rest + (power + splat_f32(1.0))


@inline
def softplus16(x: Any) -> Any:
    """log(1 + e^x); x itself above 20, as all implementations of these models have it."""
    small = exp16(-vabs(x))
    # log(1 + y) = y - s (y - s^2 q(s^2)) with s = y / (2 + y): the series of 2 artanh(s), its leading term made exact.
    s = small / (splat_f32(2.0) + small)
    square = s * s
    tail = fma(splat_f32(0.24308325350284576), square, splat_f32(0.21425850689411163))
    tail = fma(tail, square, splat_f32(0.2861703634262085))
    tail = fma(tail, square, splat_f32(0.39998874068260193))
    tail = fma(tail, square, splat_f32(0.6666667461395264))
    log1p = fma(-s, fma(-square, tail, small), small)
    return select(x > splat_f32(SOFTPLUS_THRESHOLD), x, select(x > splat_f32(0.0), x, splat_f32(0.0)) + log1p)
