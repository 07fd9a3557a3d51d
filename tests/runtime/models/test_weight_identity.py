"""The weight identity tells weights apart and nothing else."""

import os
import shutil
from pathlib import Path

import numpy as np

from serai.runtime.models.config import parse_config
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.weight_identity import SAMPLE_BYTES, weight_identity
from tests.runtime.models.small_checkpoints import k3_raw, random_tensors, write_checkpoint, write_tensors


def identity(folder: Path) -> str:
    with CheckpointFiles.open(folder) as files:
        return weight_identity(files)


def test_paths_times_and_sharding_have_no_part_in_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", k3_raw())
    write_checkpoint(tmp_path / "three", k3_raw(), shards=3)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (0, 0))
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "other.safetensors")
    found = identity(tmp_path / "one")
    assert len(found) == 64
    assert identity(tmp_path / "copy") == identity(tmp_path / "three") == found


def test_a_changed_value_name_shape_or_type_changes_it(tmp_path: Path) -> None:
    tensors = random_tensors(parse_config(k3_raw()))
    seen = set()
    name = "language_model.model.norm.weight"
    dtype, array = tensors[name]
    variants = [
        tensors,
        {**tensors, name: (dtype, array ^ np.uint16(1))},
        {**tensors, name: (dtype, array.reshape(1, -1))},
        {**tensors, name: ("F16", array)},
        {("renamed" if key == name else key): value for key, value in tensors.items()},
        {key: value for key, value in tensors.items() if key != name},
    ]
    for number, variant in enumerate(variants):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_tensors(folder / "model.safetensors", variant)
        seen.add(identity(folder))
    assert len(seen) == len(variants)


def test_only_a_sample_of_each_tensor_is_read(tmp_path: Path) -> None:
    values = np.zeros(10 * SAMPLE_BYTES, np.uint8)
    found = []
    for place in (None, 0, 5 * SAMPLE_BYTES):
        data = values.copy()
        if place is not None:
            data[place] = 1
        write_tensors(tmp_path / "model.safetensors", {"w": ("U8", data)})
        found.append(identity(tmp_path))
    assert found[0] == found[1]
    assert found[0] != found[2]
