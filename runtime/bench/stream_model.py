"""The model `serai bench experts` streams: Kimi Linear's 48B sizes in K3's layout, packed, with random weights.

All routed experts hold the same bytes. Speed depends on no value; and so a step whose experts are aliased onto a few
resident ones computes the same numbers, and routes alike: what the step costs without its disk can be measured.

Files are written one at a time and get their names when they are whole, so making one goes on where it was stopped.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout, pack_expert
from serai.kernels.matrix import Format
from serai.runtime.bench.mid import MID_K3, mid_tensor, with_layers
from serai.runtime.bench.random_weights import random_tensor
from serai.runtime.bench.report import BenchFailed
from serai.runtime.bench.tiny import TinyModel
from serai.runtime.bench.write_checkpoint import StoredTensor as TensorType
from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.pack_files import Piece, PlannedFile, StoredTensor, write_whole
from serai.runtime.experts.packed_format import (
    AS_STORED,
    CHECKSUM_BYTES,
    FORMAT,
    MANIFEST_NAME,
    Manifest,
    checksums_name,
    layer_file,
    layout_text,
    records_name,
)
from serai.runtime.models.config import ModelConfig, MoeConfig, parse_config
from serai.runtime.models.safetensors_files import INDEX_NAME
from serai.runtime.models.tensor_table import TensorRole, expert_layers, expert_tensors, trunk_tensors

RECIPE = 1
"""Part of a model's folder name; goes up when the same fields begin to give other files."""

SPARE_BYTES = 2 << 30
"""Left free on the disk."""

_TRUNK_FILE_BYTES = 1 << 30

K3_48B = replace(
    MID_K3,
    layers=27,
    attention_layers=(4, 8, 12, 16, 20, 24, 27),
    kda_heads=32,
    heads=32,
    experts=256,
    expert_inner=2048,
    shared_experts=1,
    residual_block=12,
)
"""Kimi-Linear-48B's sizes, 256 experts of 3.8 MB in 26 layers, in K3's layout: 30 GB."""


@dataclass(frozen=True, slots=True)
class StreamModel:
    """A written model. `scale` is its share of the bytes of the shape it was cut from."""

    folder: Path
    shape: TinyModel
    nbytes: int
    scale: float


def packed_bytes(shape: TinyModel) -> int:
    """Bytes of its packed files."""
    return sum(file.nbytes for file in _Writer(shape, 0).files())


def fewer_layers(shape: TinyModel) -> Iterator[TinyModel]:
    """The shape, then its first layers, one fewer at a time, down to four."""
    return (with_layers(shape, layers, shape.vocab) for layers in range(shape.layers, 3, -1))


def cached_stream_model(
    folder: Path, shapes: Iterable[TinyModel], tell: Callable[[str], None], *, seed: int = 0
) -> StreamModel:
    """The first of the shapes that the disk has room for, below `folder`: what is missing of it is written now.

    Raises `BenchFailed` when none fits.
    """
    whole: TinyModel | None = None
    free = shutil.disk_usage(folder).free - SPARE_BYTES
    for shape in shapes:
        whole = whole or shape
        writer = _Writer(shape, seed)
        kept = folder / f"stream-{writer.recipe.hexdigest(length=6)}"
        files = list(writer.files())
        missing = [file for file in files if not file.is_whole_in(kept)]
        if sum(file.nbytes for file in missing) <= free:
            break
    else:
        raise BenchFailed(
            f"the smallest model takes {packed_bytes(shape):,} bytes in {folder}, which has {free:,} to spare; name "
            "another --dir"
        )
    kept.mkdir(exist_ok=True)
    for number, file in enumerate(missing, start=1):
        tell(f"writing the model, file {number} of {len(missing)}")
        write_whole(kept, file.name, file.pieces())
    writer.finish(kept, files)
    nbytes = sum(file.nbytes for file in files)
    return StreamModel(kept, shape, nbytes, nbytes / packed_bytes(whole))


class _Writer:
    """Plans a model's files and gives their bytes."""

    def __init__(self, shape: TinyModel, seed: int) -> None:
        self._shape, self._seed = shape, seed
        self._described = shape.config()
        self._config: ModelConfig = parse_config(self._described)
        if self._config.moe is None:
            raise ValueError("a model without experts has none to stream")
        self._moe: MoeConfig = self._config.moe
        self._layout = ExpertLayout(Format.MXFP4, self._moe.latent, self._moe.inner)
        self.recipe = blake3(repr((RECIPE, shape, seed)).encode())

    def files(self) -> Iterator[PlannedFile]:
        prefix = self._config.tensor_prefix
        runs: list[list[tuple[StoredTensor, TensorType, TensorRole]]] = [[]]
        for name, spec in trunk_tensors(self._config).items():
            kind = TensorType(spec.usual_dtype, spec.shape)
            if sum(tensor.nbytes for tensor, _, _ in runs[-1]) + kind.nbytes > _TRUNK_FILE_BYTES and runs[-1]:
                runs.append([])
            runs[-1].append((StoredTensor(prefix + name, kind.dtype, kind.shape, kind.nbytes), kind, spec.role))
        for number, run in enumerate(runs, start=1):
            yield PlannedFile(f"trunk-{number:05d}.safetensors", [one for one, _, _ in run], partial(self._trunk, run))
        for layer in expert_layers(self._config):
            count, size = self._moe.experts, self._layout.record_bytes
            tensors = (
                StoredTensor(records_name(prefix, layer), "U8", (count, size), count * size),
                StoredTensor(checksums_name(prefix, layer), "U8", (count, CHECKSUM_BYTES), count * CHECKSUM_BYTES),
            )
            yield PlannedFile(layer_file(layer), tensors, self._records)

    def finish(self, folder: Path, files: Sequence[PlannedFile]) -> None:
        """The index, the configuration and the manifest."""
        text = layout_text(self._layout.format, self._layout.latent, self._layout.inner)
        weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
        documents = {
            INDEX_NAME: {"metadata": {}, "weight_map": weight_map},
            "config.json": self._described,
            MANIFEST_NAME: Manifest(
                FORMAT, AS_STORED, text, self._layout.record_bytes, self.recipe.hexdigest()
            ).to_json(),
        }
        for name, values in documents.items():
            write_whole(folder, name, [json.dumps(values, indent=1).encode() + b"\n"])

    def _trunk(self, run: Sequence[tuple[StoredTensor, TensorType, TensorRole]]) -> Iterator[Piece]:
        for tensor, kind, role in run:
            yield mid_tensor(tensor.name, kind, role, self._shape.kda_heads, self._seed).tobytes()

    def _records(self) -> Iterator[Piece]:
        record = self._record()
        for _ in range(self._moe.experts):
            yield record.data
        yield blake3(record.data).digest() * self._moe.experts

    def _record(self) -> NDArray[np.uint8]:
        parts: dict[str, NDArray[Any]] = {
            name: random_tensor(name, TensorType(spec.usual_dtype, spec.shape), spec.role, 0, self._seed)
            for name, spec in expert_tensors(self._config).items()
        }
        w1, w3, w2 = ((parts[f"{one}.weight_packed"], parts[f"{one}.weight_scale"]) for one in ("w1", "w3", "w2"))
        record = aligned_bytes(self._layout.record_bytes)
        pack_expert(self._layout, w1, w3, w2, record)
        return record
