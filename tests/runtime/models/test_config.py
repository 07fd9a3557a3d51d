"""config.json of both families: what is read, and what is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.errors import ConfigInvalid
from serai.runtime.models.config import (
    Activation,
    ActivationKind,
    ExpertFormat,
    LayerKind,
    ModelFamily,
    load_config,
    parse_config,
)
from tests.runtime.models.small_checkpoints import DATA, changed, k3_raw, linear_raw, mxfp4
from tests.shared import shared


def test_the_published_k3_configuration_is_read_whole() -> None:
    config = load_config(DATA / "kimi-k3-config.json")
    assert config.family is ModelFamily.KIMI_K3
    assert config.tensor_prefix == "language_model."
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (7168, 93, 163_840)
    assert (config.kda_layers, config.mla_layers, config.moe_layers) == (69, 24, 92)
    mla = [layer for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.MLA]
    assert mla == [*range(3, 92, 4), 92], "the file counts layers from 1, we from 0"
    assert config.layer_is_moe == (False,) + (True,) * 92
    assert config.activation == Activation(ActivationKind.SITU, 4.0, 25.0)
    assert config.attn_res_block_size == 12
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert (config.kda.heads, config.kda.head_dim, config.kda.width) == (96, 128, 12_288)
    assert (config.kda.gate_lower_bound, config.kda.full_rank_gate) == (-5.0, True)
    assert (config.mla.q_lora_rank, config.mla.kv_lora_rank, config.mla.output_gate) == (1536, 512, True)
    assert (config.mla.query_dim, config.mla.latent_width) == (192, 576)
    moe = config.moe
    assert moe is not None
    assert (moe.experts, moe.experts_per_token, moe.shared_inner) == (896, 16, 6144)
    assert (moe.latent, moe.has_latent, moe.latent_norm) == (3584, True, True)
    assert config.expert_format is ExpertFormat.MXFP4
    assert (config.bos_id, config.eos_ids) == (163_584, (163_586,))
    assert not config.tie_word_embeddings
    assert config.max_positions == 1_048_576


def test_the_published_kimi_linear_configuration_is_read_whole() -> None:
    config = load_config(DATA / "kimi-linear-48b-config.json")
    assert config.family is ModelFamily.KIMI_LINEAR
    assert config.tensor_prefix == ""
    assert (config.kda_layers, config.mla_layers, config.moe_layers) == (20, 7, 26)
    assert config.activation == Activation(ActivationKind.SILU)
    assert config.attn_res_block_size == 0
    assert (config.kda.gate_lower_bound, config.kda.full_rank_gate) == (None, False)
    assert (config.mla.q_lora_rank, config.mla.output_gate) == (None, False)
    moe = config.moe
    assert moe is not None
    assert (moe.latent, moe.has_latent, moe.latent_norm, moe.scaling) == (2304, False, False, 2.446)
    assert config.expert_format is ExpertFormat.PLAIN
    assert (config.bos_id, config.eos_ids) == (None, ())


@pytest.mark.parametrize("name", ["kimi-k3-config.json", "kimi-linear-48b-config.json"])
def test_the_fixtures_are_the_shared_facts(name: str) -> None:
    assert (DATA / name).read_bytes() == shared("facts", name).read_bytes()


@pytest.mark.parametrize("name", ["kimi_linear_f32", "kimi_linear_bf16", "kimi_k3_f32", "kimi_k3_mxfp4"])
def test_the_oracle_configurations_are_read(name: str) -> None:
    folder = shared("oracle", name)
    assert load_config(folder) == load_config(folder / "config.json")


def test_quantisation_is_found_at_either_level() -> None:
    inner = k3_raw()
    outer = changed(inner, "text_config.quantization_config", ...)
    assert parse_config(outer).expert_format is ExpertFormat.PLAIN
    outer["quantization_config"] = mxfp4()
    assert parse_config(outer).expert_format is ExpertFormat.MXFP4
    both = {**inner, "quantization_config": mxfp4()}
    assert parse_config(both).expert_format is ExpertFormat.MXFP4
    both["quantization_config"] = changed(mxfp4(), "format", "pack-quantized")
    with pytest.raises(ConfigInvalid, match="quantization_config says something else than the one in text_config"):
        parse_config(both)


def test_special_tokens_and_tying_may_stand_at_either_level() -> None:
    raw = k3_raw()
    assert (parse_config(raw).bos_id, parse_config(raw).eos_ids) == (1, (2, 3))
    raw["text_config"].update(bos_token_id=5, eos_token_id=6, tie_word_embeddings=True)
    config = parse_config(raw)
    assert (config.bos_id, config.eos_ids, config.tie_word_embeddings) == (5, (6,), True)
    raw = changed(raw, "text_config.tie_word_embeddings", ...)
    assert not parse_config(raw).tie_word_embeddings
    assert parse_config({**raw, "tie_word_embeddings": True}).tie_word_embeddings


def test_layers_without_experts_are_dense() -> None:
    assert parse_config(changed(linear_raw(), "num_experts", None)).moe is None
    assert parse_config(changed(linear_raw(), "first_k_dense_replace", 2)).moe is None
    config = parse_config(changed(linear_raw(), "first_k_dense_replace", 0))
    assert config.layer_is_moe == (True, True)
    raw = changed(changed(linear_raw(), "first_k_dense_replace", 0), "moe_layer_freq", 2)
    assert parse_config(raw).layer_is_moe == (True, False)


def test_the_eps_of_the_latent_norms_is_a_knob() -> None:
    assert parse_config(changed(linear_raw(), "latent_norm_eps", 1e-5)).latent_norm_eps == 1e-5


def test_the_canonical_text_depends_on_content_alone() -> None:
    raw = linear_raw()
    backwards = dict(reversed(list(raw.items())))
    assert parse_config(raw).raw == parse_config(backwards).raw
    assert json.loads(parse_config(raw).raw) == raw
    assert parse_config(raw).raw != parse_config(changed(raw, "eos_token_id", 3)).raw


REFUSED_LINEAR: list[tuple[str, object, str]] = [
    ("model_type", "llama", "model_type is 'llama', but must be 'kimi_linear' or 'kimi_k3'"),
    ("model_type", ..., "model_type is missing"),
    ("model_type", 3, "model_type is 3"),
    ("hidden_act", "gelu", "hidden_act is 'gelu', but must be 'silu' or 'situ'"),
    ("hidden_act", "situ", "activation_situ_beta is missing"),
    ("moe_router_activation_func", "softmax", "moe_router_activation_func is 'softmax', but must be 'sigmoid'"),
    ("topk_method", "greedy", "topk_method is 'greedy', but must be 'noaux_tc'"),
    ("mla_use_nope", False, r"mla_use_nope is false, but only true \(no rotation\) is supported"),
    ("mla_use_nope", ..., "mla_use_nope is missing, but only true"),
    ("num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1, but only 0"),
    ("num_key_value_heads", 1, "num_key_value_heads is 1, but latent attention has as many as num_attention_heads"),
    ("linear_attn_config.short_conv_kernel_size", 3, "linear_attn_config.short_conv_kernel_size is 3, but only 4"),
    ("linear_attn_config.gate_lower_bound", 5.0, "linear_attn_config.gate_lower_bound is 5.0, but must be .* below"),
    ("linear_attn_config.kda_layers", [1, 2], "full_attn_layers holds layer 2 again"),
    ("linear_attn_config.kda_layers", [1, 1], "kda_layers holds layer 1 again"),
    ("linear_attn_config.kda_layers", [], "kda_layers and full_attn_layers both lack layer 1"),
    ("linear_attn_config.kda_layers", [0], "kda_layers holds 0, but must be a list of whole numbers from 1 to 2"),
    ("linear_attn_config.kda_layers", [3], "kda_layers holds 3, but must be a list of whole numbers from 1 to 2"),
    ("linear_attn_config.kda_layers", "1", "linear_attn_config.kda_layers is '1', but must be a list"),
    ("linear_attn_config", ..., "linear_attn_config is missing; it must be an object"),
    ("linear_attn_config", [1], r"linear_attn_config is \[1\], but must be an object"),
    ("hidden_size", "64", "hidden_size is '64', but must be a whole number from 1"),
    ("hidden_size", -64, "hidden_size is -64, but must be a whole number from 1"),
    ("hidden_size", 64.0, "hidden_size is 64.0, but must be a whole number"),
    ("hidden_size", True, "hidden_size is true, but must be a whole number"),
    ("hidden_size", 10**40, "hidden_size is 1000.*, but must be a whole number"),
    ("hidden_size", ..., "hidden_size is missing; it must be a whole number"),
    ("vocab_size", None, "vocab_size is missing"),
    ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, but must be a whole number from 1 to 4,096"),
    ("num_experts", 10**9, "num_experts is 1000000000, but must be a whole number from 1 to 65,536"),
    ("num_experts_per_token", 5, "num_experts_per_token is 5, but must be a whole number from 1 to 4"),
    ("num_expert_group", 3, "num_expert_group is 3, which does not divide num_experts, 4"),
    ("topk_group", 2, r"topk_group is 2, but there are only 1 groups"),
    ("rms_norm_eps", 0, "rms_norm_eps is 0, but must be a finite number above zero"),
    ("rms_norm_eps", 10**400, "rms_norm_eps is 1000.*, but must be a finite number above zero"),
    ("rms_norm_eps", float("inf"), "rms_norm_eps is inf, but must be a finite number above zero"),
    ("moe_renormalize", 1, "moe_renormalize is 1, but must be true or false"),
    ("eos_token_id", 128, "eos_token_id is 128, but must be a whole number from 0 to 127"),
    ("eos_token_id", [2, "3"], "eos_token_id holds '3'"),
    ("bos_token_id", -1, "bos_token_id is -1"),
    ("max_position_embeddings", ..., "model_max_length is missing"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), REFUSED_LINEAR)
def test_a_key_that_cannot_be_run_is_refused_by_name(path: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^config\.json: .*{sentence}"):
        parse_config(changed(linear_raw(), path, value))


REFUSED_K3: list[tuple[str, object, str]] = [
    ("text_config", ..., "text_config is missing; it must be an object"),
    ("text_config.model_type", "llama", "text_config.model_type is 'llama', but must be 'kimi_linear'"),
    ("text_config.quantization_config.quant_method", "gptq", "quant_method is 'gptq'"),
    ("text_config.quantization_config.format", "nvfp4", "format is 'nvfp4', but must be 'mxfp4-pack-quantized'"),
    ("text_config.quantization_config.config_groups", {}, "config_groups is empty"),
    ("text_config.quantization_config.config_groups.group_0.weights.group_size", 16, "group_size is 16, but only 32"),
    ("text_config.quantization_config.config_groups.group_0.weights.num_bits", 8, "num_bits is 8, but only 4"),
    ("text_config.quantization_config.config_groups.group_0.weights.type", "int", "type is 'int', but must be 'float'"),
    ("text_config.quantization_config.config_groups.group_0.weights.symmetric", False, "symmetric is false"),
    ("text_config.moe_intermediate_size", 48, "moe_intermediate_size is 48, but .* need a multiple of 32"),
    ("text_config.routed_expert_hidden_size", 48, "routed_expert_hidden_size is 48, but .* need a multiple of 32"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), REFUSED_K3)
def test_a_nested_key_is_refused_by_its_whole_name(path: str, value: object, sentence: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^config\.json: (?=text_config).*{sentence}"):
        parse_config(changed(k3_raw(), path, value))


def test_grouped_routing_is_checked_against_the_number_of_experts() -> None:
    raw: dict[str, Any] = {**linear_raw(), "num_experts": 8, "num_expert_group": 4, "topk_group": 2}
    moe = parse_config(raw).moe
    assert moe is not None
    assert (moe.n_group, moe.topk_group) == (4, 2)
    with pytest.raises(ConfigInvalid, match="num_experts_per_token is 5, but the 2 kept groups hold 4 experts"):
        parse_config({**raw, "num_experts_per_token": 5})
    with pytest.raises(ConfigInvalid, match="use_grouped_topk is false"):
        parse_config({**raw, "use_grouped_topk": False})
    with pytest.raises(ConfigInvalid, match="num_expert_group leaves one expert a group"):
        parse_config({**raw, "num_expert_group": 8})


def test_a_file_that_is_no_configuration_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"config\.json can't be read \(No such file"):
        load_config(tmp_path)
    file = tmp_path / "config.json"
    for content, sentence in (
        (b"{", "is not valid JSON"),
        (b"[]", "holds a JSON array where an object is due"),
        (b'{"a": 1, "a": 2}', "holds the key 'a' twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b"\xff{}", "is not UTF-8 text"),
        (b"[" * 100_000, "nests brackets too deeply"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigInvalid, match=rf"config\.json {sentence}"):
            load_config(tmp_path)
