"""What a token brings to one KDA head: convolved q, k, v, their norms, decay and correction strength.

Prepared tokens lie in scratch as rows of `width` floats at the offsets below, followed by sixteen floats whose first
two are beta and q.k. The width is the head's, rounded up to 16; the excess holds finite numbers, and zeros in the row
of v, so that the excess columns of a state stay zero.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from serai.kernels.compile import inline
from serai.kernels.lanes import LINE_BYTES, copy_floats, load_lanes, stream_store_at
from serai.kernels.mathfn import exp16, sigmoid16, silu16, softplus16
from serai.kernels.memory import addr, f32_at, prefetch, prefetch_l2, store_at, store_scalar_f32_at
from serai.kernels.naive import L2_EPS
from serai.kernels.simd import fma, hsum, lane, splat_f32

TAPS = 4
"""Of the short convolution; its tail is the three inputs before the newest."""

# Tokens between asking for a line of the inputs and using it: a head's piece of each row is too short for the
# hardware to see a pattern in.
AHEAD = 2

# Rows of a prepared token. Once it has passed through the state, its output is where its value was.
DECAY, KEY, DECAYED_KEY, DECAYED_QUERY, VALUE, NUMBERS = range(6)


class KdaLayer(NamedTuple):
    """The arguments of `serai.kernels.kda.kda`, in its order."""

    proj: Any
    q_col: Any
    k_col: Any
    v_col: Any
    z: Any
    z_col: Any
    beta_src: Any
    beta_col: Any
    gate_src: Any
    gate_col: Any
    conv_w: Any
    decay_rate: Any
    dt_bias: Any
    o_norm: Any
    eps: Any
    lower_bound: Any
    heads: Any
    head_dim: Any
    seg_start: Any
    state_in: Any
    state_out: Any
    kda_offset: Any
    conv_offset: Any
    out: Any
    out_col: Any


class Stream(NamedTuple):
    """Where one head finds the inputs of one of its convolutions; byte addresses and byte steps."""

    rows: Any
    """Of this call, from token 0."""
    row_bytes: Any
    tail: Any
    """The three before token 0, oldest first; 0 in an empty session."""
    tap_bytes: Any
    """From one tap to the next, in the tail and in the weights."""
    weights: Any
    zeros: Any


@inline
def padded(head_dim: int) -> int:
    """The width of a row of scratch."""
    return (head_dim + 15) // 16 * 16


@inline
def token_floats(head_dim: int) -> int:
    """Floats of a prepared token."""
    return NUMBERS * padded(head_dim) + 16


@inline
def stream_of(layer: KdaLayer, which: int, column: int, segment: int, head: int, zeros: int) -> Any:
    """The inputs of q (which = 0), k (1) or v (2), whose projection starts at `column`."""
    channel = head * layer.head_dim
    tap_bytes = 4 * layer.heads * layer.head_dim
    tail = layer.state_in[segment]
    if tail:
        tail += 4 * (layer.conv_offset + channel) + which * (TAPS - 1) * tap_bytes
    rows = addr(layer.proj, layer.seg_start[segment] * layer.proj.shape[1] + column + channel)
    weights = addr(layer.conv_w, channel) + which * TAPS * tap_bytes
    return Stream(rows, 4 * layer.proj.shape[1], tail, tap_bytes, weights, zeros)


@inline
def _input(stream: Stream, t: int) -> Any:
    """Address of the input at token t of the call, which may be as early as -3."""
    if t >= 0:
        return stream.rows + t * stream.row_bytes
    if stream.tail:
        return stream.tail + (TAPS - 1 + t) * stream.tap_bytes
    return stream.zeros


@inline
def write_tail(stream: Stream, tokens: int, head_dim: int, target: int, past_cache: bool) -> None:
    """The last three inputs after `tokens` tokens, for the next call; `past_cache` where they are whole lines."""
    for j in range(TAPS - 1):
        source, there = _input(stream, tokens - (TAPS - 1) + j), target + j * stream.tap_bytes
        if past_cache:
            for c in range(0, 4 * head_dim, LINE_BYTES):
                stream_store_at(there + c, f32_at(source + c))
        else:
            copy_floats(source, there, head_dim)


@inline
def ask_for_next(stream: Stream, head_bytes: int) -> None:
    """Have the next head's tail and filters, so many bytes of each row, come into the second-level cache."""
    for c in range(head_bytes, 2 * head_bytes, LINE_BYTES):
        for row in range(TAPS - 1):
            prefetch_l2(stream.tail + row * stream.tap_bytes + c)
        for row in range(TAPS):
            prefetch_l2(stream.weights + row * stream.tap_bytes + c)


@inline
def _convolve(stream: Stream, t: int, head_dim: int, out: int) -> Any:
    """SiLU of the convolution at token t to `out`; returns its sum of squares (lanes by channel modulo 16)."""
    x0, x1, x2, x3 = _input(stream, t - 3), _input(stream, t - 2), _input(stream, t - 1), _input(stream, t)
    w0 = stream.weights
    w1 = w0 + stream.tap_bytes
    w2 = w1 + stream.tap_bytes
    w3 = w2 + stream.tap_bytes
    squares = splat_f32(0.0)
    for c in range(0, 4 * head_dim, 64):
        n = head_dim - c // 4
        y = load_lanes(w0 + c, n) * load_lanes(x0 + c, n)
        y = fma(load_lanes(w1 + c, n), load_lanes(x1 + c, n), y)
        y = fma(load_lanes(w2 + c, n), load_lanes(x2 + c, n), y)
        y = silu16(fma(load_lanes(w3 + c, n), load_lanes(x3 + c, n), y))
        store_at(out + c, y)
        squares = fma(y, y, squares)
        prefetch(x3 + c + AHEAD * stream.row_bytes)
    return hsum(squares)


@inline
def _inverse_norm(square_sum: float) -> Any:
    return np.float32(1.0) / math.sqrt(np.float32(square_sum) + np.float32(L2_EPS))


@inline
def prepare(layer: KdaLayer, q: Stream, k: Stream, v: Stream, t: int, row: int, head: int, token: int) -> None:
    """Token t of the call, which is row `row` of the batch, for one head, to the scratch at `token`."""
    head_dim = layer.head_dim
    step = 4 * padded(head_dim)
    channel = head * head_dim
    # The raw q waits in the row that its final form will take.
    q_scale = _inverse_norm(_convolve(q, t, head_dim, token + DECAYED_QUERY * step))
    q_scale *= np.float32(1.0) / math.sqrt(np.float32(head_dim))
    k_scale = _inverse_norm(_convolve(k, t, head_dim, token + KEY * step))
    _convolve(v, t, head_dim, token + VALUE * step)
    z = addr(layer.z, row * layer.z.shape[1] + layer.z_col + channel)
    gate = addr(layer.gate_src, row * layer.gate_src.shape[1] + layer.gate_col + channel)
    bias = addr(layer.dt_bias, channel)
    rate = splat_f32(layer.decay_rate[head])
    products = splat_f32(0.0)
    for c in range(0, 4 * head_dim, 64):
        n = head_dim - c // 4
        raw = load_lanes(z + c, n) + load_lanes(bias + c, n)
        if layer.lower_bound != np.float32(0.0):
            decay = exp16(splat_f32(layer.lower_bound) * sigmoid16(rate * raw))
        else:
            decay = exp16(-(rate * softplus16(raw)))
        key = f32_at(token + KEY * step + c) * splat_f32(k_scale)
        query = f32_at(token + DECAYED_QUERY * step + c) * splat_f32(q_scale)
        store_at(token + DECAY * step + c, decay)
        store_at(token + KEY * step + c, key)
        store_at(token + DECAYED_KEY * step + c, decay * key)
        store_at(token + DECAYED_QUERY * step + c, decay * query)
        products = fma(query, key, products)
        prefetch(z + c + AHEAD * 4 * layer.z.shape[1])
        prefetch(gate + c)
    numbers = token + NUMBERS * step
    beta = lane(sigmoid16(splat_f32(layer.beta_src[row, layer.beta_col + head])), 0)
    store_scalar_f32_at(numbers, beta)
    store_scalar_f32_at(numbers + 4, hsum(products))
