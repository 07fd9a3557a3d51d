"""A plain forward pass of an exported kimi_k3 folder, one token at a time in NumPy: an oracle for faster engines.

`reference_logits(folder, tokens)` shares no code with the training model and needs no torch. Everything is computed in
float64 (or float32) from the stored weights; MXFP4 experts are dequantised.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LATENT_EPS = 1e-6  # q_a_layernorm, kv_a_layernorm
L2_EPS = 1e-6


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """name -> array; BF16 is widened to float32."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    out = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[8 + length + begin : 8 + length + end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(raw, {"F32": "<f4", "U8": "u1"}[entry["dtype"]])
        out[name] = array.reshape(entry["shape"])
    return out


def dequantise(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
    """[out, in / 2] bytes, low nibble the even column, and [out, in / 32] E8M0 -> [out, in]."""
    values = FP4[np.stack((packed & 15, packed >> 4), -1)].reshape(packed.shape[0], -1)
    return values * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, 1)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms(x: Array, weight: Array | float, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


class Reference:
    """The model and one session: `step(token)` feeds a token and returns the logits [vocab] after it."""

    def __init__(self, folder: Path, dtype: type = np.float64) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.c: dict[str, Any] = config.get("text_config", config)
        self.kda: dict[str, Any] = self.c["linear_attn_config"]
        self.dtype = dtype
        raw = read_safetensors(folder / "model.safetensors")
        self.w: dict[str, Array] = {}
        for name, array in raw.items():
            name = name.removeprefix("language_model.")
            if name.endswith("weight_packed"):
                scale = raw["language_model." + name.replace("weight_packed", "weight_scale")]
                self.w[name.replace("weight_packed", "weight")] = dequantise(array, scale).astype(dtype)
            elif not name.endswith("weight_scale"):
                self.w[name] = array.astype(dtype)
        self.reset()

    def reset(self) -> None:
        """Back to position 0."""
        heads, width = self.kda["num_heads"], self.kda["head_dim"]
        tail = self.kda["short_conv_kernel_size"] - 1
        self.states = {i - 1: np.zeros((heads, width, width), self.dtype) for i in self.kda["kda_layers"]}
        self.tails = {i - 1: np.zeros((tail, 3 * heads * width), self.dtype) for i in self.kda["kda_layers"]}
        self.latents: dict[int, list[Array]] = {i - 1: [] for i in self.kda["full_attn_layers"]}

    def _situ_mlp(self, x: Array, gate: str, up: str, down: str) -> Array:
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        g, u = self.w[gate] @ x, self.w[up] @ x
        return self.w[down] @ (beta * np.tanh(g / beta) * sigmoid(g) * linear * np.tanh(u / linear))

    def _kda(self, index: int, x: Array) -> Array:
        p, heads, width = f"model.layers.{index}.self_attn.", self.kda["num_heads"], self.kda["head_dim"]
        w = {name.removeprefix(p): value for name, value in self.w.items() if name.startswith(p)}
        new = np.concatenate([w[f"{n}_proj.weight"] @ x for n in "qkv"])
        window = np.concatenate((self.tails[index], new[None]))
        self.tails[index] = window[1:]
        kernel = np.concatenate([w[f"{n}_conv1d.weight"][:, 0] for n in "qkv"])
        mixed = np.einsum("jc,cj->c", window, kernel)
        q, k, v = (mixed * sigmoid(mixed)).reshape(3, heads, width)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + L2_EPS) * width**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + L2_EPS)
        z = (w["f_b_proj.weight"] @ (w["f_a_proj.weight"] @ x) + w["dt_bias"]).reshape(heads, width)
        decay = np.exp(self.kda["gate_lower_bound"] * sigmoid(np.exp(w["A_log"][:heads, None]) * z))
        beta = sigmoid(w["b_proj.weight"] @ x)[:, None]
        state = self.states[index] * decay[:, :, None]
        u = beta * (v - np.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * u[:, None, :]
        self.states[index] = state
        o = rms(np.einsum("hkv,hk->hv", state, q), w["o_norm.weight"], self.c["rms_norm_eps"])
        return w["o_proj.weight"] @ (o.reshape(-1) * sigmoid(w["g_proj.weight"] @ x))

    def _mla(self, index: int, x: Array) -> Array:
        p, heads, c = f"model.layers.{index}.self_attn.", self.c["num_attention_heads"], self.c
        nope, shared, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        w = {name.removeprefix(p): value for name, value in self.w.items() if name.startswith(p)}
        qa = rms(w["q_a_proj.weight"] @ x, w["q_a_layernorm.weight"], LATENT_EPS)
        q = (w["q_b_proj.weight"] @ qa).reshape(heads, nope + shared)
        row = w["kv_a_proj_with_mqa.weight"] @ x
        self.latents[index].append(
            np.concatenate((rms(row[:rank], w["kv_a_layernorm.weight"], LATENT_EPS), row[rank:]))
        )
        cache = np.stack(self.latents[index])
        kv_b = w["kv_b_proj.weight"].reshape(heads, nope + c["v_head_dim"], rank)
        # Absorbed: the query meets the latents directly, and the values are expanded after the weighted sum.
        scores = np.einsum("hn,hnr,tr->ht", q[:, :nope], kv_b[:, :nope], cache[:, :rank], optimize=True)
        scores = (scores + q[:, nope:] @ cache[:, rank:].T) * (nope + shared) ** -0.5
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        o = np.einsum("hvr,hr->hv", kv_b[:, nope:], weight @ cache[:, :rank]).reshape(-1)
        return w["o_proj.weight"] @ (o * sigmoid(w["g_proj.weight"] @ x))

    def _feed_forward(self, index: int, x: Array) -> Array:
        p = f"model.layers.{index}."
        if index < self.c["first_k_dense_replace"]:
            return self._situ_mlp(x, *(p + f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")))
        p += "block_sparse_moe."
        score = sigmoid(self.w[p + "gate.weight"] @ x)
        selection = score + self.w[p + "gate.e_score_correction_bias"]
        chosen = np.argsort(-selection, kind="stable")[: self.c["num_experts_per_token"]]
        weight = score[chosen] / (score[chosen].sum() + 1e-20) * self.c["routed_scaling_factor"]
        z = self.w[p + "routed_expert_down_proj.weight"] @ x
        y = np.zeros_like(z)
        for expert, amount in zip(chosen, weight, strict=True):
            e = p + f"experts.{expert}."
            y = y + amount * self._situ_mlp(z, e + "w1.weight", e + "w3.weight", e + "w2.weight")
        y = rms(y, self.w[p + "routed_expert_norm.weight"], self.c["rms_norm_eps"])
        s = p + "shared_experts."
        shared = self._situ_mlp(x, s + "gate_proj.weight", s + "up_proj.weight", s + "down_proj.weight")
        return self.w[p + "routed_expert_up_proj.weight"] @ y + shared

    def _residual(self, values: list[Array], name: str) -> Array:
        stacked = np.stack(values)
        vector = self.w[name + "_norm.weight"] * self.w[name + "_proj.weight"][0]
        scores = rms(stacked, 1.0, self.c["rms_norm_eps"]) @ vector
        weight = np.exp(scores - scores.max())
        mixed: Array = (weight / weight.sum()) @ stacked
        return mixed

    def step(self, token: int) -> Array:
        eps = self.c["rms_norm_eps"]
        x: Array = self.w["model.embed_tokens.weight"][token]
        blocks: list[Array] = []
        for index in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{index}."
            running: Array | None = x
            h = self._residual([*blocks, x], p + "self_attention_res") if blocks else x
            if index % self.c["attn_res_block_size"] == 0:
                blocks.append(x)
                running = None
            h = rms(h, self.w[p + "input_layernorm.weight"], eps)
            a = self._kda(index, h) if index in self.states else self._mla(index, h)
            x = a if running is None else running + a
            h = self._residual([*blocks, x], p + "mlp_res")
            x = x + self._feed_forward(index, rms(h, self.w[p + "post_attention_layernorm.weight"], eps))
        x = self._residual([*blocks, x], "model.output_attn_res")
        logits: Array = self.w["lm_head.weight"] @ rms(x, self.w["model.norm.weight"], eps)
        return logits


def reference_logits(folder: Path, tokens: Sequence[int], dtype: type = np.float64) -> Array:
    """Logits [T, vocab] after each of `tokens`, from an empty session."""
    session = Reference(folder, dtype)
    return np.stack([session.step(token) for token in tokens])


def greedy(session: Reference, prompt: Sequence[int], stops: Sequence[int], limit: int = 64) -> list[int]:
    """Feed the prompt, then pick the likeliest token until one of `stops` (not returned) or `limit` tokens."""
    logits = np.zeros(0)
    for token in prompt:
        logits = session.step(token)
    out: list[int] = []
    while len(out) < limit:
        token = int(np.argmax(logits))
        if token in stops:
            break
        out.append(token)
        logits = session.step(token)
    return out
