"""Small random checkpoints in the published layouts: what benches, examples and tests run on.

The tensors are exactly those `models/tensor_table.py` calls for, so a layout has one home. Every shape is a field of
`TinyModel`; vary one with `dataclasses.replace`.
"""

import json
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from blake3 import blake3

from serai.runtime.bench.random_weights import random_tensor
from serai.runtime.bench.tiny_tokenizer import (
    BOS_SLOT,
    LEAST_VOCABULARY,
    STOP_SLOT,
    first_control_id,
    write_tiny_tokenizer,
)
from serai.runtime.bench.write_checkpoint import StoredTensor, write_checkpoint
from serai.runtime.models.config import ModelConfig, ModelFamily, parse_config
from serai.runtime.models.tensor_table import TensorRole, TensorSpec, expected_tensors

RECIPE = 1
"""Part of a cached model's folder name; goes up when the same fields begin to give other files."""


class ExpertType(StrEnum):
    """How routed experts are stored."""

    MXFP4 = "MXFP4"
    BF16 = "BF16"
    F32 = "F32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The shape of a small model. Layers are counted from 1 in `attention_layers`, as in config.json.

    `q_lora`, `expert_latent`, `situ_linear_beta` and `gate_lower_bound` may be None, for models without; no `experts`
    makes every layer dense. `decay_slots` is the stored length of A_log (None: `[1, 1, kda_heads, 1]`). A vocabulary
    under 512 has no tokenizer.
    """

    family: ModelFamily
    vocab: int = 1024
    hidden: int = 128
    layers: int = 8
    attention_layers: tuple[int, ...] = (4, 8)
    kda_heads: int = 4
    kda_head_dim: int = 32
    decay_slots: int | None = None
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False
    heads: int = 4
    q_lora: int | None = None
    kv_lora: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    v_dim: int = 32
    output_gate: bool = False
    dense_inner: int = 192
    first_dense: int = 1
    experts: int = 16
    experts_per_token: int = 4
    expert_inner: int = 64
    expert_latent: int | None = None
    expert_latent_norm: bool = False
    shared_experts: int = 1
    groups: int = 1
    kept_groups: int = 1
    scaling: float = 1.0
    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    residual_block: int = 0
    tied_head: bool = False
    trunk_type: str = "BF16"
    expert_type: ExpertType = ExpertType.BF16
    eps: float = 1e-5
    context: int = 65_536

    def config(self) -> dict[str, object]:
        """The config.json of this model."""
        text = self._text_config()
        if self.family is ModelFamily.KIMI_LINEAR:
            return {"architectures": ["KimiLinearForCausalLM"], "model_type": self.family.value, **text}
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": self.family.value,
            "text_config": {"model_type": ModelFamily.KIMI_LINEAR.value, **text},
        }

    def stored_tensors(self, config: ModelConfig) -> dict[str, tuple[StoredTensor, TensorRole]]:
        """What the files hold: every tensor's element type and shape, and what it is for."""
        return {
            name: (StoredTensor(self._dtype(spec), self._shape(name, spec)), spec.role)
            for name, spec in expected_tensors(config).items()
        }

    def _dtype(self, spec: TensorSpec) -> str:
        if spec.role is TensorRole.EXPERT and self.expert_type is not ExpertType.MXFP4:
            return self.expert_type.value
        return spec.usual_dtype

    def _shape(self, name: str, spec: TensorSpec) -> tuple[int, ...]:
        if not name.endswith("A_log"):
            return spec.shape
        return (1, 1, self.kda_heads, 1) if self.decay_slots is None else (self.decay_slots,)

    def _text_config(self) -> dict[str, object]:
        attention = set(self.attention_layers)
        first_control = first_control_id(self.vocab)
        has_tokenizer = self.vocab >= LEAST_VOCABULARY
        text: dict[str, object] = {
            "dtype": "float32" if self.trunk_type == "F32" else "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "rms_norm_eps": self.eps,
            "kv_lora_rank": self.kv_lora,
            "q_lora_rank": self.q_lora,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.v_dim,
            "mla_use_nope": True,
            "mla_use_output_gate": self.output_gate,
            "max_position_embeddings": self.context,
            "model_max_length": self.context,
            "linear_attn_config": {
                "full_attn_layers": sorted(attention),
                "kda_layers": [layer for layer in range(1, self.layers + 1) if layer not in attention],
                "head_dim": self.kda_head_dim,
                "num_heads": self.kda_heads,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": self.gate_lower_bound,
                "use_full_rank_gate": self.full_rank_gate,
            },
            "tie_word_embeddings": self.tied_head,
            "bos_token_id": first_control + BOS_SLOT if has_tokenizer else 0,
            "eos_token_id": first_control + STOP_SLOT if has_tokenizer else 1,
        }
        return text | self._activation_config() | self._expert_config()

    def _activation_config(self) -> dict[str, object]:
        config: dict[str, object] = {"hidden_act": "silu"}
        if self.situ_beta is not None:
            config = {
                "hidden_act": "situ",
                "activation_situ_beta": self.situ_beta,
                "activation_situ_linear_beta": self.situ_linear_beta,
            }
        return config | ({"attn_res_block_size": self.residual_block} if self.residual_block else {})

    def _expert_config(self) -> dict[str, object]:
        if not self.experts:
            return {}
        config: dict[str, object] = {
            "num_experts": self.experts,
            "num_experts_per_token": self.experts_per_token,
            "num_shared_experts": self.shared_experts,
            "moe_intermediate_size": self.expert_inner,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "first_k_dense_replace": self.first_dense,
            "num_expert_group": self.groups,
            "topk_group": self.kept_groups,
            "use_grouped_topk": True,
            "topk_method": "noaux_tc",
            "routed_scaling_factor": self.scaling,
        }
        if self.expert_latent is not None:
            config |= {"routed_expert_hidden_size": self.expert_latent, "latent_moe_use_norm": self.expert_latent_norm}
        if self.expert_type is ExpertType.MXFP4:
            weights = {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True}
            config["quantization_config"] = {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*"],
            }
        return config


TINY_K3 = TinyModel(
    family=ModelFamily.KIMI_K3,
    decay_slots=8,
    gate_lower_bound=-5.0,
    full_rank_gate=True,
    q_lora=48,
    output_gate=True,
    experts=32,
    expert_latent=64,
    expert_latent_norm=True,
    shared_experts=2,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    residual_block=3,
    expert_type=ExpertType.MXFP4,
)
"""Everything that is Kimi K3's own, in about 5 MB."""

TINY_LINEAR = TinyModel(family=ModelFamily.KIMI_LINEAR, scaling=2.446)
"""Everything that is Kimi-Linear's own, in about 8 MB."""

TINY_MODELS = {model.family.value: model for model in (TINY_K3, TINY_LINEAR)}
"""By the `model_type` of config.json."""


def write_tiny_model(folder: Path, model: TinyModel = TINY_K3, *, seed: int = 0, shards: int = 1) -> int:
    """Write config.json, the weights and (with a vocabulary of 512 or more) tokenizer.json; gives the bytes of weights.

    Makes `folder`. The same arguments give the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = model.config()
    stored = model.stored_tensors(parse_config(described))
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    if model.vocab >= LEAST_VOCABULARY:
        write_tiny_tokenizer(folder, model.family, model.vocab)
    return write_checkpoint(
        folder,
        {name: tensor for name, (tensor, _) in stored.items()},
        lambda name, tensor: random_tensor(name, tensor, stored[name][1], model.kda_heads, seed),
        shards=shards,
    )


def cached_tiny_model(folder: Path, model: TinyModel = TINY_K3, *, seed: int = 0) -> Path:
    """The folder, below `folder`, of that model; written now unless an earlier call has. Never half written."""
    recipe = blake3(repr((RECIPE, model, seed)).encode()).hexdigest(length=6)
    kept = folder / f"tiny-{model.family.value}-{recipe}"
    if not kept.is_dir():
        unfinished = kept.with_name(kept.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_tiny_model(unfinished, model, seed=seed)
        unfinished.rename(kept)
    return kept
