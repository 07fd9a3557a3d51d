"""Kimi Delta Attention in PyTorch: the step-by-step definition and the chunked form used for training.

Per head, with key width K and value width V, state S [K, V], log-decay g [K] <= 0 and write strength beta:

    S <- diag(exp g) S;   u = beta (v - S^T k);   S <- S + k u^T;   o = S^T q

The chunked form solves the u of 16 tokens at once (a unit lower triangular system) and carries the state from chunk to
chunk as an affine map S' = M S + N, so the sequential part is one small matrix product a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CHUNK = 16
"""Log-decays reach -5 a token: over 16 tokens exp(+-40) around the middle still fits float32; over 32 it would not."""


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition. q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] -> o [B, T, H, V], state [B, H, K, V]."""
    batch, time, heads, width = k.shape
    s = torch.zeros(batch, heads, width, v.shape[-1], dtype=v.dtype) if state is None else state
    out = []
    for t in range(time):
        s = s * g[:, t].exp().unsqueeze(-1)
        read = torch.einsum("bhkv,bhk->bhv", s, k[:, t])
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(out, 1), s


class _AffineScan(torch.autograd.Function):
    """S' = M S + N from S0: M [C, R, K, K], N [C, R, K, V], S0 [R, K, V] -> every state [C + 1, R, K, V]."""

    @staticmethod
    def forward(ctx: Any, m: Tensor, n: Tensor, start: Tensor) -> Tensor:
        states = torch.empty(n.shape[0] + 1, *n.shape[1:], dtype=n.dtype)
        states[0] = start
        for c in range(n.shape[0]):
            torch.baddbmm(n[c], m[c], states[c], out=states[c + 1])
        ctx.save_for_backward(m, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        m, states = ctx.saved_tensors
        back = torch.empty_like(grad)
        back[-1] = grad[-1]
        for c in range(m.shape[0] - 1, -1, -1):
            torch.baddbmm(grad[c], m[c].transpose(1, 2), back[c + 1], out=back[c])
        return torch.matmul(back[1:], states[:-1].transpose(2, 3)), back[1:], back[0]


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Same arguments and results as `step_by_step`, in float32; g must lie in [-5, 0]."""
    batch, time, heads, width = k.shape
    values = v.shape[-1]
    chunks = -(-time // CHUNK)
    rows = batch * heads

    def split(x: Tensor) -> Tensor:  # [B, T, H, D] -> [chunks, B*H, CHUNK, D]
        if time % CHUNK:
            x = F.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - time))
        x = x.reshape(batch, chunks, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)
        return x.reshape(chunks, rows, CHUNK, x.shape[-1])

    # Padding has k = 0, beta = 0 and g = 0: it neither decays nor writes the state.
    q, k, v, g, b = split(q), split(k), split(v), split(g), split(beta.unsqueeze(-1))
    total = g.cumsum(2)
    middle = total[:, :, CHUNK // 2 : CHUNK // 2 + 1]
    rise, fall = (total - middle).exp(), (middle - total).exp()
    k_in, k_out, q_in = k * rise, k * fall, q * rise
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril(-1)
    k_out_t = k_out.transpose(2, 3)
    a = torch.matmul(k_in * b, k_out_t).masked_fill(~lower, 0.0)
    decay_in = middle.exp()
    system = a + torch.eye(CHUNK, dtype=a.dtype)
    right = torch.cat((v * b, k_in * decay_in * b), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u0, w = solved.split((values, width), -1)
    last = total[:, :, -1:]
    k_end = (k * (last - total).exp()).transpose(2, 3)
    m = torch.diag_embed(last.squeeze(2).exp()) - torch.matmul(k_end, w)
    n = torch.matmul(k_end, u0)
    start = torch.zeros(rows, width, values, dtype=v.dtype) if state is None else state.reshape(rows, width, values)
    states: Tensor = _AffineScan.apply(m, n, start)
    before = states[:-1]
    u = u0 - torch.matmul(w, before)
    inside = torch.matmul(q_in, k_out_t).masked_fill(~(lower | torch.eye(CHUNK, dtype=torch.bool)), 0.0)
    o = torch.matmul(q_in * decay_in, before) + torch.matmul(inside, u)
    o = (
        o.reshape(chunks, batch, heads, CHUNK, values)
        .permute(1, 0, 3, 2, 4)
        .reshape(batch, chunks * CHUNK, heads, values)
    )
    return o[:, :time], states[-1].reshape(batch, heads, width, values)
