"""A Kimi model's config.json as one frozen value, everything checked before a tensor is looked at.

`kimi_linear` configurations are flat; a `kimi_k3` one holds its language model under `text_config` and may keep
`quantization_config` and the special token ids at either level. What a configuration asks for and serai does not do
is refused by name: running it anyway would give fluent nonsense.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from serai.runtime.errors import ConfigInvalid
from serai.runtime.models.config_keys import ConfigKeys
from serai.runtime.models.strict_json import JsonError, parse_json_object, shown

MXFP4_GROUP = 32
"""Consecutive weights that share one scale byte (OCP MX, and the only group size of the published checkpoints)."""

LATENT_NORM_EPS = 1e-6
"""Default eps of q_a_layernorm and kv_a_layernorm: upstream builds both without one, so they get its class default
rather than rms_norm_eps. Engines differ here, hence the knob: the key `latent_norm_eps`, which is serai's own."""

MOST_LAYERS = 4_096
MOST_EXPERTS = 65_536
"""Bounds that no model comes near, so that a damaged number can't make the table of tensors grow without end."""


class ModelFamily(Enum):
    """The two published architectures; the value is config.json's `model_type`."""

    KIMI_LINEAR = "kimi_linear"
    KIMI_K3 = "kimi_k3"


class LayerKind(Enum):
    """What mixes tokens in a layer."""

    KDA = "kda"
    MLA = "mla"


class ActivationKind(Enum):
    """SILU: `silu(g)·u`. SITU: `β·tanh(g/β)·σ(g) · lβ·tanh(u/lβ)`; the last factor is `u` when lβ is absent."""

    SILU = "silu"
    SITU = "situ"


class ExpertFormat(Enum):
    """How routed experts are stored: one matrix of the trunk's kind, or packed 4-bit weights beside their scales."""

    PLAIN = "plain"
    MXFP4 = "mxfp4-pack-quantized"


@dataclass(frozen=True, slots=True)
class Activation:
    """The feed-forward activation; `situ_beta` is 0 for SILU, `situ_linear_beta` None where it doesn't apply."""

    kind: ActivationKind
    situ_beta: float = 0.0
    situ_linear_beta: float | None = None


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention. `gate_lower_bound` chooses the bounded gate (K3); None is the softplus gate."""

    heads: int
    head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None
    full_rank_gate: bool

    @property
    def width(self) -> int:
        """Channels of q, of k and of v."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Multi-head latent attention without rotation: the `rope_dim` numbers are passed through."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool

    @property
    def query_dim(self) -> int:
        """Width of one head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_width(self) -> int:
        """Numbers cached for a token in a layer."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts. `latent` is the width experts work on: the hidden size unless `has_latent`."""

    experts: int
    experts_per_token: int
    shared_experts: int
    inner: int
    latent: int
    has_latent: bool
    latent_norm: bool
    n_group: int
    topk_group: int
    renormalize: bool
    scaling: float
    first_dense: int
    layer_freq: int

    @property
    def shared_inner(self) -> int:
        """Inner width of the shared experts, which are stored as one MLP."""
        return self.shared_experts * self.inner


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything config.json fixes about the forward pass; layers count from 0. Sizes are in numbers, not bytes.

    `raw` is the whole configuration as canonical JSON, for the model fingerprint. `weight_dtype` is the file's own
    word on how matrices are stored, used only where no safetensors header says better.
    """

    family: ModelFamily
    hidden_size: int
    num_layers: int
    vocab_size: int
    rms_norm_eps: float
    latent_norm_eps: float
    activation: Activation
    attn_res_block_size: int
    dense_intermediate: int
    layer_kinds: tuple[LayerKind, ...]
    layer_is_moe: tuple[bool, ...]
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig | None
    expert_format: ExpertFormat
    tie_word_embeddings: bool
    max_positions: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    weight_dtype: str
    raw: str = field(repr=False)

    @property
    def tensor_prefix(self) -> str:
        """What the published checkpoints of this family put before `model.` and `lm_head.`."""
        return "language_model." if self.family is ModelFamily.KIMI_K3 else ""

    @property
    def kda_layers(self) -> int:
        return self.layer_kinds.count(LayerKind.KDA)

    @property
    def mla_layers(self) -> int:
        return self.layer_kinds.count(LayerKind.MLA)

    @property
    def moe_layers(self) -> int:
        return sum(self.layer_is_moe)


def load_config(path: Path) -> ModelConfig:
    """The configuration in a model folder, or in a bare config.json. Raises `ConfigInvalid`."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{file} can't be read ({error.strerror}); a model folder needs its config.json") from error
    try:
        raw = parse_json_object(data)
    except JsonError as error:
        raise ConfigInvalid(f"{file} {error}") from None
    return parse_config(raw, source=str(file))


def parse_config(raw: Mapping[str, object], *, source: str = "config.json") -> ModelConfig:
    """The configuration that a parsed config.json describes; `source` names it in errors. Raises `ConfigInvalid`."""
    top = ConfigKeys(raw, source)
    family = ModelFamily(top.word("model_type", {family.value: family for family in ModelFamily}))
    text = _text_part(top, family)
    _refuse_what_is_not_built(text)
    hidden_size = text.integer("hidden_size")
    layers = text.integer("num_hidden_layers", high=MOST_LAYERS)
    vocab_size = text.integer("vocab_size")
    attention = text.section("linear_attn_config")
    moe = _moe(text, hidden_size, layers)
    expert_format = _expert_format(top, text)
    if moe is not None and expert_format is ExpertFormat.MXFP4:
        _check_groups_of_32(text, moe)
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        num_layers=layers,
        vocab_size=vocab_size,
        rms_norm_eps=text.number("rms_norm_eps"),
        latent_norm_eps=text.number("latent_norm_eps", default=LATENT_NORM_EPS),
        activation=_activation(text),
        attn_res_block_size=text.integer("attn_res_block_size", low=0, default=0),
        dense_intermediate=text.integer("intermediate_size"),
        layer_kinds=_layer_kinds(attention, layers),
        layer_is_moe=tuple(moe is not None and _is_moe(layer, moe) for layer in range(layers)),
        kda=_kda(attention),
        mla=_mla(text),
        moe=moe,
        expert_format=expert_format,
        tie_word_embeddings=(text if text.has("tie_word_embeddings") else top).boolean(
            "tie_word_embeddings", default=False
        ),
        max_positions=text.integer(
            "max_position_embeddings" if text.has("max_position_embeddings") else "model_max_length"
        ),
        bos_id=_bos_id(top, text, vocab_size),
        eos_ids=_eos_ids(top, text, vocab_size),
        weight_dtype=_weight_dtype(top, text),
        raw=json.dumps(raw, sort_keys=True, separators=(",", ":")),
    )


def _text_part(top: ConfigKeys, family: ModelFamily) -> ConfigKeys:
    if family is ModelFamily.KIMI_LINEAR:
        return top
    text = top.section("text_config")
    text.word("model_type", {"kimi_linear": None}, default="kimi_linear")
    return text


def _refuse_what_is_not_built(text: ConfigKeys) -> None:
    if not text.boolean("mla_use_nope", default=False):
        found = f"is {shown(text.value('mla_use_nope'))}" if text.has("mla_use_nope") else "is missing"
        text.refuse("mla_use_nope", f"{found}, but only true (no rotation) is supported")
    if (nextn := text.integer("num_nextn_predict_layers", low=0, default=0)) != 0:
        text.refuse("num_nextn_predict_layers", f"is {nextn}, but only 0 is supported (no draft layers)")
    heads = text.integer("num_attention_heads")
    if (kv_heads := text.integer("num_key_value_heads", default=heads)) != heads:
        text.refuse(
            "num_key_value_heads",
            f"is {kv_heads}, but latent attention has as many as num_attention_heads, which is {heads}",
        )


def _activation(text: ConfigKeys) -> Activation:
    kind = ActivationKind(text.word("hidden_act", {kind.value: kind for kind in ActivationKind}))
    if kind is ActivationKind.SILU:
        return Activation(kind)
    return Activation(kind, text.number("activation_situ_beta"), text.optional_number("activation_situ_linear_beta"))


def _layer_kinds(attention: ConfigKeys, layers: int) -> tuple[LayerKind, ...]:
    kinds: list[LayerKind | None] = [None] * layers
    for key, kind in (("kda_layers", LayerKind.KDA), ("full_attn_layers", LayerKind.MLA)):
        for number in attention.integers(key, low=1, high=layers):  # the lists count layers from 1
            if kinds[number - 1] is not None:
                attention.refuse(
                    key, f"holds layer {number} again; each of the {layers} layers must be in one list, once"
                )
            kinds[number - 1] = kind
    for index, found in enumerate(kinds):
        if found is None:
            attention.refuse(
                "kda_layers",
                f"and full_attn_layers both lack layer {index + 1}; each of the {layers} layers, counted from 1, "
                "must be in one of them",
            )
    return tuple(kind for kind in kinds if kind is not None)


def _kda(attention: ConfigKeys) -> KdaConfig:
    kernel = attention.integer("short_conv_kernel_size")
    if kernel != 4:
        attention.refuse("short_conv_kernel_size", f"is {kernel}, but only 4 is supported")
    return KdaConfig(
        heads=attention.integer("num_heads", high=65_536),
        head_dim=attention.integer("head_dim", high=65_536),
        conv_kernel=kernel,
        gate_lower_bound=attention.optional_number("gate_lower_bound", negative=True),
        full_rank_gate=attention.boolean("use_full_rank_gate", default=False),
    )


def _mla(text: ConfigKeys) -> MlaConfig:
    return MlaConfig(
        heads=text.integer("num_attention_heads", high=65_536),
        q_lora_rank=text.optional_integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        nope_dim=text.integer("qk_nope_head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        v_dim=text.integer("v_head_dim"),
        output_gate=text.boolean("mla_use_output_gate", default=False),
    )


def _moe(text: ConfigKeys, hidden_size: int, layers: int) -> MoeConfig | None:
    if not text.has("num_experts"):
        return None
    text.word("moe_router_activation_func", {"sigmoid": None}, default="sigmoid")
    text.word("topk_method", {"noaux_tc": None}, default="noaux_tc")
    experts = text.integer("num_experts", high=MOST_EXPERTS)
    latent = text.optional_integer("routed_expert_hidden_size")
    moe = MoeConfig(
        experts=experts,
        experts_per_token=text.integer("num_experts_per_token", high=experts),
        shared_experts=text.integer("num_shared_experts", low=0, default=0),
        inner=text.integer("moe_intermediate_size"),
        latent=hidden_size if latent is None else latent,
        has_latent=latent is not None,
        latent_norm=latent is not None and text.boolean("latent_moe_use_norm", default=False),
        n_group=text.integer("num_expert_group", high=experts, default=1),
        topk_group=text.integer("topk_group", default=1),
        renormalize=text.boolean("moe_renormalize", default=True),
        scaling=text.number("routed_scaling_factor", default=1.0),
        first_dense=text.integer("first_k_dense_replace", low=0, default=0),
        layer_freq=text.integer("moe_layer_freq", default=1),
    )
    _check_expert_groups(text, moe)
    return moe if any(_is_moe(layer, moe) for layer in range(layers)) else None


def _is_moe(layer: int, moe: MoeConfig) -> bool:
    return layer >= moe.first_dense and layer % moe.layer_freq == 0


def _check_expert_groups(text: ConfigKeys, moe: MoeConfig) -> None:
    if moe.experts % moe.n_group:
        text.refuse("num_expert_group", f"is {moe.n_group}, which does not divide num_experts, {moe.experts}")
    if moe.topk_group > moe.n_group:
        text.refuse("topk_group", f"is {moe.topk_group}, but there are only {moe.n_group} groups (num_expert_group)")
    if moe.n_group == moe.topk_group:
        return
    if not text.boolean("use_grouped_topk", default=True):
        text.refuse("use_grouped_topk", f"is false, but num_expert_group is {moe.n_group} and topk_group less")
    group = moe.experts // moe.n_group
    if group < 2:
        text.refuse("num_expert_group", "leaves one expert a group, but a group is scored by its two best")
    if moe.experts_per_token > group * moe.topk_group:
        text.refuse(
            "num_experts_per_token",
            f"is {moe.experts_per_token}, but the {moe.topk_group} kept groups hold {group * moe.topk_group} experts",
        )


def _expert_format(top: ConfigKeys, text: ConfigKeys) -> ExpertFormat:
    key = "quantization_config"
    holder = text if text.has(key) else top
    if not holder.has(key):
        return ExpertFormat.PLAIN
    if top.has(key) and top.value(key) != holder.value(key):
        top.refuse(key, "says something else than the one in text_config; keep one of the two")
    quantization = holder.section(key)
    quantization.word("quant_method", {"compressed-tensors": None})
    quantization.word("format", {ExpertFormat.MXFP4.value: None})
    groups = quantization.section("config_groups")
    if not groups.names():
        quantization.refuse("config_groups", "is empty, so nothing says how the weights are packed")
    for name in groups.names():
        weights = groups.section(name).section("weights")
        weights.word("type", {"float": None})
        weights.word("strategy", {"group": None}, default="group")
        for size, supported in (("num_bits", 4), ("group_size", MXFP4_GROUP)):
            if (found := weights.integer(size)) != supported:
                weights.refuse(size, f"is {found}, but only {supported} is supported")
        if not weights.boolean("symmetric", default=True):
            weights.refuse("symmetric", "is false, but only true is supported")
    return ExpertFormat.MXFP4


def _check_groups_of_32(text: ConfigKeys, moe: MoeConfig) -> None:
    latent_key = "routed_expert_hidden_size" if moe.has_latent else "hidden_size"
    for key, size in (("moe_intermediate_size", moe.inner), (latent_key, moe.latent)):
        if size % MXFP4_GROUP:
            text.refuse(key, f"is {size}, but {ExpertFormat.MXFP4.value} experts need a multiple of {MXFP4_GROUP}")


def _bos_id(top: ConfigKeys, text: ConfigKeys, vocab_size: int) -> int | None:
    keys = text if text.has("bos_token_id") else top
    return keys.integer("bos_token_id", low=0, high=vocab_size - 1) if keys.has("bos_token_id") else None


def _eos_ids(top: ConfigKeys, text: ConfigKeys, vocab_size: int) -> tuple[int, ...]:
    key = "eos_token_id"
    keys = text if text.has(key) else top
    if not keys.has(key):
        return ()
    if isinstance(keys.value(key), list):
        return tuple(dict.fromkeys(keys.integers(key, low=0, high=vocab_size - 1)))
    return (keys.integer(key, low=0, high=vocab_size - 1),)


def _weight_dtype(top: ConfigKeys, text: ConfigKeys) -> str:
    for keys in (text, top):
        for key in ("dtype", "torch_dtype"):
            if keys.has(key):
                return "F32" if keys.value(key) == "float32" else "BF16"
    return "BF16"
