"""Mid-size random checkpoints in Kimi K3's layout, for speed: the layers a small machine can hold, at full ratios.

Large matrices repeat a few million random rows' worth of numbers, so that gigabytes are written as fast as the disk
takes them; speed depends on no value.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.runtime.bench.random_weights import random_tensor
from serai.runtime.bench.report import BenchFailed
from serai.runtime.bench.tiny import ExpertType, TinyModel
from serai.runtime.bench.write_checkpoint import StoredTensor, write_checkpoint
from serai.runtime.models.config import ModelFamily, parse_config
from serai.runtime.models.tensor_table import TensorRole

RECIPE = 1
"""Part of a cached model's folder name; goes up when the same fields begin to give other files."""

SHARD_BYTES = 1 << 30
_DRAWN = 1 << 20
"""Numbers drawn for one tensor; a larger one repeats their rows."""

MID_K3 = TinyModel(
    family=ModelFamily.KIMI_K3,
    vocab=163_840,
    hidden=2304,
    layers=25,
    attention_layers=(4, 8, 12, 16, 20, 24, 25),
    kda_heads=24,
    kda_head_dim=128,
    gate_lower_bound=-5.0,
    full_rank_gate=True,
    heads=24,
    q_lora=768,
    kv_lora=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
    output_gate=True,
    dense_inner=9216,
    experts=64,
    experts_per_token=8,
    expert_inner=1024,
    expert_latent=1152,
    expert_latent_norm=True,
    shared_experts=2,
    situ_beta=4.0,
    situ_linear_beta=25.0,
    residual_block=6,
    expert_type=ExpertType.MXFP4,
    context=1 << 20,
)
"""Kimi K3's layout at Kimi-Linear's width, 25 layers: about 8 GB, BF16 trunk and MXFP4 experts."""


@dataclass(frozen=True, slots=True)
class MidModel:
    """A written model: its folder, its description and the bytes of its weights."""

    folder: Path
    shape: TinyModel
    nbytes: int


def with_layers(shape: TinyModel, layers: int, vocab: int) -> TinyModel:
    """The same model cut to its first layers and to fewer words."""
    kept = tuple(layer for layer in shape.attention_layers if layer <= layers)
    return replace(shape, layers=layers, attention_layers=kept, vocab=vocab)


def narrowed(shape: TinyModel, divisor: int) -> TinyModel:
    """The same model at a fraction of its width: fewer heads and channels, each head and latent as wide as before."""
    if shape.q_lora is None or shape.expert_latent is None:
        raise ValueError("only a model in Kimi K3's layout can be narrowed")
    return replace(
        shape,
        hidden=shape.hidden // divisor,
        kda_heads=shape.kda_heads // divisor,
        heads=shape.heads // divisor,
        q_lora=shape.q_lora // divisor,
        dense_inner=shape.dense_inner // divisor,
        expert_inner=shape.expert_inner // divisor,
        expert_latent=shape.expert_latent // divisor,
    )


def model_bytes(shape: TinyModel) -> int:
    """Bytes of its weights as stored."""
    stored = shape.stored_tensors(parse_config(shape.config()))
    return sum(tensor.nbytes for tensor, _ in stored.values())


def largest_that_fits(room_bytes: int) -> TinyModel:
    """`MID_K3`, or as many of its layers (in fours, the last an MLA layer) as take at most `room_bytes`."""
    choices = [MID_K3, *(with_layers(MID_K3, layers, 32_768) for layers in (24, 16, 8, 4))]
    for shape in choices:
        if model_bytes(shape) <= room_bytes:
            return shape
    raise BenchFailed(
        f"four layers of the mid-size model take {model_bytes(choices[-1]):,} bytes, and {room_bytes:,} are free"
    )


def cached_mid_model(folder: Path, shape: TinyModel, *, seed: int = 0) -> MidModel:
    """The model below `folder`; written now unless an earlier call has. Never half written.

    Raises `BenchFailed` when the disk has no room for it.
    """
    recipe = blake3(repr((RECIPE, shape, seed)).encode()).hexdigest(length=6)
    kept = folder / f"mid-{shape.family.value}-{recipe}"
    nbytes = model_bytes(shape)
    if not kept.is_dir():
        unfinished = kept.with_name(kept.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < nbytes + SHARD_BYTES:
            raise BenchFailed(
                f"the model takes {nbytes:,} bytes in {folder}, where {free:,} are free; name another --dir"
            )
        write_mid_model(unfinished, shape, seed=seed)
        unfinished.rename(kept)
    return MidModel(kept, shape, nbytes)


def write_mid_model(folder: Path, shape: TinyModel, *, seed: int = 0) -> int:
    """Write config.json and the weights; makes `folder`, gives the bytes of weights. There is no tokenizer."""
    folder.mkdir(parents=True)
    described = shape.config()
    stored = shape.stored_tensors(parse_config(described))
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    tensors = {name: tensor for name, (tensor, _) in stored.items()}
    shards = -(-sum(tensor.nbytes for tensor in tensors.values()) // SHARD_BYTES)
    return write_checkpoint(
        folder,
        tensors,
        lambda name, tensor: mid_tensor(name, tensor, stored[name][1], shape.kda_heads, seed),
        shards=shards,
    )


def mid_tensor(name: str, tensor: StoredTensor, role: TensorRole, heads: int, seed: int) -> NDArray[Any]:
    """A tensor's values; of a large matrix only the first rows are drawn, and repeated."""
    if len(tensor.shape) != 2 or np.prod(tensor.shape) <= _DRAWN:
        return random_tensor(name, tensor, role, heads, seed)
    rows, columns = tensor.shape
    drawn = random_tensor(name, StoredTensor(tensor.dtype, (max(1, _DRAWN // columns), columns)), role, heads, seed)
    repeats = -(-rows // len(drawn))
    return np.tile(drawn, (repeats, 1))[:rows]
