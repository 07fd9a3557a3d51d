"""Small checkpoints to pack and to read experts from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import pack_expert
from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, ExpertType, TinyModel, write_tiny_model
from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.source import ExpertSource, expert_layout
from serai.runtime.models.config import ExpertFormat, ModelConfig, load_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_table import expert_stem, find_prefix


def _small(model: TinyModel) -> TinyModel:
    return replace(model, layers=3, attention_layers=(2,), experts=5, experts_per_token=2, vocab=96)


K3 = _small(TINY_K3)
LINEAR = _small(TINY_LINEAR)
LINEAR_F32 = replace(LINEAR, trunk_type="F32", expert_type=ExpertType.F32)
MODELS = {"k3": K3, "linear": LINEAR, "linear-f32": LINEAR_F32}


@dataclass(frozen=True)
class Opened:
    """A checkpoint that was opened."""

    folder: Path
    config: ModelConfig
    files: CheckpointFiles
    prefix: str


@contextmanager
def opened(folder: Path) -> Iterator[Opened]:
    config = load_config(folder)
    with CheckpointFiles.open(folder) as files:
        yield Opened(folder, config, files, find_prefix(config, files.tensors))


def written(folder: Path, model: TinyModel, shards: int = 1) -> Path:
    write_tiny_model(folder, model, shards=shards)
    return folder


def record_by_hand(model: Opened, layer: int, expert: int) -> NDArray[np.uint8]:
    """An expert's record from tensors read whole."""
    layout = expert_layout(model.config, model.files, model.prefix)
    stem = model.prefix + expert_stem(layer, expert)
    matrices: list[Any] = []
    for part in ("w1", "w3", "w2"):
        name = f"{stem}{part}.weight"
        if model.config.expert_format is ExpertFormat.MXFP4:
            matrices.append((model.files.read(name + "_packed"), model.files.read(name + "_scale")))
        else:
            matrices.append(model.files.read(name))
    record = aligned_bytes(layout.record_bytes)
    pack_expert(layout, matrices[0], matrices[1], matrices[2], record)
    return record


def record_of(source: ExpertSource, layer: int, expert: int) -> NDArray[np.uint8]:
    """An expert's record as a source gives it, from buffers full of something else."""
    record, scratch = aligned_bytes(source.record_bytes), aligned_bytes(source.scratch_bytes)
    record[:], scratch[:] = 0xA5, 0x5A
    source.read(layer, expert, record, scratch)
    return record
