"""RMS norms, attention residuals, output gates and other small work on whole rows.

A row's sums are those of `sum_of_squares`: four vectors of partial sums by position modulo 64, then pairwise. Rows are
independent; `out` may be the input.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import LINE_BYTES, copy_floats, load_lanes, store_lanes, sum_of_squares
from serai.kernels.mathfn import exp16, sigmoid16
from serai.kernels.memory import addr, f32_at, prefetch_l2, scalar_f32_at, store_at, store_scalar_f32_at
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
    """Score of one state: its dot with the score vector, over its rms.

    One pass for both, in the order of the sums of `sum_of_squares`; the state's next row is asked for beside it.
    """
    s0 = s1 = splat_f32(0.0)
    q0 = q1 = q2 = q3 = splat_f32(0.0)
    whole = n // 64 * 64
    for c in range(0, 4 * whole, 256):
        x, w = value + c, score_w + c
        x0, x1, x2, x3 = f32_at(x), f32_at(x + 64), f32_at(x + 128), f32_at(x + 192)
        s0, s1 = fma(x0, f32_at(w), s0), fma(x1, f32_at(w + 64), s1)
        s0, s1 = fma(x2, f32_at(w + 128), s0), fma(x3, f32_at(w + 192), s1)
        q0, q1, q2, q3 = fma(x0, x0, q0), fma(x1, x1, q1), fma(x2, x2, q2), fma(x3, x3, q3)
        for line in range(0, 256, LINE_BYTES):
            prefetch_l2(x + 4 * n + line)
    for c in range(4 * whole, 4 * n, 64):
        x0, w0 = load_lanes(value + c, n - c // 4), load_lanes(score_w + c, n - c // 4)
        q0 = fma(x0, x0, q0)
        # The second vector of a pair has its own sum, as above, if it is whole.
        if c // 64 % 2 == 1 and n - c // 4 >= 16:
            s1 = fma(x0, w0, s1)
        else:
            s0 = fma(x0, w0, s0)
    return hsum(s0 + s1) * inverse_rms(hsum((q0 + q1) + (q2 + q3)), n, eps)


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


class _States(NamedTuple):
    """The states of one row: so many from `blocks` on, and after them the running sum. Byte addresses."""

    blocks: Any
    block_bytes: Any
    n_blocks: Any
    running: Any
    count: Any


@inline
def _state(states: _States, i: int) -> Any:
    """Address of the i-th."""
    return states.blocks + i * states.block_bytes if i < states.n_blocks else states.running


@inline
def _mix_64(states: _States, c: int, scores: int, target: int) -> None:
    """64 columns from byte `c` of a row: the sum of the states, each times its score, in ascending order."""
    m0 = m1 = m2 = m3 = splat_f32(0.0)
    for i in range(states.count):
        x, score = _state(states, i) + c, splat_f32(scalar_f32_at(scores + 4 * i))
        m0, m1 = fma(score, f32_at(x), m0), fma(score, f32_at(x + 64), m1)
        m2, m3 = fma(score, f32_at(x + 128), m2), fma(score, f32_at(x + 192), m3)
    store_at(target + c, m0)
    store_at(target + c + 64, m1)
    store_at(target + c + 128, m2)
    store_at(target + c + 192, m3)


@inline
def _mix_16(states: _States, c: int, n: int, scores: int, target: int) -> None:
    """The same for up to 16 columns, `n` if they are fewer."""
    mixed = splat_f32(0.0)
    for i in range(states.count):
        mixed = fma(splat_f32(scalar_f32_at(scores + 4 * i)), load_lanes(_state(states, i) + c, n), mixed)
    store_lanes(target + c, mixed, n)


@inline
def _mix(states: _States, score_w: int, hidden: int, eps: float, target: int) -> None:
    """The attention residual of a row to `target`."""
    scores = _residual_scores()
    for i in range(states.count):
        store_scalar_f32_at(scores + 4 * i, _residual_score(_state(states, i), score_w, hidden, eps))
    _softmax_in_place(scores, states.count)
    whole = hidden // 64 * 64
    for c in range(0, 4 * whole, 256):
        _mix_64(states, c, scores, target)
    for c in range(4 * whole, 4 * hidden, 64):
        _mix_16(states, c, hidden - c // 4, scores, target)


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
    target, running = addr(out, row * hidden), addr(ps, row * hidden)
    source = running
    if n_blocks > 0:
        block_bytes = 4 * blocks.shape[1] * hidden
        states = _States(addr(blocks, row * hidden), block_bytes, n_blocks, running, n_blocks + use_ps)
        _mix(states, addr(score_w, 0), hidden, eps, target)
        source = target
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
