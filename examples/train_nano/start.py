"""What the nano model starts training with: parts that already copy, in place of the arrangement found by luck.

The first layer hands on the last three tokens (`window`). Half of the attention heads look for the place where the same
three tokens stood before and propose what came next (`copying_mla`), at any distance; half of the heads of the other
KDA layers do so within their own state (`copying_kda`). Embeddings start in the leading dimensions of the residual
stream and the window in the others, so that neither hides the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

if TYPE_CHECKING:
    from .model import KDA, MLA, NanoConfig, NanoModel

# Gains, chosen by the share of value tokens that was right before any training.
KDA_PROPOSES = 0.2
"""Of what a copying KDA head reads: louder, it drowns what the latent attention proposes."""
MLA_KEY, MLA_QUERY = 4.0, 2.0
"""Sharp enough that three matching tokens stand out among thousands of others."""
CURRENT_TOKEN = 1.25
"""Brings the features of the current token, read from its embedding, to the size of those the window hands on."""
LOGITS = 0.05
"""Of `lm_head`: small, so that the first losses are near those of guessing."""


def window_rows(c: NanoConfig, lag: int) -> slice:
    """The dimensions of the residual stream that start with the features of the token `lag` places back."""
    start = c.token_dims + (lag - 1) * c.window_dims
    return slice(start, start + c.window_dims)


def window_features(c: NanoConfig) -> Tensor:
    """The projection [window_dims, token_dims] every lag of the window starts with: the same, so that lags compare."""
    return torch.randn(c.window_dims, c.token_dims, generator=torch.Generator().manual_seed(0)) * c.token_dims**-0.5


@torch.no_grad()
def window(kda: KDA) -> None:
    """Head j > 0 starts out handing on the token j places back, in `window_dims` features of the residual stream.

    Its state forgets at once (largest decay) and its key equals its query, so it reads what it has just written: a
    value whose filter has a single tap, j tokens back. The latent attention starts from these features.
    """
    c, width = kda.c, kda.c.kda_head_dim
    for head in range(1, c.num_heads):
        rows = slice(head * width, (head + 1) * width)
        kda.k_proj.weight[rows] = kda.q_proj.weight[rows]
        kda.k_conv1d.weight[rows] = kda.q_conv1d.weight[rows]
        kda.dt_bias[rows] = 4.0
        kda.f_b_proj.weight[rows] = 0.0
        kda.b_proj.weight[head] = 0.0
        kda.g_proj.weight[rows] = 0.0
        kda.v_conv1d.weight[rows] = 0.0
        kda.v_conv1d.weight[rows, 0, -1 - head] = 1.0
        kda.v_proj.weight[rows] = 0.0
        # Small values keep to the straight part of SiLU; o_norm makes them large again.
        kda.v_proj.weight[rows][: c.window_dims, : c.token_dims] = 0.1 * window_features(c)
        kda.o_proj.weight[:, rows] = 0.0
        kda.o_proj.weight[window_rows(c, head), rows] = torch.eye(c.window_dims, width)


@torch.no_grad()
def copying_kda(kda: KDA, rows: int) -> None:
    """Half of the heads start out recalling, and proposing, what followed the same three tokens before.

    Their keys are made like their queries but one token late (same projection, filter shifted by one tap), so the
    value written at a token is found again by the three tokens before it; what is read goes out as the embedding in
    reverse order, which is how `lm_head` starts (reversed, so that a token does not propose itself). Without this
    start, finding the arrangement is most of the training.
    """
    kda.k_proj.weight[:rows] = kda.q_proj.weight[:rows]
    lags = kda.c.conv_kernel - 1
    taps = 0.2 * torch.rand(rows, lags) + F.one_hot(torch.arange(rows) % lags, lags)
    kda.q_conv1d.weight[:rows, 0] = F.pad(taps, (1, 0))
    kda.k_conv1d.weight[:rows, 0] = F.pad(taps, (0, 1))
    token = slice(kda.c.token_dims)
    kda.o_proj.weight[:, :rows] = 0.0
    kda.o_proj.weight[token, :rows] = KDA_PROPOSES * kda.v_proj.weight[:rows, token].t().flip(0)


@torch.no_grad()
def copying_mla(mla: MLA, heads: int) -> None:
    """Half of the heads start out proposing what followed the same three tokens before, at any distance.

    The shared part of the key is a sum of the features of the three tokens before, each in directions of its own;
    the query has the current token and the two before it in those directions. The latent holds the token itself.
    """
    c, shared = mla.c, mla.c.qk_rope_head_dim
    lags = c.conv_kernel - 1
    features = window_features(c)
    mix = [torch.linalg.qr(torch.randn(shared, c.window_dims))[0] for _ in range(lags)]
    query = torch.zeros(shared, c.hidden_size)
    key = torch.zeros(shared, c.hidden_size)
    for lag in range(lags):
        if lag:
            query[:, window_rows(c, lag)] = mix[lag]
        else:
            query[:, : c.token_dims] = CURRENT_TOKEN * mix[lag] @ features
        key[:, window_rows(c, lag + 1)] = mix[lag]
    mla.q_a_proj.weight[:shared] = query
    latent, token = c.kv_lora_rank, slice(c.token_dims)
    mla.kv_a_proj_with_mqa.weight[latent:] = MLA_KEY * key
    mla.kv_a_proj_with_mqa.weight[:latent] = 0.0
    into = torch.linalg.qr(torch.randn(c.token_dims, latent))[0].t()
    mla.kv_a_proj_with_mqa.weight[:latent, token] = into
    for head in range(heads):
        q = mla.q_b_proj.weight.view(c.num_heads, -1, c.q_lora_rank)[head]
        q.zero_()
        q[c.qk_nope_head_dim :, :shared] = MLA_QUERY * torch.eye(shared)
        v = mla.kv_b_proj.weight.view(c.num_heads, -1, latent)[head]
        v[c.qk_nope_head_dim :] = torch.eye(c.v_head_dim, latent)
        out = mla.o_proj.weight.view(c.hidden_size, c.num_heads, -1)[:, head]
        out.zero_()
        out[token] = into.t().flip(0)


@torch.no_grad()
def reading_out(model: NanoModel) -> None:
    """`lm_head` reads the embeddings in reverse order, which is where copying heads put what they propose."""
    dims = model.config.token_dims
    embedding = model.model.embed_tokens.weight
    embedding[:, dims:] = 0.0
    model.lm_head.weight[:, :dims] = LOGITS * embedding[:, :dims].flip(1)
    model.lm_head.weight[:, dims:] = 0.0
