"""The Kimi-K3 text architecture in PyTorch, for training on a CPU. Parameter names are the checkpoint's names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from . import native, start
from .kda import chunked
from .quantise import fake_quantise_mxfp4

LATENT_NORM_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm: the class default of the release, not rms_norm_eps."""
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class NanoConfig:
    """Sizes; the field names are those of config.json's text_config where one exists."""

    vocab_size: int = 2048
    hidden_size: int = 160
    num_hidden_layers: int = 8
    full_attn_layers: tuple[int, ...] = (4, 8)  # counted from 1, as in the release
    attn_res_block_size: int = 4
    num_heads: int = 4
    kda_head_dim: int = 32
    conv_kernel: int = 4
    gate_lower_bound: float = -5.0
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    intermediate_size: int = 320
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 64
    routed_expert_hidden_size: int = 96
    beta: float = 4.0
    linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5

    @property
    def window_dims(self) -> int:
        """Features of each of the last tokens that the first layer hands on at the start."""
        return (self.hidden_size - self.token_dims) // (self.conv_kernel - 1)

    @property
    def token_dims(self) -> int:
        """Leading dimensions of the residual stream in which embeddings start; the others start with the window."""
        return self.hidden_size * 3 // 5

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if native.enabled():
            return native.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Weight(nn.Module):
    """A bare [out, in] matrix: F.linear without bias."""

    def __init__(self, out: int, inner: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, inner) * gain * inner**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Conv(nn.Module):
    """Causal depthwise convolution, weight [channels, 1, kernel], newest token last."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        start = torch.zeros(channels, 1, kernel)
        start[:, 0, -1] = 0.7
        self.weight = nn.Parameter(start + 0.2 * torch.randn(channels, 1, kernel))


def situ(gate_and_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    if native.enabled():
        return native.situ(gate_and_up, beta, linear_beta)
    gate, up = gate_and_up.chunk(2, -1)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))


def prepare(qkv: Tensor, kernel: Tensor, c: NanoConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, T, H, D] from their joint projection [B, T, 3 H D]: short convolution, SiLU, L2 norms of q and k."""
    batch, time, _ = qkv.shape
    padded = F.pad(qkv, (0, 0, c.conv_kernel - 1, 0))
    mixed = F.silu(torch.stack([padded[:, j : j + time] * kernel[:, j] for j in range(c.conv_kernel)]).sum(0))
    q, k, v = mixed.view(batch, time, 3, c.num_heads, c.kda_head_dim).unbind(2)
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_EPS) * c.kda_head_dim**-0.5
    return q, k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_EPS), v


class KDA(nn.Module):
    def __init__(self, c: NanoConfig, out_gain: float, first: bool = False) -> None:
        super().__init__()
        self.c = c
        width = c.num_heads * c.kda_head_dim
        self.q_proj, self.k_proj, self.v_proj, self.g_proj = (Weight(width, c.hidden_size) for _ in range(4))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Conv(width, c.conv_kernel) for _ in range(3))
        self.f_a_proj = Weight(c.kda_head_dim, c.hidden_size)
        self.f_b_proj = Weight(width, c.kda_head_dim, 0.5)
        self.b_proj = Weight(c.num_heads, c.hidden_size, 0.5)
        self.A_log = nn.Parameter(torch.zeros(c.num_heads))
        # Log-decays start between -0.002 and -0.6 a token: some channels forget at once, some hold for a page.
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-8.0, -2.0))
        self.o_norm = Norm(c.kda_head_dim, c.rms_norm_eps)
        self.o_proj = Weight(c.hidden_size, width, out_gain)
        if first:
            start.window(self)
        else:
            start.copying_kda(self, width // 2)

    def forward(self, h: Tensor) -> Tensor:
        c = self.c
        batch, time, _ = h.shape
        width = c.num_heads * c.kda_head_dim
        joined = torch.cat(
            [m.weight for m in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)]
        )
        qkv, gate, f, b = F.linear(h, joined).split((3 * width, width, c.kda_head_dim, c.num_heads), -1)
        kernel = torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight))[:, 0]
        z = (self.f_b_proj(f).float() + self.dt_bias).view(batch, time, c.num_heads, c.kda_head_dim)
        g = c.gate_lower_bound * torch.sigmoid(self.A_log.exp().unsqueeze(-1) * z)
        beta = torch.sigmoid(b.float())
        if native.enabled() and (c.kda_head_dim, c.conv_kernel) == (native.WIDTH, native.TAPS):
            q, k, v = native.prepare(qkv, kernel, c.num_heads, L2_EPS)
            o = native.recurrence(q, k, v, g, beta)
        else:
            with torch.autocast("cpu", enabled=False):
                o, _ = chunked(*prepare(qkv.float(), kernel, c), g, beta)
        o = self.o_norm(o) * torch.sigmoid(gate.float()).view(batch, time, c.num_heads, c.kda_head_dim)
        return self.o_proj(o.reshape(batch, time, width))


class MLA(nn.Module):
    def __init__(self, c: NanoConfig, out_gain: float) -> None:
        super().__init__()
        self.c = c
        heads, key = c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = Weight(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = Norm(c.q_lora_rank, LATENT_NORM_EPS)
        self.q_b_proj = Weight(heads * key, c.q_lora_rank)
        self.kv_a_proj_with_mqa = Weight(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Weight(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.g_proj = Weight(heads * c.v_head_dim, c.hidden_size)
        self.o_proj = Weight(c.hidden_size, heads * c.v_head_dim, out_gain)
        start.copying_mla(self, heads // 2)

    def forward(self, h: Tensor) -> Tensor:
        c = self.c
        batch, time, _ = h.shape
        joined = torch.cat((self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight, self.g_proj.weight))
        qa, latent, shared, gate = F.linear(h, joined).split(
            (c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, c.num_heads * c.v_head_dim), -1
        )
        q = self.q_b_proj(self.q_a_layernorm(qa)).view(batch, time, c.num_heads, -1).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, time, c.num_heads, -1).transpose(1, 2)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), -1)
        k = torch.cat((k_nope, shared.unsqueeze(1).expand(-1, c.num_heads, -1, -1)), -1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # scale (nope + rope)^-0.5, no rotation
        o = o.transpose(1, 2).reshape(batch, time, -1) * torch.sigmoid(gate)
        return self.o_proj(o)


class MLP(nn.Module):
    def __init__(self, c: NanoConfig, inner: int, out_gain: float) -> None:
        super().__init__()
        self.c = c
        self.gate_proj, self.up_proj = Weight(inner, c.hidden_size), Weight(inner, c.hidden_size)
        self.down_proj = Weight(c.hidden_size, inner, out_gain)

    def forward(self, h: Tensor) -> Tensor:
        both = F.linear(h, torch.cat((self.gate_proj.weight, self.up_proj.weight)))
        return self.down_proj(situ(both, self.c.beta, self.c.linear_beta))


class Experts(nn.Module):
    """All routed experts stacked: w1 (gate), w3 (up) [E, inner, latent], w2 (down) [E, latent, inner]."""

    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        latent, inner = c.routed_expert_hidden_size, c.moe_intermediate_size
        self.w1 = nn.Parameter(torch.randn(c.num_experts, inner, latent) * latent**-0.5)
        self.w3 = nn.Parameter(torch.randn(c.num_experts, inner, latent) * latent**-0.5)
        self.w2 = nn.Parameter(torch.randn(c.num_experts, latent, inner) * inner**-0.5)


class Router(Weight):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__(c.num_experts, c.hidden_size)
        self.register_buffer("e_score_correction_bias", torch.zeros(c.num_experts))
        self.register_buffer("load", torch.zeros(c.num_experts), persistent=False)
        self.e_score_correction_bias: Tensor
        self.load: Tensor


class LatentMoE(nn.Module):
    def __init__(self, c: NanoConfig, out_gain: float) -> None:
        super().__init__()
        self.c = c
        self.gate = Router(c)
        self.routed_expert_down_proj = Weight(c.routed_expert_hidden_size, c.hidden_size)
        self.routed_expert_norm = Norm(c.routed_expert_hidden_size, c.rms_norm_eps)
        self.routed_expert_up_proj = Weight(c.hidden_size, c.routed_expert_hidden_size, out_gain)
        self.shared_experts = MLP(c, c.moe_intermediate_size * c.num_shared_experts, out_gain)
        self.experts = Experts(c)
        self.quantised = False

    def forward(self, h: Tensor) -> Tensor:
        c = self.c
        flat = h.reshape(-1, c.hidden_size)
        with torch.autocast("cpu", enabled=False):
            score = torch.sigmoid(F.linear(flat.float(), self.gate.weight))
        chosen = (score.detach() + self.gate.e_score_correction_bias).topk(c.num_experts_per_token, -1).indices
        weight = score.gather(1, chosen)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        z = self.routed_expert_down_proj(flat)
        w13, w2 = torch.cat((self.experts.w1, self.experts.w3), 1), self.experts.w2
        if self.quantised:
            w13, w2 = fake_quantise_mxfp4(w13), fake_quantise_mxfp4(w2)
        if self.training:
            self.gate.load.add_(chosen.flatten().bincount(minlength=c.num_experts))
        # All experts for all tokens, as two products: at this size the arithmetic is cheaper than sorting tokens.
        amount = torch.zeros_like(score).scatter(1, chosen, weight)
        hidden = situ(F.linear(z, w13.flatten(0, 1)).unflatten(-1, (c.num_experts, -1)), c.beta, c.linear_beta)
        hidden = (hidden * amount.unsqueeze(-1)).flatten(1)
        y = F.linear(hidden, w2.transpose(0, 1).flatten(1)).float()
        y = self.routed_expert_up_proj(self.routed_expert_norm(y)) + self.shared_experts(flat)
        return y.view(h.shape)


class Layer(nn.Module):
    def __init__(self, c: NanoConfig, index: int) -> None:
        super().__init__()
        out_gain = (2 * c.num_hidden_layers) ** -0.5
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attention_res_norm, self.mlp_res_norm = (Norm(c.hidden_size, c.rms_norm_eps) for _ in range(2))
        self.self_attention_res_proj, self.mlp_res_proj = (Weight(1, c.hidden_size, 0.0) for _ in range(2))
        self.self_attn = MLA(c, out_gain) if index + 1 in c.full_attn_layers else KDA(c, out_gain, index == 0)
        if index == 0:
            self.mlp = MLP(c, c.intermediate_size, out_gain)
        else:
            self.block_sparse_moe = LatentMoE(c, out_gain)

    def feed_forward(self, h: Tensor) -> Tensor:
        return self.mlp(h) if hasattr(self, "mlp") else self.block_sparse_moe(h)


def attention_residual(x: Tensor, blocks: list[Tensor], norm: Norm, proj: Weight) -> Tensor:
    """Softmax mix of the finished blocks and the running value, per token (AttnRes)."""
    w = norm.weight * proj.weight[0]
    if native.enabled():
        return native.residual_mix(w, norm.eps, [*blocks, x])
    values = torch.stack([*blocks, x], -2)
    scores = (F.rms_norm(values, (w.numel(),), eps=norm.eps) * w).sum(-1)
    return (scores.softmax(-1).unsqueeze(-1) * values).sum(-2)


class Decoder(nn.Module):
    def __init__(self, c: NanoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.output_attn_res_norm = Norm(c.hidden_size, c.rms_norm_eps)
        self.output_attn_res_proj = Weight(1, c.hidden_size, 0.0)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class NanoModel(nn.Module):
    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Weight(config.vocab_size, config.hidden_size)
        start.reading_out(self)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> the normalised last hidden [B, T, hidden]; `lm_head` turns rows of it into logits."""
        top, blocks = self.model, []
        x = top.embed_tokens(ids)
        for index, layer in enumerate(top.layers):
            running: Tensor | None = x
            h = (
                attention_residual(x, blocks, layer.self_attention_res_norm, layer.self_attention_res_proj)
                if blocks
                else x
            )
            if index % self.config.attn_res_block_size == 0:
                blocks.append(x)
                running = None
            a = layer.self_attn(layer.input_layernorm(h)).float()
            x = a if running is None else running + a
            h = attention_residual(x, blocks, layer.mlp_res_norm, layer.mlp_res_proj)
            x = x + layer.feed_forward(layer.post_attention_layernorm(h)).float()
        x = attention_residual(x, blocks, top.output_attn_res_norm, top.output_attn_res_proj)
        return top.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids)).float()

    def set_quantised(self, on: bool) -> None:
        """Experts see their MXFP4 values (straight-through gradients)."""
        for layer in self.model.layers:
            if hasattr(layer, "block_sparse_moe"):
                layer.block_sparse_moe.quantised = on
