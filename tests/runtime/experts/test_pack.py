"""Packing a model, and reading it back."""

import hashlib
import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from serai.runtime.bench.tiny import TinyModel
from serai.runtime.errors import BadParameter, ConfigInvalid, WeightsInvalid
from serai.runtime.experts.errors import PackFailed
from serai.runtime.experts.pack import UNFINISHED_NAME, PackProgress, PackReport, pack_model, verify_pack
from serai.runtime.experts.packed_format import MANIFEST_NAME, layer_file
from serai.runtime.experts.source import DirectSource, PackedSource, open_source
from serai.runtime.models.config import ExpertFormat, load_config
from tests.runtime.experts.packing import K3, LINEAR, MODELS, opened, record_of, written


def pack(source: Path, out: Path, experts: str = "as stored", *, verify: bool = False) -> PackReport:
    with opened(source) as found:
        return pack_model(found.config, found.files, found.prefix, out, experts=experts, verify=verify)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file's hash and time of change."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.iterdir())
    }


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_packed_model_gives_the_same_records_and_the_same_trunk(tmp_path: Path, model: TinyModel) -> None:
    source = written(tmp_path / "m", model, shards=2)
    before = contents(source)
    report = pack(source, tmp_path / "p", verify=True)
    assert contents(source) == before  # the source is only ever read
    assert (report.verified_records, report.kept_files, report.relative_error) == (10, 0, None)
    with opened(source) as original, opened(tmp_path / "p") as packed:
        direct = DirectSource(original.config, original.files, original.prefix)
        records = open_source(packed.config, packed.files, packed.prefix)
        assert isinstance(records, PackedSource)
        assert records.layout == direct.layout
        assert records.layers == direct.layers
        assert records.scratch_bytes == 0
        for layer in direct.layers:
            for expert in range(direct.experts):
                assert np.array_equal(record_of(records, layer, expert), record_of(direct, layer, expert))
        trunk = [name for name in original.files.tensors if ".experts." not in name or "shared" in name]
        for name in trunk:
            assert packed.files.info(name)[1:3] == original.files.info(name)[1:3]
            assert np.array_equal(packed.files.read(name), original.files.read(name))
        assert json.loads(packed.config.raw) == json.loads(original.config.raw)
        direct.close()
        records.close()


def test_the_files_are_valid_safetensors_with_records_at_whole_pages(tmp_path: Path) -> None:
    pack(written(tmp_path / "m", K3), tmp_path / "p")
    with opened(tmp_path / "p") as packed:
        source = open_source(packed.config, packed.files, packed.prefix)
        (span,) = source.spans(2, 3)
        assert span.offset == span.start
        assert span.nbytes == span.page_bytes == source.record_bytes
        name = f"{packed.prefix}model.layers.2.block_sparse_moe.experts.records"
        with safe_open(tmp_path / "p" / layer_file(2), framework="numpy") as file:
            assert set(file.keys()) == {name, name.replace("records", "checksums")}
            assert np.array_equal(file.get_tensor(name)[3], record_of(source, 2, 3))
        source.close()


def test_packing_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    source = written(tmp_path / "m", K3)
    whole = pack(source, tmp_path / "whole")

    class Stopped(Exception):
        pass

    def stop(progress: PackProgress) -> None:
        if progress.total_bytes - progress.done_bytes < 20_000:  # within the last file
            raise Stopped

    with opened(source) as found, pytest.raises(Stopped):
        pack_model(found.config, found.files, found.prefix, tmp_path / "p", progress=stop)
    assert (tmp_path / "p" / UNFINISHED_NAME).exists()
    assert not (tmp_path / "p" / MANIFEST_NAME).exists()
    report = pack(source, tmp_path / "p", verify=True)
    assert report.kept_files == 2
    assert 0 < report.written_bytes < whole.written_bytes
    assert {name: made[0] for name, made in contents(tmp_path / "p").items() if not name.endswith(".part")} == {
        name: made[0] for name, made in contents(tmp_path / "whole").items()
    }


def test_packing_again_writes_no_weights(tmp_path: Path) -> None:
    source = written(tmp_path / "m", K3)
    pack(source, tmp_path / "p")
    report = pack(source, tmp_path / "p", verify=True)
    assert (report.written_bytes, report.kept_files, report.verified_records) == (0, 3, 10)


def test_verifying_finds_one_wrong_byte(tmp_path: Path) -> None:
    pack(written(tmp_path / "m", K3), tmp_path / "p")
    file = tmp_path / "p" / layer_file(1)
    data = bytearray(file.read_bytes())
    record_bytes = json.loads((tmp_path / "p" / MANIFEST_NAME).read_text())["record_bytes"]
    data[-5 * 32 - 2 * record_bytes + 17] ^= 1  # in the fourth of five records, which the checksums follow
    file.write_bytes(data)
    with opened(tmp_path / "p") as found:
        config, prefix = found.config, found.prefix
    with pytest.raises(PackFailed, match=r"experts-00001.safetensors: expert 3 of layer 1 is not what was written"):
        verify_pack(config, tmp_path / "p", prefix)


def test_quantising_makes_an_mxfp4_model_and_says_what_it_changed(tmp_path: Path) -> None:
    source = written(tmp_path / "m", LINEAR)
    report = pack(source, tmp_path / "p", "mxfp4", verify=True)
    assert report.relative_error == pytest.approx(0.105, abs=0.01)  # of normally distributed weights
    assert load_config(tmp_path / "p").expert_format is ExpertFormat.MXFP4
    with opened(source) as original, opened(tmp_path / "p") as packed:
        records = open_source(packed.config, packed.files, packed.prefix)
        direct = DirectSource(original.config, original.files, original.prefix)
        assert direct.record_bytes / records.record_bytes >= 3  # 16 to 4.25 bits, before records are filled up to pages
        records.close()
        direct.close()


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="MXFP4 already"):
        pack(written(tmp_path / "a", K3), tmp_path / "p", "mxfp4")
    with pytest.raises(BadParameter, match="'as stored' or 'mxfp4', not 'int3'"):
        pack(tmp_path / "a", tmp_path / "p", "int3")
    with pytest.raises(ConfigInvalid, match="multiple of 32"):
        pack(written(tmp_path / "b", replace(LINEAR, expert_inner=48)), tmp_path / "p", "mxfp4")
    assert not (tmp_path / "p").exists()


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(PackFailed, match=r"more bytes, but the disk has 1,048,576 free; [0-9,]+ are missing"):
        pack(written(tmp_path / "m", K3), tmp_path / "p")
    assert not list((tmp_path / "p").glob("*.safetensors*"))


def test_other_peoples_folders_are_left_alone(tmp_path: Path) -> None:
    source = written(tmp_path / "m", K3)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(PackFailed, match="no pack of this model"):
        pack(source, other)
    for out in (source, source / "packed", tmp_path):
        with pytest.raises(PackFailed, match="not apart from the model folder"):
            pack(source, out)
    with pytest.raises(PackFailed, match="can't be made"):
        pack(source, other / "thesis.txt" / "x")
    assert sorted(path.name for path in other.iterdir()) == ["thesis.txt"]


def test_a_pack_of_another_model_is_not_continued(tmp_path: Path) -> None:
    pack(written(tmp_path / "a", LINEAR), tmp_path / "p")
    with pytest.raises(PackFailed, match="other weights or with other options"):
        pack(tmp_path / "a", tmp_path / "p", "mxfp4")
    with pytest.raises(PackFailed, match="other weights or with other options"):
        pack(written(tmp_path / "b", K3), tmp_path / "p")


def test_a_packed_model_is_not_packed_again(tmp_path: Path) -> None:
    pack(written(tmp_path / "m", K3), tmp_path / "p")
    with pytest.raises(BadParameter, match="packed already"):
        pack(tmp_path / "p", tmp_path / "q")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", 2, "has format 2, but this version reads 1"),
        ("layout", "order 9, mxfp4, 64 x 64", "does not read; pack the model again"),
        ("record_bytes", 40960, "must be U8"),
        ("record_bytes", "many", "record_bytes is 'many', but must be a int"),
    ],
)
def test_a_pack_this_version_cannot_read_says_so(tmp_path: Path, field: str, value: object, message: str) -> None:
    pack(written(tmp_path / "m", K3), tmp_path / "p")
    manifest = tmp_path / "p" / MANIFEST_NAME
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {field: value}))
    with opened(tmp_path / "p") as found, pytest.raises(WeightsInvalid, match=message):
        open_source(found.config, found.files, found.prefix)
