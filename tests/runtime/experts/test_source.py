"""Records out of released checkpoints."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from serai.runtime.errors import WeightsInvalid
from serai.runtime.experts.disk import DiskCalls, ReadMode
from serai.runtime.experts.errors import FileEnded
from serai.runtime.experts.source import DirectSource, open_source
from serai.runtime.models.safetensors_files import CheckpointFiles
from tests.runtime.experts.faults import NoDirect, ShortReads
from tests.runtime.experts.packing import K3, MODELS, opened, record_by_hand, record_of, written
from tests.runtime.models.small_checkpoints import write_index, write_tensors


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_records_are_those_of_tensors_read_whole(tmp_path: Path, model: object, shards: int) -> None:
    with opened(written(tmp_path / "m", model, shards)) as found:  # type: ignore[arg-type]
        source = open_source(found.config, found.files, found.prefix)
        assert isinstance(source, DirectSource)
        assert source.layers == (1, 2)
        for layer in source.layers:
            for expert in range(source.experts):
                assert np.array_equal(record_of(source, layer, expert), record_by_hand(found, layer, expert))
        source.close()


@pytest.mark.parametrize(
    "calls",
    [NoDirect(at_open=True), NoDirect(at_open=False), ShortReads(1000)],
    ids=["unsupported", "refused", "short"],
)
def test_how_the_disk_reads_changes_no_record(tmp_path: Path, calls: DiskCalls) -> None:
    """B121, B123."""
    with opened(written(tmp_path / "m", K3, shards=2)) as found:
        source = DirectSource(found.config, found.files, found.prefix, calls)
        if isinstance(calls, NoDirect):
            assert source.mode is ReadMode.BUFFERED
        for expert in range(source.experts):
            assert np.array_equal(record_of(source, 2, expert), record_by_hand(found, 2, expert))
        source.close()


def test_tensors_may_begin_at_any_byte_and_lie_in_any_file(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", MODELS["linear"])
    with opened(folder) as found:
        expected = {expert: record_by_hand(found, 1, expert) for expert in range(5)}
        tensors = {name: (info.dtype, found.files.read(name)) for name, info in found.files.tensors.items()}
    odd = ("U8", np.zeros(1, np.uint8))
    rng = np.random.default_rng(5)
    files: dict[str, dict[str, object]] = {name: {f"pad.{name}": odd} for name in ("a.safetensors", "b.safetensors")}
    weight_map = {}
    for name in rng.permutation(sorted(tensors)).tolist():
        file = sorted(files)[int(rng.integers(2))]
        files[file][name] = tensors[name]
        weight_map[name] = file
    (folder / "model.safetensors").unlink()
    for file, held in files.items():
        write_tensors(folder / file, held)  # type: ignore[arg-type]
    write_index(folder, weight_map)
    with opened(folder) as found:
        source = DirectSource(found.config, found.files, found.prefix)
        for expert, record in expected.items():
            assert np.array_equal(record_of(source, 1, expert), record)
        source.close()


def test_an_expert_that_lies_together_is_one_read(tmp_path: Path) -> None:
    with opened(written(tmp_path / "m", K3)) as found:
        source = DirectSource(found.config, found.files, found.prefix)
        (span,) = source.spans(1, 0)
        assert span.nbytes >= 3 * 64 * 64 // 2
        assert span.start % 4096 == span.page_bytes % 4096 == 0
        assert source.path(1, 0) == span.path
        source.close()


def test_a_shard_cut_later_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """B25."""
    folder = written(tmp_path / "m", K3)
    with opened(folder) as found:
        source = DirectSource(found.config, found.files, found.prefix)
        os.truncate(folder / "model.safetensors", 5000)
        with pytest.raises(FileEnded, match=r"ended at 5,000 of [0-9,]+ bytes"):
            record_of(source, 2, 4)
        source.close()


def test_experts_of_an_unknown_type_are_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", MODELS["linear"])
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, entry in header.items():
        if ".experts." in name:
            entry["dtype"] = "F16"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with opened(folder) as found, pytest.raises(WeightsInvalid, match="routed experts are F16, but must be BF16, F32"):
        open_source(found.config, found.files, found.prefix)


def test_a_missing_shard_is_found_when_the_source_opens(tmp_path: Path) -> None:
    folder = written(tmp_path / "m", K3, shards=2)
    with opened(folder) as found:
        assert isinstance(found.files, CheckpointFiles)
        (folder / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(WeightsInvalid, match="model-00002-of-00002"):
            DirectSource(found.config, found.files, found.prefix)
