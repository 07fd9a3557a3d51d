"""The table of expected tensors, against the published checkpoints and the oracle files, and how it refuses others."""

import json
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.config import load_config, parse_config
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_check import check_tensors
from serai.runtime.models.tensor_table import (
    TensorRole,
    decay_per_head,
    expected_tensors,
    find_prefix,
    head_name,
    trunk_tensors,
)
from tests.runtime.models.small_checkpoints import (
    DATA,
    Tensors,
    changed,
    k3_raw,
    linear_raw,
    random_tensors,
    write_checkpoint,
    write_tensors,
)
from tests.shared import shared

ONE = "model.safetensors"
EXPERT = "model.layers.1.block_sparse_moe.experts."


def test_k3_has_the_published_tensors() -> None:
    started = time.perf_counter()
    table = expected_tensors(load_config(DATA / "kimi-k3-config.json"))
    assert time.perf_counter() - started < 5
    assert len(table) == 497_220 - 168, "the published count, less the vision tower and projector"
    layer = "language_model.model.layers."
    shapes = {
        "language_model.model.embed_tokens.weight": (163_840, 7168),
        "language_model.lm_head.weight": (163_840, 7168),
        layer + "0.self_attn.g_proj.weight": (12_288, 7168),
        layer + "0.self_attn.q_conv1d.weight": (12_288, 1, 4),
        layer + "0.self_attn.A_log": (96,),
        layer + "0.self_attn.f_b_proj.weight": (12_288, 128),
        layer + "0.self_attn.b_proj.weight": (96, 7168),
        layer + "0.mlp.gate_proj.weight": (33_792, 7168),
        layer + "3.self_attn.q_b_proj.weight": (18_432, 1536),
        layer + "3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        layer + "3.self_attn.kv_b_proj.weight": (24_576, 512),
        layer + "92.self_attn.g_proj.weight": (12_288, 7168),
        layer + "92.mlp_res_proj.weight": (1, 7168),
        layer + "1.block_sparse_moe.gate.weight": (896, 7168),
        layer + "1.block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
        layer + "1.block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
        layer + "1.block_sparse_moe.experts.895.w1.weight_packed": (3072, 1792),
        layer + "1.block_sparse_moe.experts.895.w3.weight_scale": (3072, 112),
        layer + "92.block_sparse_moe.experts.0.w2.weight_packed": (3584, 1536),
        layer + "92.block_sparse_moe.experts.0.w2.weight_scale": (3584, 96),
        "language_model.model.output_attn_res_proj.weight": (1, 7168),
    }
    assert {name: table[name].shape for name in shapes} == shapes
    specs = {id(spec) for spec in table.values() if spec.role is TensorRole.EXPERT}
    assert len(specs) == 6, "half a million names share their specs"


def test_kimi_linear_has_the_published_tensors() -> None:
    table = expected_tensors(load_config(DATA / "kimi-linear-48b-config.json"))
    assert len(table) == 20_493
    layer = "model.layers."
    shapes = {
        layer + "0.self_attn.g_a_proj.weight": (128, 2304),
        layer + "0.self_attn.g_b_proj.weight": (4096, 128),
        layer + "0.self_attn.A_log": (32,),
        layer + "3.self_attn.q_proj.weight": (6144, 2304),
        layer + "26.self_attn.kv_b_proj.weight": (8192, 512),
        layer + "26.block_sparse_moe.experts.255.w1.weight": (1024, 2304),
        layer + "26.block_sparse_moe.experts.255.w2.weight": (2304, 1024),
        "model.norm.weight": (2304,),
    }
    assert {name: table[name].shape for name in shapes} == shapes


@pytest.mark.parametrize("name", ["kimi_linear_f32", "kimi_linear_bf16", "kimi_k3_f32", "kimi_k3_mxfp4"])
def test_the_oracle_checkpoints_fit_the_table(name: str) -> None:
    folder = shared("oracle", name)
    with CheckpointFiles.open(folder) as files:
        assert check_tensors(load_config(folder), files).keys() == files.tensors.keys()


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("raw", [linear_raw(), k3_raw()], ids=["kimi_linear", "kimi_k3"])
def test_a_checkpoint_made_from_the_table_fits_it(tmp_path: Path, raw: dict[str, object], shards: int) -> None:
    config = write_checkpoint(tmp_path, raw, shards=shards)
    with CheckpointFiles.open(tmp_path) as files:
        assert check_tensors(config, files).keys() == files.tensors.keys()
        assert len(files.file_names) == shards


@pytest.mark.parametrize("prefix", ["", "language_model."])
@pytest.mark.parametrize("raw", [linear_raw(), k3_raw()], ids=["kimi_linear", "kimi_k3"])
def test_either_prefix_is_found(tmp_path: Path, raw: dict[str, object], prefix: str) -> None:
    config = write_checkpoint(tmp_path, raw, prefix=prefix)
    with CheckpointFiles.open(tmp_path) as files:
        assert find_prefix(config, files.tensors) == prefix
        assert all(name.startswith(prefix + "model.") or name == prefix + "lm_head.weight" for name in files.tensors)
        check_tensors(config, files)


def test_without_an_embedding_the_prefix_is_the_familys() -> None:
    assert find_prefix(parse_config(k3_raw()), ()) == "language_model."
    assert find_prefix(parse_config(linear_raw()), ()) == ""


def linear_tensors() -> Tensors:
    return random_tensors(parse_config(linear_raw()))


def check(folder: Path, tensors: Tensors, raw: dict[str, object] | None = None) -> None:
    write_tensors(folder / ONE, tensors)
    with CheckpointFiles.open(folder) as files:
        check_tensors(parse_config(raw or linear_raw()), files)


def refused(folder: Path, tensors: Tensors, sentence: str, raw: dict[str, object] | None = None) -> None:
    with pytest.raises(WeightsInvalid, match=sentence):
        check(folder, tensors, raw)


def test_a_missing_tensor_is_named_with_the_files_searched(tmp_path: Path) -> None:
    """B16: required by config but absent from all shards."""
    tensors = linear_tensors()
    del tensors["model.layers.1.self_attn.kv_b_proj.weight"]
    refused(
        tmp_path,
        tensors,
        r"lacks tensor 'model\.layers\.1\.self_attn\.kv_b_proj\.weight', which config\.json calls for; "
        r"looked in 'model\.safetensors'",
    )


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    refused(tmp_path, {"model.other": ("F32", np.zeros(1, np.float32))}, r"and \d+ more, which .* holds tensor 'model")


def test_an_extra_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    tensors = linear_tensors()
    tensors["model.layers.0.self_attn.q_proj.bias"] = ("F32", np.zeros(32, np.float32))
    sentence = r"holds tensor 'model\.layers\.0\.self_attn\.q_proj\.bias' \(in model\.safetensors\), for which"
    refused(tmp_path, tensors, sentence)


def test_a_tensor_of_another_layer_kind_is_no_match(tmp_path: Path) -> None:
    tensors = linear_tensors()
    raw = changed(linear_raw(), "linear_attn_config.kda_layers", [2])
    raw["linear_attn_config"]["full_attn_layers"] = [1]
    refused(tmp_path, tensors, r"lacks tensor 'model\.layers\.0\.self_attn\.q_proj|lacks tensor", raw)


def test_a_mis_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = linear_tensors()
    tensors["model.norm.weight"] = ("BF16", np.zeros(63, np.uint16))
    sentence = r"tensor 'model\.norm\.weight' in model\.safetensors is \[63\], but config\.json makes it \[64\]$"
    refused(tmp_path, tensors, sentence)
    tensors["lm_head.weight"] = ("BF16", np.zeros((64, 128), np.uint16))
    refused(tmp_path, tensors, r"is \[63\], .* \(1 more tensors don't fit either\)")


def test_a_tensor_of_another_element_type_is_refused(tmp_path: Path) -> None:
    tensors = linear_tensors()
    tensors["model.norm.weight"] = ("F16", np.zeros(64, np.float16))
    refused(tmp_path, tensors, r"'model\.norm\.weight' in model\.safetensors is F16, but must be BF16 or F32")


def test_experts_of_two_element_types_are_refused(tmp_path: Path) -> None:
    tensors = linear_tensors()
    name = f"{EXPERT}3.w2.weight"
    tensors[name] = ("F32", np.zeros(tensors[name][1].shape, np.float32))
    refused(tmp_path, tensors, rf"'{re.escape(name)}' in model\.safetensors is F32 where .* is BF16; all routed")


def test_packed_experts_are_called_for_when_the_configuration_says_so(tmp_path: Path) -> None:
    raw = {**linear_raw(), "quantization_config": k3_raw()["text_config"]["quantization_config"]}
    refused(tmp_path, linear_tensors(), rf"lacks tensor '{re.escape(EXPERT)}0\.w1\.weight_packed'", raw)


def test_scales_may_be_named_for_what_they_are(tmp_path: Path) -> None:
    raw = k3_raw()
    tensors = random_tensors(parse_config(raw))
    for name, (_, array) in list(tensors.items()):
        if name.endswith("weight_scale"):
            tensors[name] = ("F8_E8M0", array)
    check(tmp_path, tensors, raw)


def test_vision_tensors_are_passed_over(tmp_path: Path) -> None:
    raw = k3_raw()
    tensors = random_tensors(parse_config(raw))
    tensors["vision_tower.patch_embed.proj.weight"] = ("F32", np.zeros(3, np.float32))
    tensors["mm_projector.proj.0.weight"] = ("F32", np.zeros(3, np.float32))
    write_tensors(tmp_path / ONE, tensors)
    with CheckpointFiles.open(tmp_path) as files:
        assert not any("vision" in name or "projector" in name for name in check_tensors(parse_config(raw), files))


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """B26."""
    tensors = linear_tensors()
    tied = changed(linear_raw(), "tie_word_embeddings", True)
    check(tmp_path, tensors, tied)
    del tensors["lm_head.weight"]
    check(tmp_path, tensors, tied)
    refused(tmp_path, tensors, r"lacks tensor 'lm_head\.weight', which config\.json calls for")
    assert head_name(parse_config(tied)) == "model.embed_tokens.weight"
    assert head_name(parse_config(linear_raw())) == "lm_head.weight"
    assert "lm_head.weight" not in trunk_tensors(parse_config(tied))


@pytest.mark.parametrize("shape", [(2,), (8,), (1, 1, 2, 1), (1, 1, 8, 1), (1, 8)])
def test_a_log_is_read_from_every_stored_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = linear_tensors()
    name = "model.layers.0.self_attn.A_log"
    values = np.zeros(shape, np.float32)
    values.reshape(-1)[:2] = (1.5, 2.5)
    tensors[name] = ("F32", values)
    check(tmp_path, tensors)
    with CheckpointFiles.open(tmp_path) as files:
        heads = decay_per_head(files.read_float32(name), 2)
    assert heads.tolist() == [1.5, 2.5]
    assert heads.shape == (2,)


@pytest.mark.parametrize("shape", [(1,), (), (2, 2), (1, 1, 1, 1)])
def test_a_log_with_fewer_numbers_than_heads_or_more_axes_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors = linear_tensors()
    tensors["model.layers.0.self_attn.A_log"] = ("F32", np.zeros(shape, np.float32))
    refused(tmp_path, tensors, r"A_log' in model\.safetensors is .*, but config\.json makes it \[2\] \(or padded")


def test_the_check_reads_no_data(tmp_path: Path) -> None:
    config = write_checkpoint(tmp_path, k3_raw())
    with CheckpointFiles.open(tmp_path) as files:
        (tmp_path / ONE).write_bytes(b"")
        check_tensors(config, files)


def test_a_tenth_of_k3s_tensors_are_read_and_checked_in_seconds(tmp_path: Path) -> None:
    """The real K3's first ten layers by name and shape over several shards; sparse files stand for the data."""
    raw = json.loads((DATA / "kimi-k3-config.json").read_bytes())
    raw["text_config"]["num_hidden_layers"] = 10
    for key, layers in raw["text_config"]["linear_attn_config"].items():
        if key.endswith("_layers"):
            raw["text_config"]["linear_attn_config"][key] = [layer for layer in layers if layer <= 10]
    config = parse_config(raw)
    table = list(expected_tensors(config).items())
    weight_map: dict[str, str] = {}
    for shard in range(4):
        header, end, part = {}, 0, table[shard::4]
        for name, spec in part:
            nbytes = math.prod(spec.shape) * STORAGE[spec.usual_dtype].itemsize
            header[name] = {"dtype": spec.usual_dtype, "shape": spec.shape, "data_offsets": [end, end + nbytes]}
            end += nbytes
        file = f"shard-{shard}.safetensors"
        text = json.dumps(header).encode()
        with (tmp_path / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + end)
        weight_map.update(dict.fromkeys((name for name, _ in part), file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    started = time.perf_counter()
    with CheckpointFiles.open(tmp_path) as files:
        assert len(check_tensors(config, files)) > 48_000
    assert time.perf_counter() - started < 10
