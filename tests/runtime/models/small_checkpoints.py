"""Small configurations and checkpoints of both families, and safetensors files written byte by byte."""

import copy
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.models.config import ModelConfig, parse_config
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.tensor_table import expected_tensors

DATA = Path(__file__).resolve().parents[2] / "data"

Tensors = dict[str, tuple[str, NDArray[Any]]]
"""Element type and array (as held in memory) by name."""


def linear_raw() -> dict[str, Any]:
    """A two-layer kimi_linear configuration: KDA with a dense MLP, then MLA with experts."""
    return {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "linear_attn_config": {
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1],
            "full_attn_layers": [2],
        },
    }


def k3_raw() -> dict[str, Any]:
    """The same in the K3 layout: nested, residual mixing, latent MXFP4 experts, bounded and full-rank gates."""
    text = linear_raw()
    del text["bos_token_id"], text["eos_token_id"]
    text.update(
        hidden_act="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        attn_res_block_size=1,
        q_lora_rank=24,
        mla_use_output_gate=True,
        routed_expert_hidden_size=32,
        latent_moe_use_norm=True,
        routed_scaling_factor=1.0,
        num_shared_experts=2,
        quantization_config=mxfp4(),
    )
    text["linear_attn_config"].update(gate_lower_bound=-5.0, use_full_rank_gate=True)
    return {"model_type": "kimi_k3", "bos_token_id": 1, "eos_token_id": [2, 3], "text_config": text}


def mxfp4() -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True},
            }
        },
    }


def changed(raw: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of a configuration with the key at a dotted path replaced, or removed with `...`."""
    result = copy.deepcopy(raw)
    *sections, key = path.split(".")
    inner = result
    for section in sections:
        inner = inner[section]
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    return result


def random_tensors(config: ModelConfig, prefix: str | None = None, seed: int = 7) -> Tensors:
    """Random values for every tensor the configuration calls for, in the published element types."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, spec in expected_tensors(config, prefix).items():
        storage = STORAGE[spec.usual_dtype]
        if storage == np.float32:
            tensors[name] = (spec.usual_dtype, rng.standard_normal(spec.shape, dtype=np.float32))
        else:
            limit = 256 if storage.itemsize == 1 else 0x3F80
            tensors[name] = (spec.usual_dtype, rng.integers(0, limit, spec.shape).astype(storage))
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """A safetensors file of these tensors, in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, end = [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [end, end + len(blob)]}
        data.append(blob)
        end += len(blob)
    write_file(path, json.dumps(header), b"".join(data))


def write_file(path: Path, header: str | bytes, data: bytes, length: int | None = None) -> None:
    """A file with any header text and data; `length` overrides the announced length of the header."""
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def write_checkpoint(folder: Path, raw: dict[str, Any], *, shards: int = 1, prefix: str | None = None) -> ModelConfig:
    """A whole random checkpoint: config.json, and one file or several with an index."""
    config = parse_config(raw)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = random_tensors(config, prefix)
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors)
        return config
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        write_tensors(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    write_index(folder, weight_map)
    return config


def write_index(folder: Path, weight_map: Mapping[str, object]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict(weight_map)}))
