"""A model's tensors as Hugging Face keeps them: one safetensors file, or several shards with an index.

Values are made one tensor at a time while the file is written, so a checkpoint larger than memory can be made.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.safetensors_files import INDEX_NAME

SINGLE_SHARD_NAME = "model.safetensors"
_ALIGNMENT_BYTES = 8
"""The data begins at a multiple of this, as the safetensors library writes it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file: its safetensors element type ("BF16", "F32", "U8") and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * STORAGE[self.dtype].itemsize


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    make: Callable[[str, StoredTensor], NDArray[Any]],
    *,
    shards: int = 1,
) -> int:
    """Write every tensor into `folder`, which exists, and give the bytes written.

    `make(name, tensor)` gives the values as stored: shape `tensor.shape`, BF16 as its bits in uint16. The tensors are
    cut into `shards` runs of about equal size, in the mapping's order.
    """
    runs = _runs(tensors, shards)
    files = (
        [SINGLE_SHARD_NAME]
        if len(runs) == 1
        else [f"model-{number:05}-of-{len(runs):05}.safetensors" for number in range(1, len(runs) + 1)]
    )
    written = 0
    for file, names in zip(files, runs, strict=True):
        written += _write_shard(folder / file, {name: tensors[name] for name in names}, make)
    if len(runs) > 1:
        weight_map = {name: file for file, names in zip(files, runs, strict=True) for name in names}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        written += (folder / INDEX_NAME).write_text(index, encoding="utf-8")
    return written


def _runs(tensors: Mapping[str, StoredTensor], shards: int) -> list[Sequence[str]]:
    """The names in at most `shards` runs, none of them empty."""
    share = max(1, -(-sum(tensor.nbytes for tensor in tensors.values()) // shards))
    runs: list[list[str]] = [[]]
    before = 0
    for name, tensor in tensors.items():
        if before >= share * len(runs) and runs[-1]:
            runs.append([])
        runs[-1].append(name)
        before += tensor.nbytes
    return [tuple(run) for run in runs]


def _write_shard(
    path: Path, tensors: Mapping[str, StoredTensor], make: Callable[[str, StoredTensor], NDArray[Any]]
) -> int:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors.items():
            values = make(name, tensor)
            if values.shape != tensor.shape or values.dtype != STORAGE[tensor.dtype]:
                raise ValueError(
                    f"{name} was made as {values.dtype} {values.shape}, not as {tensor.dtype} {tensor.shape}"
                )
            file.write(values.tobytes())
        return file.tell()
