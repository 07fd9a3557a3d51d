"""One token through KDA heads whose states come from memory: each panel is written while the next one is read.

A step reads every state once and writes it once, past the cache, so it can be as fast as a copy. For that a core must
always be asking memory for more and find what it writes in its first-level cache. Loads wait for stores on their way
to memory whose addresses look the same in their low twelve bits, as those of two blocks do that begin at pages: so
rows are written in an order that keeps half a page between the two, and nothing else is done meanwhile. Tokens are
prepared before, some heads at once. The operations on a column, and so its bits, are those of `kernels/kda_state.py`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.kda_inputs import DECAY, DECAYED_KEY, DECAYED_QUERY, KEY, padded, token_floats
from serai.kernels.kda_panels import PANEL
from serai.kernels.kda_state import answer, panel_bytes, state_floats
from serai.kernels.lanes import LINE_BYTES, stream_fence, stream_store_at
from serai.kernels.memory import addr, f32_at, prefetch, scalar_f32_at
from serai.kernels.simd import fma, splat_f32
from serai.kernels.threads import parallel_for

BUNDLE = 16
"""Heads whose tokens are prepared before their states pass, at most."""

_AHEAD_BYTES = 2560
"""Between asking for a line and using it. No multiple of 4096, for the same reason."""
_PAGE_BYTES = 4096


@inline
def _read_panel(source: int, token: int, head_dim: int) -> Any:
    """w = S'(a k) and z = S'(a q) over the panel at `source`, for the prepared `token`."""
    step = 4 * padded(head_dim)
    keys, queries = token + DECAYED_KEY * step, token + DECAYED_QUERY * step
    w = z = splat_f32(0.0)
    for k in range(head_dim):
        here = source + LINE_BYTES * k
        prefetch(here + _AHEAD_BYTES)
        s = f32_at(here)
        w = fma(splat_f32(scalar_f32_at(keys + 4 * k)), s, w)
        z = fma(splat_f32(scalar_f32_at(queries + 4 * k)), s, z)
    return w, z


@inline
def _write_panel(source: int, target: int, token: int, head_dim: int, u: Any) -> None:
    """S <- a S + k u' over a panel, from `source` to `target`."""
    step = 4 * padded(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    for k in range(head_dim):
        a, key = splat_f32(scalar_f32_at(decays + 4 * k)), splat_f32(scalar_f32_at(keys + 4 * k))
        stream_store_at(target + LINE_BYTES * k, fma(key, u, a * f32_at(source + LINE_BYTES * k)))


@inline
def _write_and_read_panel(
    source: int, target: int, token: int, head_dim: int, u: Any, next_source: int, next_token: int
) -> Any:
    """`_write_panel` beside `_read_panel` of the next panel, perhaps of another head."""
    step = 4 * padded(head_dim)
    decays, keys = token + DECAY * step, token + KEY * step
    next_keys, next_queries = next_token + DECAYED_KEY * step, next_token + DECAYED_QUERY * step
    row = (next_source + _PAGE_BYTES // 2 - target) % _PAGE_BYTES // LINE_BYTES % head_dim
    w = z = splat_f32(0.0)
    for k in range(head_dim):
        a, key = splat_f32(scalar_f32_at(decays + 4 * row)), splat_f32(scalar_f32_at(keys + 4 * row))
        stream_store_at(target + LINE_BYTES * row, fma(key, u, a * f32_at(source + LINE_BYTES * row)))
        row += 1
        if row == head_dim:
            row = 0
        here = next_source + LINE_BYTES * k
        prefetch(here + _AHEAD_BYTES)
        s = f32_at(here)
        w = fma(splat_f32(scalar_f32_at(next_keys + 4 * k)), s, w)
        z = fma(splat_f32(scalar_f32_at(next_queries + 4 * k)), s, z)
    return w, z


@inline
def step_heads(old: int, new: int, tokens: int, heads: int, head_dim: int) -> None:
    """One prepared token each through neighbouring heads of a session: o to the place of v, the state from `old` to
    `new`, which begins on a line."""
    panel, panels = panel_bytes(head_dim), padded(head_dim) // PANEL
    source, target, writer = old, new, tokens
    w, z = _read_panel(source, tokens, head_dim)
    u = answer(w, z, tokens, head_dim, 0)
    for number in range(1, heads * panels):
        token = tokens + number // panels * 4 * token_floats(head_dim)
        w, z = _write_and_read_panel(source, target, writer, head_dim, u, source + panel, token)
        u = answer(w, z, token, head_dim, number % panels * PANEL)
        source, target, writer = source + panel, target + panel, token
    _write_panel(source, target, writer, head_dim, u)


@inline
def _heads_task(task: int, old: int, new: int, tokens: int, heads: int, head_dim: int) -> None:
    first = task * BUNDLE
    at = 4 * first * state_floats(head_dim)
    here = tokens + 4 * first * token_floats(head_dim)
    step_heads(old + at, new + at, here, min(BUNDLE, heads - first), head_dim)
    stream_fence()


@kernel("void(f32[:, ::1], i64, i64, i64)", before=threads.start)
def kda_step(tokens: NDArray[np.float32], head_dim: int, old: int, new: int) -> None:
    """One token's decay, delta rule, update and read-out alone, of one session's layer: `serai.kernels.naive.kda_step`.

    Sessions have theirs from `serai.kernels.kda.kda`, which also prepares the token and norms what it reads out; both
    call `step_heads`. This one is for whoever asks what the state alone costs, as `serai bench kernels` does.

    `tokens [heads, token_floats(head_dim)]` are prepared (`kernels/kda_inputs.py`) and start on a line; o is left in
    the place of v. `old` and `new` are the byte addresses of the layer's state before and after, 64-byte aligned.
    """
    heads = tokens.shape[0]
    arguments = (old, new, addr(tokens, 0), heads, head_dim)
    parallel_for((heads + BUNDLE - 1) // BUNDLE, True, _heads_task, arguments)
