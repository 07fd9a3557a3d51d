"""Which tensors a configuration calls for: names, shapes and element types, both families.

The published layouts (Kimi-Linear-48B-A3B and Kimi-K3) as data. K3 holds half a million tensors, nearly all of them
routed experts of six shapes, so one `TensorSpec` object serves all experts.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.models.config import MXFP4_GROUP, ExpertFormat, LayerKind, ModelConfig, ModelFamily, MoeConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PREFIXES = ("", "language_model.")
IGNORED_PARTS = ("vision_tower.", "mm_projector.")
"""Tensors of a K3 checkpoint that are not part of its language model."""

FLOATS = frozenset(("BF16", "F32"))
PACKED = frozenset(("U8",))
SCALES = frozenset(("U8", "F8_E8M0"))
"""A scale byte is an 8-bit exponent under either name."""


class TensorRole(Enum):
    """What a tensor is for, as far as loading and the budget must tell them apart."""

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    KV_UP = "kv_up"  # kv_b_proj, held as two matrices a head
    ROUTER = "router"
    GATE = "gate"  # what decides how much is kept, corrected or let out
    NORM = "norm"
    CONV = "conv"
    DECAY = "decay"  # A_log and dt_bias
    BIAS = "bias"  # the router's correction
    MIX = "mix"  # Attention Residuals: the vector that scores a block
    FOLDED = "folded"  # the norm that is multiplied into it when loaded, and not held
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`shape` is `[out, in]` for matrices. `usual_dtype` is what the published checkpoint has; `dtypes` are accepted.

    `at_least` marks A_log, which may be `[N]` or `[1, 1, N, 1]` with N ≥ heads (see `decay_per_head`).
    """

    shape: tuple[int, ...]
    dtypes: frozenset[str]
    role: TensorRole
    usual_dtype: str
    at_least: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape can be read as this one."""
        if not self.at_least:
            return shape == self.shape
        sizes = [size for size in shape if size != 1] or [1]
        return len(shape) > 0 and len(sizes) == 1 and sizes[0] >= self.shape[0]

    def shape_text(self) -> str:
        """The acceptable shapes, for an error sentence."""
        text = str(list(self.shape))
        return f"{text} (or padded, or [1, 1, {self.shape[0]}, 1])" if self.at_least else text


def decay_per_head(a_log: NDArray[Any], heads: int) -> NDArray[Any]:
    """A_log `[heads]`, contiguous, out of any of its stored shapes: the heads come first, K3 pads them to 128."""
    return np.ascontiguousarray(a_log.reshape(-1)[:heads])


def find_prefix(config: ModelConfig, names: Container[str]) -> str:
    """What stands before the names of the table in these files; the family's own when no embedding tells."""
    for prefix in (config.tensor_prefix, *PREFIXES):
        if prefix + EMBEDDING in names:
            return prefix
    return config.tensor_prefix


def head_name(config: ModelConfig) -> str:
    """The table's name of the tensor that gives logits: the embedding itself when the two are tied."""
    return EMBEDDING if config.tie_word_embeddings else HEAD


def expected_tensors(config: ModelConfig, prefix: str | None = None) -> dict[str, TensorSpec]:
    """Every tensor the configuration calls for, by its full name. About a second for the real K3."""
    start = config.tensor_prefix if prefix is None else prefix
    table = {start + name: spec for name, spec in trunk_tensors(config).items()}
    if config.moe is not None:
        parts = expert_tensors(config).items()
        for layer in expert_layers(config):
            for expert in range(config.moe.experts):
                stem = start + expert_stem(layer, expert)
                for part, spec in parts:
                    table[stem + part] = spec
    return table


def expert_layers(config: ModelConfig) -> tuple[int, ...]:
    """The layers, counted from 0, that have routed experts."""
    return tuple(layer for layer, is_moe in enumerate(config.layer_is_moe) if is_moe)


def expert_stem(layer: int, expert: int) -> str:
    """What the names of one expert's tensors start with (after the prefix)."""
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}."


def expert_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """One routed expert: w1 (gate) and w3 (up) `[inner, latent]`, w2 (down) `[latent, inner]`, plain or packed.

    Empty when the model has no experts.
    """
    if config.moe is None:
        return {}
    up, down = (config.moe.inner, config.moe.latent), (config.moe.latent, config.moe.inner)
    table: dict[str, TensorSpec] = {}
    for name, (rows, columns) in {"w1": up, "w2": down, "w3": up}.items():
        if config.expert_format is ExpertFormat.MXFP4:
            # Two 4-bit weights a byte, and one scale byte for each 32 of a row.
            table[f"{name}.weight_packed"] = TensorSpec((rows, columns // 2), PACKED, TensorRole.EXPERT, "U8")
            scales = (rows, columns // MXFP4_GROUP)
            table[f"{name}.weight_scale"] = TensorSpec(scales, SCALES, TensorRole.EXPERT, "U8")
        else:
            table[f"{name}.weight"] = TensorSpec((rows, columns), FLOATS, TensorRole.EXPERT, config.weight_dtype)
    return table


def trunk_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Everything but the routed experts, by name without prefix."""
    table = _Trunk(config)
    hidden = config.hidden_size
    table.add(EMBEDDING, TensorRole.EMBEDDING, config.vocab_size, hidden)
    for layer in range(config.num_layers):
        stem = f"model.layers.{layer}."
        table.add(f"{stem}input_layernorm.weight", TensorRole.NORM, hidden)
        table.add(f"{stem}post_attention_layernorm.weight", TensorRole.NORM, hidden)
        if config.attn_res_block_size:
            table.add_mix(f"{stem}self_attention_res")
            table.add_mix(f"{stem}mlp_res")
        if config.layer_kinds[layer] is LayerKind.KDA:
            table.add_kda(f"{stem}self_attn.")
        else:
            table.add_mla(f"{stem}self_attn.")
        if config.moe is not None and config.layer_is_moe[layer]:
            table.add_moe(f"{stem}block_sparse_moe.", config.moe)
        else:
            table.add_mlp(f"{stem}mlp.", config.dense_intermediate)
    table.add("model.norm.weight", TensorRole.NORM, hidden)
    if config.attn_res_block_size:
        table.add_mix("model.output_attn_res")
    if not config.tie_word_embeddings:
        table.add(HEAD, TensorRole.HEAD, config.vocab_size, hidden)
    return dict(table.items())


class _Trunk:
    """Collects the trunk's specs; one method for each part of a layer."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._specs: dict[str, TensorSpec] = {}
        # K3 stores these in float32; Kimi-Linear all but A_log and dt_bias in bfloat16.
        k3 = config.family is ModelFamily.KIMI_K3
        self._wide = "F32" if k3 else config.weight_dtype

    def items(self) -> Iterator[tuple[str, TensorSpec]]:
        return iter(self._specs.items())

    def add(self, name: str, role: TensorRole, *shape: int, usual: str | None = None, at_least: bool = False) -> None:
        self._specs[name] = TensorSpec(shape, FLOATS, role, usual or self._config.weight_dtype, at_least)

    def add_matrix(self, name: str, rows: int, columns: int, role: TensorRole = TensorRole.MATRIX) -> None:
        self.add(f"{name}.weight", role, rows, columns)

    def add_mix(self, name: str) -> None:
        self.add(f"{name}_norm.weight", TensorRole.FOLDED, self._config.hidden_size)
        self.add(f"{name}_proj.weight", TensorRole.MIX, 1, self._config.hidden_size)

    def add_mlp(self, stem: str, inner: int) -> None:
        hidden = self._config.hidden_size
        self.add_matrix(f"{stem}gate_proj", inner, hidden)
        self.add_matrix(f"{stem}up_proj", inner, hidden)
        self.add_matrix(f"{stem}down_proj", hidden, inner)

    def add_kda(self, stem: str) -> None:
        hidden, kda = self._config.hidden_size, self._config.kda
        for name in "qkv":
            self.add_matrix(f"{stem}{name}_proj", kda.width, hidden)
            self.add(f"{stem}{name}_conv1d.weight", TensorRole.CONV, kda.width, 1, kda.conv_kernel, usual=self._wide)
        self.add(f"{stem}A_log", TensorRole.DECAY, kda.heads, usual="F32", at_least=True)
        self.add(f"{stem}dt_bias", TensorRole.DECAY, kda.width, usual="F32")
        self.add_matrix(f"{stem}f_a_proj", kda.head_dim, hidden, TensorRole.GATE)
        self.add_matrix(f"{stem}f_b_proj", kda.width, kda.head_dim, TensorRole.GATE)
        self.add_matrix(f"{stem}b_proj", kda.heads, hidden, TensorRole.GATE)
        if kda.full_rank_gate:
            self.add_matrix(f"{stem}g_proj", kda.width, hidden, TensorRole.GATE)
        else:
            self.add_matrix(f"{stem}g_a_proj", kda.head_dim, hidden, TensorRole.GATE)
            self.add_matrix(f"{stem}g_b_proj", kda.width, kda.head_dim, TensorRole.GATE)
        self.add(f"{stem}o_norm.weight", TensorRole.NORM, kda.head_dim, usual=self._wide)
        self.add_matrix(f"{stem}o_proj", hidden, kda.width)

    def add_mla(self, stem: str) -> None:
        hidden, mla = self._config.hidden_size, self._config.mla
        queries = mla.heads * mla.query_dim
        if mla.q_lora_rank is None:
            self.add_matrix(f"{stem}q_proj", queries, hidden)
        else:
            self.add_matrix(f"{stem}q_a_proj", mla.q_lora_rank, hidden)
            self.add(f"{stem}q_a_layernorm.weight", TensorRole.NORM, mla.q_lora_rank)
            self.add_matrix(f"{stem}q_b_proj", queries, mla.q_lora_rank)
        self.add_matrix(f"{stem}kv_a_proj_with_mqa", mla.latent_width, hidden)
        self.add(f"{stem}kv_a_layernorm.weight", TensorRole.NORM, mla.kv_lora_rank)
        self.add_matrix(f"{stem}kv_b_proj", mla.heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank, TensorRole.KV_UP)
        if mla.output_gate:
            self.add_matrix(f"{stem}g_proj", mla.heads * mla.v_dim, hidden, TensorRole.GATE)
        self.add_matrix(f"{stem}o_proj", hidden, mla.heads * mla.v_dim)

    def add_moe(self, stem: str, moe: MoeConfig) -> None:
        hidden = self._config.hidden_size
        self.add(f"{stem}gate.weight", TensorRole.ROUTER, moe.experts, hidden)
        self.add(f"{stem}gate.e_score_correction_bias", TensorRole.BIAS, moe.experts, usual=self._wide)
        if moe.has_latent:
            self.add_matrix(f"{stem}routed_expert_down_proj", moe.latent, hidden)
            self.add_matrix(f"{stem}routed_expert_up_proj", hidden, moe.latent)
        if moe.latent_norm:
            self.add(f"{stem}routed_expert_norm.weight", TensorRole.NORM, moe.latent)
        if moe.shared_experts:
            self.add_mlp(f"{stem}shared_experts.", moe.shared_inner)
