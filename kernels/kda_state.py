"""A KDA head's state meeting prepared tokens, 64 of its columns at a time.

`source` and `target` are byte addresses of a panel's first column, with the bytes from one key channel to the next;
`token` is a prepared token (`kernels/kda_inputs.py`). Consecutive tokens share a pass: writing the state for one is
reading it for the next.
"""

from typing import Any

from serai.kernels.compile import inline
from serai.kernels.kda_inputs import (
    DECAY,
    DECAYED_KEY,
    DECAYED_QUERY,
    KEY,
    NUMBERS,
    VALUE,
    padded,
    token_floats,
)
from serai.kernels.lanes import LINE_BYTES, load_lanes, store_lanes, stream_store_at
from serai.kernels.memory import f32_at, prefetch_l2, scalar_f32_at, store_at
from serai.kernels.simd import fma, splat_f32

PANEL = 64
"""Columns of the state that pass through the tokens together: four vectors, so eight sums in flight."""


@inline
def _read_64(source: int, source_bytes: int, token: int, head_dim: int) -> Any:
    """The sums w and z of one token over 64 columns of the state: eight vectors."""
    step = 4 * padded(head_dim)
    keys, queries = token + DECAYED_KEY * step, token + DECAYED_QUERY * step
    w0 = w1 = w2 = w3 = z0 = z1 = z2 = z3 = splat_f32(0.0)
    for k in range(head_dim):
        s = source + k * source_bytes
        ak, aq = splat_f32(scalar_f32_at(keys + 4 * k)), splat_f32(scalar_f32_at(queries + 4 * k))
        s0, s1, s2, s3 = f32_at(s), f32_at(s + 64), f32_at(s + 128), f32_at(s + 192)
        w0, w1, w2, w3 = fma(ak, s0, w0), fma(ak, s1, w1), fma(ak, s2, w2), fma(ak, s3, w3)
        z0, z1, z2, z3 = fma(aq, s0, z0), fma(aq, s1, z1), fma(aq, s2, z2), fma(aq, s3, z3)
    return w0, w1, w2, w3, z0, z1, z2, z3


@inline
def _answer_64(sums: Any, token: int, head_dim: int, column: int) -> Any:
    """From w and z: o, in the place of v, and the corrections u of the 64 columns."""
    w0, w1, w2, w3, z0, z1, z2, z3 = sums
    step = 4 * padded(head_dim)
    v = token + VALUE * step + 4 * column
    beta = splat_f32(scalar_f32_at(token + NUMBERS * step))
    qk = splat_f32(scalar_f32_at(token + NUMBERS * step + 4))
    u0, u1 = beta * (f32_at(v) - w0), beta * (f32_at(v + 64) - w1)
    u2, u3 = beta * (f32_at(v + 128) - w2), beta * (f32_at(v + 192) - w3)
    store_at(v, fma(qk, u0, z0))
    store_at(v + 64, fma(qk, u1, z1))
    store_at(v + 128, fma(qk, u2, z2))
    store_at(v + 192, fma(qk, u3, z3))
    return u0, u1, u2, u3


@inline
def _write_64(
    source: int,
    source_bytes: int,
    target: int,
    target_bytes: int,
    token: int,
    head_dim: int,
    u: Any,
    past_cache: bool,
    ahead: int,
) -> None:
    """S <- a S + k u' over 64 columns, from `source` to `target`.

    Writing past the cache, as many bytes from `ahead` are asked for: memory then reads and writes at once.
    """
    u0, u1, u2, u3 = u
    step = 4 * padded(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    if past_cache:
        for k in range(head_dim):
            s, d = source + k * source_bytes, target + k * target_bytes
            a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
            for line in range(0, 4 * PANEL, LINE_BYTES):
                prefetch_l2(ahead + k * 4 * PANEL + line)
            stream_store_at(d, fma(key, u0, a * f32_at(s)))
            stream_store_at(d + 64, fma(key, u1, a * f32_at(s + 64)))
            stream_store_at(d + 128, fma(key, u2, a * f32_at(s + 128)))
            stream_store_at(d + 192, fma(key, u3, a * f32_at(s + 192)))
    else:
        for k in range(head_dim):
            s, d = source + k * source_bytes, target + k * target_bytes
            a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
            store_at(d, fma(key, u0, a * f32_at(s)))
            store_at(d + 64, fma(key, u1, a * f32_at(s + 64)))
            store_at(d + 128, fma(key, u2, a * f32_at(s + 128)))
            store_at(d + 192, fma(key, u3, a * f32_at(s + 192)))


@inline
def _write_and_read_64(
    source: int, source_bytes: int, panel: int, token: int, following: int, head_dim: int, u: Any
) -> Any:
    """`_write_64` of one token to the panel and `_read_64` of the following one, in one pass."""
    u0, u1, u2, u3 = u
    step = 4 * padded(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    next_keys, next_queries = following + DECAYED_KEY * step, following + DECAYED_QUERY * step
    w0 = w1 = w2 = w3 = z0 = z1 = z2 = z3 = splat_f32(0.0)
    for k in range(head_dim):
        s, d = source + k * source_bytes, panel + k * 4 * PANEL
        a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
        s0, s1 = fma(key, u0, a * f32_at(s)), fma(key, u1, a * f32_at(s + 64))
        s2, s3 = fma(key, u2, a * f32_at(s + 128)), fma(key, u3, a * f32_at(s + 192))
        store_at(d, s0)
        store_at(d + 64, s1)
        store_at(d + 128, s2)
        store_at(d + 192, s3)
        ak, aq = splat_f32(scalar_f32_at(next_keys + 4 * k)), splat_f32(scalar_f32_at(next_queries + 4 * k))
        w0, w1, w2, w3 = fma(ak, s0, w0), fma(ak, s1, w1), fma(ak, s2, w2), fma(ak, s3, w3)
        z0, z1, z2, z3 = fma(aq, s0, z0), fma(aq, s1, z1), fma(aq, s2, z2), fma(aq, s3, z3)
    return w0, w1, w2, w3, z0, z1, z2, z3


@inline
def tokens_64(
    source: int,
    source_bytes: int,
    panel: int,
    target: int,
    target_bytes: int,
    tokens: int,
    count: int,
    head_dim: int,
    column: int,
    past_cache: bool,
    ahead: int,
) -> None:
    """`count` prepared tokens through 64 columns: the state from `source` through the panel to `target`.

    `past_cache`, `ahead`: see `_write_64`.
    """
    token_bytes = 4 * token_floats(head_dim)
    sums = _read_64(source, source_bytes, tokens, head_dim)
    for i in range(count - 1):
        token = tokens + i * token_bytes
        u = _answer_64(sums, token, head_dim, column)
        sums = _write_and_read_64(source, source_bytes, panel, token, token + token_bytes, head_dim, u)
        source, source_bytes = panel, 4 * PANEL
    token = tokens + (count - 1) * token_bytes
    u = _answer_64(sums, token, head_dim, column)
    _write_64(source, source_bytes, target, target_bytes, token, head_dim, u, past_cache, ahead)


@inline
def tokens_16(
    source: int,
    source_bytes: int,
    panel: int,
    target: int,
    target_bytes: int,
    tokens: int,
    count: int,
    head_dim: int,
    column: int,
) -> None:
    """The same for up to 16 of the columns that 64 leave over: a column's operations are those of `tokens_64`."""
    step = 4 * padded(head_dim)
    n = head_dim - column
    for i in range(count):
        token = tokens + i * 4 * token_floats(head_dim)
        w = z = splat_f32(0.0)
        for k in range(head_dim):
            s0 = load_lanes(source + k * source_bytes, n)
            w = fma(splat_f32(scalar_f32_at(token + DECAYED_KEY * step + 4 * k)), s0, w)
            z = fma(splat_f32(scalar_f32_at(token + DECAYED_QUERY * step + 4 * k)), s0, z)
        numbers, v = token + NUMBERS * step, token + VALUE * step + 4 * column
        u = splat_f32(scalar_f32_at(numbers)) * (load_lanes(v, n) - w)
        store_lanes(v, fma(splat_f32(scalar_f32_at(numbers + 4)), u, z), n)
        place, place_bytes = panel, LINE_BYTES
        if i + 1 == count:
            place, place_bytes = target, target_bytes
        for k in range(head_dim):
            s0 = load_lanes(source + k * source_bytes, n)
            a = splat_f32(scalar_f32_at(token + DECAY * step + 4 * k))
            key = splat_f32(scalar_f32_at(token + KEY * step + 4 * k))
            store_lanes(place + k * place_bytes, fma(key, u, a * s0), n)
        source, source_bytes = panel, LINE_BYTES
