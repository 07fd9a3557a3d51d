"""A KDA head's state meeting prepared tokens, four panels of its columns at a time.

Panels are those of `kernels/kda_panels.py`; a vector holds a row of one, and excess columns are computed like others
and stay zero. Addresses are those of a panel's first row; `token` is a prepared token (`kernels/kda_inputs.py`).
Consecutive tokens share a pass: writing the state for one is reading it for the next.
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
from serai.kernels.kda_panels import PANEL
from serai.kernels.lanes import LINE_BYTES, stream_store_at
from serai.kernels.memory import f32_at, scalar_f32_at, store_at
from serai.kernels.simd import fma, splat_f32

TOGETHER = 4
"""Panels that pass through the tokens side by side: four vectors, so eight sums in flight."""


@inline
def panel_bytes(head_dim: int) -> int:
    return LINE_BYTES * head_dim


@inline
def state_floats(head_dim: int) -> int:
    """Floats of a head's state."""
    return padded(head_dim) * head_dim


@inline
def answer(w: Any, z: Any, token: int, head_dim: int, column: int) -> Any:
    """From the sums w and z of sixteen columns: o, in the place of v, and the correction u."""
    step = 4 * padded(head_dim)
    v = token + VALUE * step + 4 * column
    beta = splat_f32(scalar_f32_at(token + NUMBERS * step))
    qk = splat_f32(scalar_f32_at(token + NUMBERS * step + 4))
    u = beta * (f32_at(v) - w)
    store_at(v, fma(qk, u, z))
    return u


@inline
def _read_four(source: int, token: int, head_dim: int) -> Any:
    """The sums w and z of one token over four panels: eight vectors."""
    step, panel = 4 * padded(head_dim), panel_bytes(head_dim)
    keys, queries = token + DECAYED_KEY * step, token + DECAYED_QUERY * step
    w0 = w1 = w2 = w3 = z0 = z1 = z2 = z3 = splat_f32(0.0)
    for k in range(head_dim):
        s = source + LINE_BYTES * k
        ak, aq = splat_f32(scalar_f32_at(keys + 4 * k)), splat_f32(scalar_f32_at(queries + 4 * k))
        s0, s1, s2, s3 = f32_at(s), f32_at(s + panel), f32_at(s + 2 * panel), f32_at(s + 3 * panel)
        w0, w1, w2, w3 = fma(ak, s0, w0), fma(ak, s1, w1), fma(ak, s2, w2), fma(ak, s3, w3)
        z0, z1, z2, z3 = fma(aq, s0, z0), fma(aq, s1, z1), fma(aq, s2, z2), fma(aq, s3, z3)
    return w0, w1, w2, w3, z0, z1, z2, z3


@inline
def _answer_four(sums: Any, token: int, head_dim: int, column: int) -> Any:
    w0, w1, w2, w3, z0, z1, z2, z3 = sums
    return (
        answer(w0, z0, token, head_dim, column),
        answer(w1, z1, token, head_dim, column + PANEL),
        answer(w2, z2, token, head_dim, column + 2 * PANEL),
        answer(w3, z3, token, head_dim, column + 3 * PANEL),
    )


@inline
def _write_four(source: int, target: int, token: int, head_dim: int, u: Any, past_cache: bool) -> None:
    """S <- a S + k u' over four panels, from `source` to `target`."""
    u0, u1, u2, u3 = u
    step, panel = 4 * padded(head_dim), panel_bytes(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    if past_cache:
        for k in range(head_dim):
            s, d = source + LINE_BYTES * k, target + LINE_BYTES * k
            a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
            stream_store_at(d, fma(key, u0, a * f32_at(s)))
            stream_store_at(d + panel, fma(key, u1, a * f32_at(s + panel)))
            stream_store_at(d + 2 * panel, fma(key, u2, a * f32_at(s + 2 * panel)))
            stream_store_at(d + 3 * panel, fma(key, u3, a * f32_at(s + 3 * panel)))
    else:
        for k in range(head_dim):
            s, d = source + LINE_BYTES * k, target + LINE_BYTES * k
            a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
            store_at(d, fma(key, u0, a * f32_at(s)))
            store_at(d + panel, fma(key, u1, a * f32_at(s + panel)))
            store_at(d + 2 * panel, fma(key, u2, a * f32_at(s + 2 * panel)))
            store_at(d + 3 * panel, fma(key, u3, a * f32_at(s + 3 * panel)))


@inline
def _write_and_read_four(source: int, target: int, token: int, following: int, head_dim: int, u: Any) -> Any:
    """`_write_four` of one token and `_read_four` of the following one, in one pass."""
    u0, u1, u2, u3 = u
    step, panel = 4 * padded(head_dim), panel_bytes(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    next_keys, next_queries = following + DECAYED_KEY * step, following + DECAYED_QUERY * step
    w0 = w1 = w2 = w3 = z0 = z1 = z2 = z3 = splat_f32(0.0)
    for k in range(head_dim):
        s, d = source + LINE_BYTES * k, target + LINE_BYTES * k
        a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
        s0, s1 = fma(key, u0, a * f32_at(s)), fma(key, u1, a * f32_at(s + panel))
        s2, s3 = fma(key, u2, a * f32_at(s + 2 * panel)), fma(key, u3, a * f32_at(s + 3 * panel))
        store_at(d, s0)
        store_at(d + panel, s1)
        store_at(d + 2 * panel, s2)
        store_at(d + 3 * panel, s3)
        ak, aq = splat_f32(scalar_f32_at(next_keys + 4 * k)), splat_f32(scalar_f32_at(next_queries + 4 * k))
        w0, w1, w2, w3 = fma(ak, s0, w0), fma(ak, s1, w1), fma(ak, s2, w2), fma(ak, s3, w3)
        z0, z1, z2, z3 = fma(aq, s0, z0), fma(aq, s1, z1), fma(aq, s2, z2), fma(aq, s3, z3)
    return w0, w1, w2, w3, z0, z1, z2, z3


@inline
def through_four(
    source: int, waiting: int, target: int, tokens: int, count: int, head_dim: int, column: int, past_cache: bool
) -> None:
    """`count` prepared tokens through the four panels from `column` on: the state from `source` to `target`.

    Between tokens it lies at `waiting`. `past_cache`: the target is written past it.
    """
    token_bytes = 4 * token_floats(head_dim)
    sums = _read_four(source, tokens, head_dim)
    for i in range(count - 1):
        token = tokens + i * token_bytes
        u = _answer_four(sums, token, head_dim, column)
        sums = _write_and_read_four(source, waiting, token, token + token_bytes, head_dim, u)
        source = waiting
    token = tokens + (count - 1) * token_bytes
    u = _answer_four(sums, token, head_dim, column)
    _write_four(source, target, token, head_dim, u, past_cache)


@inline
def through_one(source: int, waiting: int, target: int, tokens: int, count: int, head_dim: int, column: int) -> None:
    """The same through one of the panels that are left over: a column's operations are those of `through_four`."""
    step = 4 * padded(head_dim)
    for i in range(count):
        token = tokens + i * 4 * token_floats(head_dim)
        w = z = splat_f32(0.0)
        for k in range(head_dim):
            s = f32_at(source + LINE_BYTES * k)
            w = fma(splat_f32(scalar_f32_at(token + DECAYED_KEY * step + 4 * k)), s, w)
            z = fma(splat_f32(scalar_f32_at(token + DECAYED_QUERY * step + 4 * k)), s, z)
        u = answer(w, z, token, head_dim, column)
        place = target if i + 1 == count else waiting
        for k in range(head_dim):
            a = splat_f32(scalar_f32_at(token + DECAY * step + 4 * k))
            key = splat_f32(scalar_f32_at(token + KEY * step + 4 * k))
            store_at(place + LINE_BYTES * k, fma(key, u, a * f32_at(source + LINE_BYTES * k)))
        source = waiting
