"""A whole model in float64, written from `kernels/naive.py` alone: what the engine is held against, in any shape."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import naive

Array = NDArray[Any]


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The text configuration, and every tensor as float64 (MXFP4 decoded) under its name without the model's prefix."""
    config = json.loads((folder / "config.json").read_text())
    blob = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(blob[:8], "little")
    raw: dict[str, Array] = {}
    for name, entry in json.loads(blob[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = (begin + offset for offset in entry["data_offsets"])
        stored = {"F32": np.float32, "BF16": np.uint16, "U8": np.uint8}[entry["dtype"]]
        value: Array = np.frombuffer(blob[first:last], stored).reshape(entry["shape"])
        short = name.removeprefix("language_model.").removeprefix("model.")
        raw[short] = naive.bf16_widen(value) if entry["dtype"] == "BF16" else value
    weights: dict[str, Array] = {}
    for name, value in raw.items():
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("_packed")
            weights[stem] = naive.mxfp4_decode(value, raw[stem + "_scale"])
        elif not name.endswith(".weight_scale"):
            weights[name] = value.astype(np.float64)
    return config.get("text_config", config), weights


class Model:
    """One session of a model: feed tokens, get float64 logits; the state is what the next call starts from."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Array], latent_norm_eps: float) -> None:
        self.c, self.w, self.latent_norm_eps = config, weights, latent_norm_eps
        linear = config["linear_attn_config"]
        self.heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.bound = linear.get("gate_lower_bound") or 0.0
        self.kda = {n - 1: naive.empty_kda_state(self.heads, self.head_dim) for n in linear["kda_layers"]}
        width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        self.latents = {n - 1: np.zeros((0, width)) for n in linear["full_attn_layers"]}

    def attention(self, layer: int, h: Array) -> Array:
        p = f"layers.{layer}.self_attn."
        if layer in self.latents:
            return self.latent_attention(layer, p, h)
        q, k, v = (h @ self.w[f"{p}{n}_proj.weight"].T for n in "qkv")
        z = h @ self.w[p + "f_a_proj.weight"].T @ self.w[p + "f_b_proj.weight"].T
        if p + "g_proj.weight" in self.w:
            gate = h @ self.w[p + "g_proj.weight"].T
        else:
            gate = h @ self.w[p + "g_a_proj.weight"].T @ self.w[p + "g_b_proj.weight"].T
        parameters = naive.KdaWeights(
            conv=np.stack([self.w[f"{p}{n}_conv1d.weight"][:, 0] for n in "qkv"]),
            decay_rate=np.exp(self.w[p + "A_log"].reshape(-1)[: self.heads]),
            dt_bias=self.w[p + "dt_bias"],
            o_norm=self.w[p + "o_norm.weight"],
            eps=self.c["rms_norm_eps"],
            lower_bound=self.bound,
        )
        b = h @ self.w[p + "b_proj.weight"].T
        out, self.kda[layer] = naive.kda(q, k, v, z, b, gate, parameters, self.kda[layer])
        return out @ self.w[p + "o_proj.weight"].T

    def latent_attention(self, layer: int, p: str, h: Array) -> Array:
        c, eps = self.c, self.latent_norm_eps
        if c["q_lora_rank"]:
            low = naive.rms_norm(h @ self.w[p + "q_a_proj.weight"].T, self.w[p + "q_a_layernorm.weight"], eps)
            q = low @ self.w[p + "q_b_proj.weight"].T
        else:
            q = h @ self.w[p + "q_proj.weight"].T
        q = q.reshape(len(h), c["num_attention_heads"], -1)
        new = naive.mla_latents(h @ self.w[p + "kv_a_proj_with_mqa.weight"].T, self.w[p + "kv_a_layernorm.weight"], eps)
        latents = self.latents[layer] = np.concatenate([self.latents[layer], new])
        kv_b, value_dim = self.w[p + "kv_b_proj.weight"], c["v_head_dim"]
        absorbed = naive.absorb_queries(q, kv_b, value_dim)
        mixed = naive.mla_absorbed(absorbed, latents, q.shape[2] ** -0.5, c["kv_lora_rank"])
        out = naive.expand_values(mixed, kv_b, value_dim)
        np.testing.assert_allclose(out, naive.mla_expanded(q, latents, kv_b, value_dim), rtol=1e-9, atol=1e-12)
        out = out.reshape(len(h), -1)
        if p + "g_proj.weight" in self.w:
            out = out * naive.sigmoid(h @ self.w[p + "g_proj.weight"].T)
        return out @ self.w[p + "o_proj.weight"].T

    def mlp(self, p: str, names: tuple[str, str, str], x: Array) -> Array:
        gate, up, down = (self.w[f"{p}{n}.weight"] for n in names)
        if self.c["hidden_act"] == "situ":
            c = self.c
            mid = naive.situ(x @ gate.T, x @ up.T, c["activation_situ_beta"], c["activation_situ_linear_beta"])
        else:
            mid = naive.swiglu(x @ gate.T, x @ up.T)
        return mid @ down.T

    def feed_forward(self, layer: int, h: Array) -> Array:
        c, dense = self.c, ("gate_proj", "up_proj", "down_proj")
        if not c.get("num_experts") or layer < c["first_k_dense_replace"]:
            return self.mlp(f"layers.{layer}.mlp.", dense, h)
        p = f"layers.{layer}.block_sparse_moe."
        ids, weights = naive.route(
            h @ self.w[p + "gate.weight"].T,
            self.w[p + "gate.e_score_correction_bias"],
            c["num_experts_per_token"],
            c["num_expert_group"],
            c["topk_group"],
            c["moe_renormalize"],
            c["routed_scaling_factor"],
        )
        latent = p + "routed_expert_down_proj.weight" in self.w
        x = h @ self.w[p + "routed_expert_down_proj.weight"].T if latent else h
        y = naive.mixture(x, ids, weights, lambda e, rows: self.mlp(f"{p}experts.{e}.", ("w1", "w3", "w2"), rows))
        if latent:
            if c.get("latent_moe_use_norm"):
                y = naive.rms_norm(y, self.w[p + "routed_expert_norm.weight"], c["rms_norm_eps"])
            y = y @ self.w[p + "routed_expert_up_proj.weight"].T
        return y + self.mlp(p + "shared_experts.", dense, h) if c["num_shared_experts"] else y

    def residual(self, name: str, blocks: list[Array], prefix_sum: Array | None) -> Array:
        if not blocks:
            assert prefix_sum is not None
            return prefix_sum
        norm, proj = self.w[name + "_norm.weight"], self.w[name + "_proj.weight"][0]
        return naive.attention_residual(blocks, prefix_sum, norm, proj, self.c["rms_norm_eps"])

    def feed(self, tokens: Array) -> Array:
        c, eps = self.c, self.c["rms_norm_eps"]
        block_size = c.get("attn_res_block_size")
        x = self.w["embed_tokens.weight"][tokens]
        blocks: list[Array] = []
        for layer in range(c["num_hidden_layers"]):
            p = f"layers.{layer}."
            prefix_sum: Array | None = x
            h = self.residual(p + "self_attention_res", blocks, x)
            if block_size and layer % block_size == 0:
                blocks.append(x)
                prefix_sum = None
            a = self.attention(layer, naive.rms_norm(h, self.w[p + "input_layernorm.weight"], eps))
            x = a if prefix_sum is None else prefix_sum + a
            h = self.residual(p + "mlp_res", blocks, x)
            x = x + self.feed_forward(layer, naive.rms_norm(h, self.w[p + "post_attention_layernorm.weight"], eps))
        x = self.residual("output_attn_res", blocks, x)
        head = self.w["embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
        return naive.rms_norm(x, self.w["norm.weight"], eps) @ head.T
