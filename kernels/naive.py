"""The definitions: every operation of a Kimi-Linear or Kimi K3 forward pass, in plain NumPy.

Read this file to learn the mathematics; each fast kernel of this folder is tested against it in float64. Nothing here
is fast, nothing here is approximate, and the order of sums is NumPy's. Arrays may be of any floating type and results
have the type of the inputs: pass float64 for a reference, float32 to see what rounding does.

Letters in shapes: T tokens of one session in order, H heads, D the width of a KDA head, C = H*D channels, N latents
in the cache (this call's own included), L = kv_lora_rank, P = the "rope" dims (which both models leave unrotated), E
experts.

Formulas: the published `modeling_kimi` code of both releases, held against transformers, mlx-lm and llama.cpp by
`tests/kernels/test_naive_oracle.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

L2_EPS = 1e-6
"""Added to the sum of squares of a KDA query or key, as flash-linear-attention does."""

SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus(x) is x, in every implementation of these models."""

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Value of each 4-bit code of MXFP4: three bits of magnitude, then the sign."""

MX_BLOCK = 32
"""Consecutive columns that share one E8M0 scale."""

Q8_LARGEST = np.float32(127)
"""The largest 8-bit code, of latents, activations and weights; the least is its negative."""

Q8_LEAST_PEAK = np.float32(1e-30)
"""Numbers that share a scale and none of which is larger count as 0: `Q8_LARGEST` over their largest could overflow."""


# ---------------------------------------------------------------- functions of one number


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow at either end."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def silu(x: Array) -> Array:
    return np.asarray(x * sigmoid(x))


def softplus(x: Array) -> Array:
    """log(1 + e^x); x itself above `SOFTPLUS_THRESHOLD`."""
    return np.where(x > SOFTPLUS_THRESHOLD, x, np.log1p(np.exp(np.minimum(x, SOFTPLUS_THRESHOLD))))


# ---------------------------------------------------------------- number formats


def bf16_widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 of the same value: bfloat16 is float32's upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bf16_round(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; a NaN stays one (its quiet bit is set), overflow is infinity."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def mxfp4_decode(packed: NDArray[np.uint8], scales: NDArray[np.uint8], dtype: Any = np.float64) -> Array:
    """Weights `[rows, 2*bytes]` of packed codes `[rows, bytes]` and E8M0 scales `[rows, columns/32]`.

    The low nibble is the even column. A scale byte e means 2^(e-127), 0 included.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = E2M1.astype(dtype)[codes]
    return np.asarray(values * np.repeat(np.exp2(scales.astype(dtype) - 127), MX_BLOCK, axis=-1))


# ---------------------------------------------------------------- norms and activations


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, times `weight` when there is one."""
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return np.asarray(normed if weight is None else normed * weight)


def l2_norm(x: Array) -> Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + L2_EPS))


def swiglu(gate: Array, up: Array) -> Array:
    """Kimi-Linear's activation."""
    return np.asarray(silu(gate) * up)


def situ(gate: Array, up: Array, beta: float, linear_beta: float | None) -> Array:
    """K3's activation: SwiGLU with both factors bounded by a tanh (the second only when `linear_beta` is given)."""
    bounded_up = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    return np.asarray(beta * np.tanh(gate / beta) * sigmoid(gate) * bounded_up)


def attention_residual(
    blocks: Sequence[Array], prefix_sum: Array | None, norm_weight: Array, proj_weight: Array, eps: float
) -> Array:
    """AttnRes: each token's softmax mix of the hidden states that earlier blocks of layers ended with, `[T, hidden]`.

    `blocks` are those states, `prefix_sum` the running sum of the block under way (None right after a border). Scores
    come from the normed states, the mix is of the raw ones. `norm_weight [hidden]` and `proj_weight [hidden]` only
    ever act as a product.
    """
    values = np.stack([*blocks, prefix_sum] if prefix_sum is not None else list(blocks))
    scores = rms_norm(values, None, eps) @ (norm_weight * proj_weight)
    return np.asarray(np.einsum("nt,nth->th", softmax(scores, axis=0), values))


def softmax(x: Array, axis: int = -1) -> Array:
    weights = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return np.asarray(weights / np.sum(weights, axis=axis, keepdims=True))


# ---------------------------------------------------------------- Kimi Delta Attention


class KdaState(NamedTuple):
    """What a KDA layer carries from one token to the next, whatever the context's length."""

    matrix: Array
    """`S [H, D_key, D_value]`."""
    tails: Array
    """`[3 (q, k, v), 3, C]`: the last three inputs of the three short convolutions, oldest first."""


class KdaWeights(NamedTuple):
    """Parameters of a KDA layer that are no projections."""

    conv: Array
    """`[3 (q, k, v), C, 4]`; the last tap meets the newest token."""
    decay_rate: Array
    """`[H]`: exp(A_log)."""
    dt_bias: Array
    """`[C]`."""
    o_norm: Array
    """`[D]`, shared by all heads."""
    eps: float
    """Of the output norm."""
    lower_bound: float
    """The bounded gate's bound (K3: -5); 0 selects the softplus gate (Kimi-Linear)."""


def empty_kda_state(heads: int, head_dim: int, dtype: Any = np.float64) -> KdaState:
    return KdaState(np.zeros((heads, head_dim, head_dim), dtype), np.zeros((3, 3, heads * head_dim), dtype))


def short_conv(x: Array, weight: Array, tail: Array) -> tuple[Array, Array]:
    """Causal depthwise convolution of four taps, then SiLU.

    `x [T, C]`, `weight [C, 4]`, `tail [3, C]` -> `[T, C]` and the new tail.
    """
    window = np.concatenate([tail, x])
    summed = sum(weight[:, tap] * window[tap : tap + len(x)] for tap in range(4))
    return silu(np.asarray(summed)), window[len(x) :]


def log_decay(z: Array, decay_rate: Array, lower_bound: float) -> Array:
    """Log decay of each key channel, `z [..., H, D]` with its bias already added.

    K3 bounds it smoothly: lower_bound * sigmoid(rate * z) lies in (lower_bound, 0). Kimi-Linear's -rate * softplus(z)
    is unbounded.
    """
    rate = decay_rate[:, None]
    if lower_bound:
        return np.asarray(lower_bound * sigmoid(rate * z))
    return np.asarray(-rate * softplus(z))


def kda_step(matrix: Array, q: Array, k: Array, v: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """One token of all heads.

    `matrix [H, D_k, D_v]`, `q, k, g [H, D_k]`, `v [H, D_v]`, `beta [H]` -> new matrix, `o [H, D_v]`.

    Forget (each key channel at its own rate), find what the state still answers to k, correct that answer towards v
    by the fraction beta, then read with q.
    """
    matrix = np.exp(g)[:, :, None] * matrix
    correction = beta[:, None] * (v - np.einsum("hkv,hk->hv", matrix, k))
    matrix = matrix + k[:, :, None] * correction[:, None, :]
    return matrix, np.einsum("hkv,hk->hv", matrix, q)


def kda(
    q: Array, k: Array, v: Array, z: Array, b: Array, gate: Array, weights: KdaWeights, state: KdaState
) -> tuple[Array, KdaState]:
    """A KDA layer between its input projections and its output projection.

    `q, k, v [T, C]` the raw projections, `z [T, C]` the decay projection without its bias, `b [T, H]` the raw
    correction strength, `gate [T, C]` the raw output gate -> `[T, C]` and the state after the last token.
    """
    tokens, heads = b.shape
    split = (tokens, heads, -1)
    (q, q_tail), (k, k_tail), (v, v_tail) = (
        short_conv(x, weights.conv[i], state.tails[i]) for i, x in enumerate((q, k, v))
    )
    head_dim = q.shape[1] // heads
    q = l2_norm(q.reshape(split)) / np.sqrt(np.asarray(head_dim, q.dtype))
    k, v = l2_norm(k.reshape(split)), v.reshape(split)
    g = log_decay((z + weights.dt_bias).reshape(split), weights.decay_rate, weights.lower_bound)
    beta = sigmoid(b)
    out = np.empty_like(v)
    matrix = state.matrix
    for t in range(tokens):
        matrix, out[t] = kda_step(matrix, q[t], k[t], v[t], g[t], beta[t])
    gated = rms_norm(out, weights.o_norm, weights.eps) * sigmoid(gate.reshape(split))
    return gated.reshape(tokens, -1), KdaState(matrix, np.stack([q_tail, k_tail, v_tail]))


# ---------------------------------------------------------------- multi-head latent attention


def mla_latents(projected: Array, norm_weight: Array, eps: float) -> Array:
    """What MLA caches of each token: `kv_a` projections `[T, L+P]`, their first L normed, the other P as they are."""
    rank = len(norm_weight)
    return np.concatenate([rms_norm(projected[:, :rank], norm_weight, eps), projected[:, rank:]], axis=1)


def q8_latents(latents: NDArray[np.float32], rank: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Latents `[T, L+P]` as 8-bit codes `[T, L+P]` and scales `[T, 2]`: of a token's first L = `rank` and of the rest.

    A number stands for code * scale, off by at most half a scale, which is a 127th of the part's largest size (0 where
    that is `Q8_LEAST_PEAK` at most). In float32 throughout; ties go to even. A part with an infinity or NaN has codes 0
    and a NaN scale.
    """
    codes, scales = np.zeros(latents.shape, np.int8), np.zeros((len(latents), 2), np.float32)
    for number, part in enumerate((slice(None, rank), slice(rank, None))):
        values = latents[:, part]
        peak = np.abs(values).max(axis=1, initial=0)
        sound = np.isfinite(values).all(axis=1)
        used = sound & (peak > Q8_LEAST_PEAK)
        codes[used, part] = np.rint(values[used] * (Q8_LARGEST / peak[used])[:, None])
        scales[used, number] = peak[used] / Q8_LARGEST
        scales[~sound, number] = np.nan
    return codes, scales


def q8_widen(codes: NDArray[np.int8], scales: NDArray[np.float32], rank: int) -> NDArray[np.float32]:
    """What `q8_latents` stands for, `[T, L+P]`: each code times its part's scale, rounded once."""
    return codes.astype(np.float32) * np.repeat(scales, (rank, codes.shape[1] - rank), axis=1)


def causal_mask(rows: int, context: int) -> NDArray[np.bool_]:
    """`[rows, context]`: may row t, the (context - rows + t)-th token of the session, see latent n? Its own too."""
    return np.arange(context)[None, :] <= np.arange(context - rows, context)[:, None]


def mla_expanded(q: Array, latents: Array, kv_b: Array, value_dim: int) -> Array:
    """The textbook form, every latent expanded to a key and a value of each head.

    `q [T, H, nope+P]` -> `[T, H, value_dim]`.

    `latents [N, L+P]` hold all tokens up to and including this call's T. `kv_b [H*(nope+value_dim), L]`: a head's key
    rows, then its value rows.
    """
    rows, heads, query_dim = q.shape
    rank = kv_b.shape[1]
    expanded = (latents[:, :rank] @ kv_b.T).reshape(len(latents), heads, -1)
    nope = expanded.shape[2] - value_dim
    scores = np.einsum("thd,nhd->thn", q[:, :, :nope], expanded[:, :, :nope])
    scores += np.einsum("thp,np->thn", q[:, :, nope:], latents[:, rank:])
    weights = masked_softmax(scores / np.sqrt(np.asarray(query_dim, q.dtype)), rows, len(latents))
    return np.asarray(np.einsum("thn,nhv->thv", weights, expanded[:, :, nope:]))


def absorb_queries(q: Array, kv_b: Array, value_dim: int) -> Array:
    """`q [T, H, nope+P]` -> `[T, H, L+P]`: multiply by the key half of `kv_b` here once, instead of at every latent."""
    heads = q.shape[1]
    per_head = kv_b.reshape(heads, -1, kv_b.shape[1])
    nope = per_head.shape[1] - value_dim
    return np.concatenate([np.einsum("thd,hdl->thl", q[:, :, :nope], per_head[:, :nope]), q[:, :, nope:]], axis=2)


def mla_absorbed(q: Array, latents: Array, scale: float, rank: int) -> Array:
    """Attention in latent space: absorbed `q [T, H, L+P]`, `latents [N, L+P]` -> mixed latents `[T, H, L]`.

    `scale` is (nope+P)^-0.5. Equal to the expanded form after `expand_values`, up to rounding.
    """
    scores = np.einsum("thd,nd->thn", q, latents) * scale
    weights = masked_softmax(scores, len(q), len(latents))
    return np.asarray(np.einsum("thn,nl->thl", weights, latents[:, :rank]))


def expand_values(mixed: Array, kv_b: Array, value_dim: int) -> Array:
    """Mixed latents `[T, H, L]` -> `[T, H, value_dim]` by the value half of `kv_b`."""
    per_head = kv_b.reshape(mixed.shape[1], -1, kv_b.shape[1])
    return np.asarray(np.einsum("thl,hvl->thv", mixed, per_head[:, -value_dim:]))


def masked_softmax(scores: Array, rows: int, context: int) -> Array:
    """Softmax over the last axis of `scores [T, H, N]`, each row over the latents it may see."""
    visible = causal_mask(rows, context)[:, None, :]
    return softmax(np.where(visible, scores, np.asarray(-np.inf, scores.dtype)))


# ---------------------------------------------------------------- mixture of experts


def route(
    logits: Array, bias: Array, top_k: int, n_group: int, topk_group: int, renormalize: bool, scale: float
) -> tuple[NDArray[np.int64], Array]:
    """The experts of each token, ascending, and their weights.

    `logits [T, E]`, `bias [E]` -> ids `[T, top_k]`, weights `[T, top_k]`.

    Chosen by sigmoid + bias (ties: the lower id), weighted by the sigmoid alone. With more groups than `topk_group`,
    only the groups with the largest sum of their two best scores take part.
    """
    strength = sigmoid(logits)
    choice = strength + bias
    if n_group > topk_group:
        grouped = choice.reshape(len(choice), n_group, -1)
        group_score = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-group_score, axis=1, kind="stable")[:, :topk_group]
        out_of_play = np.ones((len(choice), n_group), np.bool_)
        np.put_along_axis(out_of_play, kept, False, axis=1)
        choice = np.where(out_of_play[:, :, None], np.asarray(-np.inf, choice.dtype), grouped).reshape(choice.shape)
    ids = np.sort(np.argsort(-choice, axis=1, kind="stable")[:, :top_k], axis=1)
    weights = np.take_along_axis(strength, ids, axis=1)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return ids, weights * scale


def mixture(x: Array, ids: NDArray[np.int64], weights: Array, expert: Callable[[int, Array], Array]) -> Array:
    """Sum of each token's experts' outputs in ascending expert id; `expert(id, rows [n, in]) -> [n, out]`."""
    out: Array | None = None
    for e in np.unique(ids):
        token, slot = np.nonzero(ids == e)
        y = expert(int(e), x[token]) * weights[token, slot][:, None]
        if out is None:
            out = np.zeros((len(x), y.shape[1]), y.dtype)
        out[token] += y
    if out is None:
        raise ValueError("mixture() needs at least one token with at least one expert")
    return out
