"""RMS norms, attention residuals, output gates and other small work on whole rows.

A row's sums are those of `sum_of_squares`: four vectors of partial sums by position modulo 64, then pairwise. Rows are
independent; `out` may be the input.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import copy_floats, load_lanes, store_lanes, sum_of_squares
from serai.kernels.mathfn import exp16, sigmoid16
from serai.kernels.memory import addr, f32_at, scalar_f32_at, store_scalar_f32_at
from serai.kernels.simd import any_of, as_i32, fma, hsum, splat_f32, splat_i32
from serai.kernels.threads import parallel_for
from serai.kernels.vec import define

F32 = NDArray[np.float32]

MAX_RESIDUALS = 256
"""States that one attention residual can mix, the running sum included (K3 has at most nine)."""

# Floats of work below which waking other threads costs more than it saves.
SPREAD_FLOATS = 1 << 15


@inline
def inverse_rms(square_sum: float, n: int, eps: float) -> Any:
    """1 / sqrt(mean + eps) of `n` floats whose squares sum to `square_sum`, all in float32."""
    return np.float32(1.0) / math.sqrt(np.float32(square_sum) / np.float32(n) + np.float32(eps))


@inline
def norm_to(x: int, n: int, w: int, scale: float, out: int) -> None:
    """out = x * scale * w over `n` floats at byte addresses."""
    for c in range(0, 4 * n, 64):
        left = n - c // 4
        store_lanes(out + c, load_lanes(x + c, left) * splat_f32(scale) * load_lanes(w + c, left), left)


@inline
def _rms_norm_row(row: int, x: Any, x_col: int, n: int, w: Any, eps: float, out: Any, out_col: int) -> None:
    source = addr(x, row * x.shape[1] + x_col)
    scale = inverse_rms(sum_of_squares(source, n), n, eps)
    norm_to(source, n, addr(w, 0), scale, addr(out, row * out.shape[1] + out_col))


@kernel("void(f32[:, ::1], i64, i64, f32[::1], f32, f32[:, ::1], i64)", before=threads.start)
def rms_norm(x: F32, x_col: int, n: int, w: F32, eps: float, out: F32, out_col: int) -> None:
    """out[r, out_col + j] = x / sqrt(mean(x^2) + eps) * w over the n columns of x[r] from x_col. `out` may be `x`."""
    parallel_for(x.shape[0], x.shape[0] * n > SPREAD_FLOATS, _rms_norm_row, (x, x_col, n, w, eps, out, out_col))


@define
def _residual_scores(typingctx: Any) -> Any:
    """The byte address of room for MAX_RESIDUALS floats on the stack."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        room = cgutils.alloca_once(builder, ir.ArrayType(ir.FloatType(), MAX_RESIDUALS))
        return builder.ptrtoint(room, ir.IntType(64))

    return types.int64(), codegen


@inline
def _residual_score(value: int, score_w: int, n: int, eps: float) -> Any:
    """Score of one state: its dot with the score vector, over its rms."""
    s0 = s1 = splat_f32(0.0)
    whole = n // 32 * 32
    for c in range(0, 4 * whole, 128):
        s0 = fma(f32_at(value + c), f32_at(score_w + c), s0)
        s1 = fma(f32_at(value + c + 64), f32_at(score_w + c + 64), s1)
    for c in range(4 * whole, 4 * n, 64):
        left = n - c // 4
        s0 = fma(load_lanes(value + c, left), load_lanes(score_w + c, left), s0)
    return hsum(s0 + s1) * inverse_rms(sum_of_squares(value, n), n, eps)


@inline
def _softmax_in_place(scores: int, n: int) -> None:
    """Softmax of `n` floats at a byte address; the sum runs over lanes by position modulo 16, then pairwise."""
    largest = np.float32(-np.inf)
    for i in range(n):
        largest = max(largest, scalar_f32_at(scores + 4 * i))
    total = splat_f32(0.0)
    for c in range(0, n, 16):
        weights = exp16(load_lanes(scores + 4 * c, n - c) - splat_f32(largest))
        store_lanes(scores + 4 * c, weights, n - c)
        total = total + load_lanes(scores + 4 * c, n - c)
    for c in range(0, n, 16):
        store_lanes(scores + 4 * c, load_lanes(scores + 4 * c, n - c) / splat_f32(hsum(total)), n - c)


@inline
def _residual_value(i: int, n_blocks: int, row: int, blocks: Any, ps: Any) -> Any:
    """Address of the i-th state of a row: a block's, or after the last block the running sum."""
    if i < n_blocks:
        return addr(blocks, (i * blocks.shape[1] + row) * blocks.shape[2])
    return addr(ps, row * ps.shape[1])


@inline
def _attn_res_row(
    row: int,
    blocks: Any,
    n_blocks: int,
    ps: Any,
    use_ps: int,
    score_w: Any,
    eps: float,
    norm_w: Any,
    norm_eps: float,
    out: Any,
) -> None:
    hidden = out.shape[1]
    target = addr(out, row * hidden)
    source = target
    if n_blocks == 0:
        source = addr(ps, row * hidden)
    else:
        count = n_blocks + use_ps
        scores = _residual_scores()
        for i in range(count):
            value = _residual_value(i, n_blocks, row, blocks, ps)
            store_scalar_f32_at(scores + 4 * i, _residual_score(value, addr(score_w, 0), hidden, eps))
        _softmax_in_place(scores, count)
        for c in range(0, 4 * hidden, 64):
            left = hidden - c // 4
            mixed = splat_f32(0.0)
            for i in range(count):
                value = _residual_value(i, n_blocks, row, blocks, ps)
                mixed = fma(splat_f32(scalar_f32_at(scores + 4 * i)), load_lanes(value + c, left), mixed)
            store_lanes(target + c, mixed, left)
    scale = inverse_rms(sum_of_squares(source, hidden), hidden, norm_eps)
    norm_to(source, hidden, addr(norm_w, 0), scale, target)


@kernel("void(f32[:, :, ::1], i64, f32[:, ::1], i64, f32[::1], f32, f32[::1], f32, f32[:, ::1])", before=threads.start)
def attn_res(
    blocks: F32,
    n_blocks: int,
    ps: F32,
    use_ps: int,
    score_w: F32,
    eps: float,
    norm_w: F32,
    norm_eps: float,
    out: F32,
) -> None:
    """Attention residual and the RMS norm after it: out[r] = norm(mix of blocks[:n_blocks, r] and, if use_ps, ps[r]).

    `blocks [NB, >= R, hidden]`, `ps, out [R, hidden]`, `score_w` = norm weight * proj weight `[hidden]`; `eps`
    belongs to the scores, `norm_eps` to the norm. Without blocks nothing is mixed: out[r] = norm(ps[r]). At most
    `MAX_RESIDUALS` states; `out` must not be `ps` or one of the blocks unless n_blocks is 0.
    """
    if n_blocks + use_ps > MAX_RESIDUALS or (n_blocks == 0 and use_ps == 0):
        raise ValueError("attn_res mixes 1 to 256 states")
    spread = out.size * (n_blocks + 1) > SPREAD_FLOATS
    arguments = (blocks, n_blocks, ps, use_ps, score_w, eps, norm_w, norm_eps, out)
    parallel_for(out.shape[0], spread, _attn_res_row, arguments)


@inline
def _sigmoid_gate_row(row: int, x: Any, x_col: int, gate: Any, gate_col: int, n: int) -> None:
    target = addr(x, row * x.shape[1] + x_col)
    source = addr(gate, row * gate.shape[1] + gate_col)
    for c in range(0, 4 * n, 64):
        left = n - c // 4
        store_lanes(target + c, load_lanes(target + c, left) * sigmoid16(load_lanes(source + c, left)), left)


@kernel("void(f32[:, ::1], i64, f32[:, ::1], i64, i64)", before=threads.start)
def sigmoid_gate(x: F32, x_col: int, gate: F32, gate_col: int, n: int) -> None:
    """x[r, x_col + j] *= sigmoid(gate[r, gate_col + j]) for j < n, in place."""
    parallel_for(x.shape[0], x.shape[0] * n > SPREAD_FLOATS, _sigmoid_gate_row, (x, x_col, gate, gate_col, n))


@inline
def _copy_row(row: int, x: Any, at: Any, out: Any, out_at: Any, heads: int, n: int) -> None:
    for head in range(heads):
        source = addr(x, row * x.shape[1] + at[0] + head * at[1])
        copy_floats(source, addr(out, row * out.shape[1] + out_at[0] + head * out_at[1]), n)


@kernel("void(f32[:, ::1], i64, i64, f32[:, ::1], i64, i64, i64, i64)", before=threads.start)
def copy_heads(x: F32, x_col: int, x_stride: int, out: F32, out_col: int, out_stride: int, heads: int, n: int) -> None:
    """out[r, out_col + h * out_stride + j] = x[r, x_col + h * x_stride + j] for h < heads and j < n."""
    arguments = (x, (x_col, x_stride), out, (out_col, out_stride), heads, n)
    parallel_for(x.shape[0], x.shape[0] * heads * n > SPREAD_FLOATS, _copy_row, arguments)


@inline
def _add_row(row: int, a: Any, b: Any, out: Any) -> None:
    n = out.shape[1]
    for c in range(0, 4 * n, 64):
        left = n - c // 4
        total = load_lanes(addr(a, row * n) + c, left) + load_lanes(addr(b, row * n) + c, left)
        store_lanes(addr(out, row * n) + c, total, left)


@kernel("void(f32[:, ::1], f32[:, ::1], f32[:, ::1])", before=threads.start)
def add(a: F32, b: F32, out: F32) -> None:
    """out = a + b, all `[R, H]`; `out` may be either."""
    parallel_for(out.shape[0], out.size > SPREAD_FLOATS, _add_row, (a, b, out))


@inline
def _is_finite_row(row: int, x: Any, out: Any) -> None:
    n = x.shape[1]
    exponent = splat_i32(0x7F800000)
    found = splat_i32(0) != splat_i32(0)
    for c in range(0, n, 16):
        bits = as_i32(load_lanes(addr(x, row * n + c), n - c))
        found = found | ((bits & exponent) == exponent)
    out[row] = np.uint8(0) if any_of(found) else np.uint8(1)


@kernel("void(f32[:, ::1], u8[::1])", before=threads.start)
def is_finite_rows(x: F32, out: NDArray[np.uint8]) -> None:
    """out[r] = 1 if no element of `x[r]` is NaN or infinite, else 0. A test of bits: no compiler option removes it."""
    parallel_for(x.shape[0], x.size > SPREAD_FLOATS, _is_finite_row, (x, out))
