"""The strict safetensors reader: what it reads, and every file it refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.dtypes import as_float32
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.safetensors_header import MOST_HEADER_BYTES
from tests.runtime.models.small_checkpoints import Tensors, write_file, write_index, write_tensors
from tests.shared import shared

ONE = "model.safetensors"


def f32(*values: float) -> tuple[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    return "F32", np.array(values, np.float32)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refused(folder: Path, sentence: str) -> str:
    """Opening must fail with exactly this kind of error; gives its message."""
    with pytest.raises(WeightsInvalid, match=sentence) as caught:
        CheckpointFiles.open(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_come_back_as_written(tmp_path: Path) -> None:
    tensors: Tensors = {
        "matrix": ("F32", np.arange(12, dtype=np.float32).reshape(3, 4)),
        "bytes": ("U8", np.arange(7, dtype=np.uint8)),
        "scalar": ("F32", np.array(2.5, np.float32)),
        "empty": ("BF16", np.zeros((0, 4), np.uint16)),
        "ünïcode": ("I64", np.array([-1], np.int64)),
    }
    write_tensors(tmp_path / ONE, tensors)
    with CheckpointFiles.open(tmp_path) as files:
        assert set(files.tensors) == set(tensors)
        for name, (dtype, array) in tensors.items():
            read = files.read(name)
            assert (files.tensors[name].dtype, files.tensors[name].shape) == (dtype, array.shape)
            assert read.dtype == array.dtype
            np.testing.assert_array_equal(read, array)
            assert read.flags.owndata
            assert files.read_bytes(name, 0, files.tensors[name].nbytes) == array.tobytes()
        assert files.read_bytes("bytes", 2, 3) == bytes((2, 3, 4))
        assert files.path_of(files.tensors["matrix"]) == tmp_path / ONE
        assert repr(files) == f"<CheckpointFiles {tmp_path}: 5 tensors in 1 files>"


def test_bfloat16_widens_exactly_without_torch(tmp_path: Path) -> None:
    """B15."""
    data = bytes.fromhex("803F 20C0 4940")
    write_file(tmp_path / ONE, json.dumps({"w": entry("BF16", [3], 0, 6)}), data)
    with CheckpointFiles.open(tmp_path) as files:
        assert files.read("w").dtype == np.uint16
        assert files.read_float32("w").tolist() == [1.0, -2.5, 3.140625]


def test_every_bfloat16_widens_to_the_float_it_is_half_of() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    wide = as_float32(bits, "BF16")
    assert np.array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)
    assert bits.dtype == np.uint16
    with pytest.raises(ValueError, match="U8 is not a floating-point type"):
        as_float32(np.zeros(1, np.uint8), "U8")


def test_reading_into_an_array_needs_one_that_fits(tmp_path: Path) -> None:
    write_tensors(tmp_path / ONE, {"w": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3))})
    with CheckpointFiles.open(tmp_path) as files:
        out = np.full((3, 2), np.nan, np.float32)
        files.read_into("w", out)
        assert out.ravel().tolist() == [0, 1, 2, 3, 4, 5]
        frozen = np.zeros(6, np.float32)
        frozen.flags.writeable = False
        for bad in (np.zeros(5, np.float32), np.zeros((2, 6), np.float32)[:, ::2], frozen):
            with pytest.raises(ValueError, match="w needs a writable C-contiguous array of 24 bytes"):
                files.read_into("w", bad)
        with pytest.raises(ValueError, match="not all within the 24 of w"):
            files.read_bytes("w", 20, 5)
        with pytest.raises(WeightsInvalid, match="holds no tensor 'v'"):
            files.read("v")


def test_reads_that_return_little_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.float32)
    write_tensors(tmp_path / ONE, {"w": ("F32", values)})
    whole = os.preadv

    def stingy(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return whole(descriptor, [buffers[0][:17]], offset)

    monkeypatch.setattr(os, "preadv", stingy)
    with CheckpointFiles.open(tmp_path) as files:
        np.testing.assert_array_equal(files.read("w"), values)


def test_a_closed_checkpoint_reads_nothing(tmp_path: Path) -> None:
    write_tensors(tmp_path / ONE, {"w": f32(1)})
    files = CheckpointFiles.open(tmp_path)
    files.close()
    files.close()
    with pytest.raises(ValueError, match=r"model\.safetensors is closed"):
        files.read("w")


def test_a_refused_folder_leaves_no_file_open(tmp_path: Path) -> None:
    write_tensors(tmp_path / "a.safetensors", {"w": f32(1)})
    write_tensors(tmp_path / "b.safetensors", {"w": f32(2)})
    before = len(list(Path("/proc/self/fd").iterdir()))
    refused(tmp_path, "is in both")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    """B16."""
    write_tensors(tmp_path / "one.safetensors", {"a": f32(1)})
    write_tensors(tmp_path / "two.safetensors", {"b": f32(2)})
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    CheckpointFiles.open(tmp_path).close()
    (tmp_path / "two.safetensors").unlink()
    refused(tmp_path, r"the shard two\.safetensors, which should hold tensor 'b', is missing from ")


def test_a_tensor_the_index_promises_must_be_in_its_shard(tmp_path: Path) -> None:
    """B16."""
    write_tensors(tmp_path / "one.safetensors", {"a": f32(1)})
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    refused(tmp_path, r"says tensor 'b' is in one\.safetensors, but that file doesn't hold it")


def test_the_index_decides_between_two_copies_and_ignores_other_files(tmp_path: Path) -> None:
    """B17."""
    write_tensors(tmp_path / "a.safetensors", {"w": f32(1), "v": f32(10)})
    write_tensors(tmp_path / "b.safetensors", {"w": f32(2)})
    (tmp_path / "c.safetensors").write_bytes(b"not even a safetensors file")
    write_index(tmp_path, {"v": "a.safetensors", "w": "b.safetensors"})
    with CheckpointFiles.open(tmp_path) as files:
        assert files.read("w").tolist() == [2]
        assert files.read("v").tolist() == [10]
        assert files.file_names == ("a.safetensors", "b.safetensors")


def test_without_an_index_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    """B17."""
    write_tensors(tmp_path / "a.safetensors", {"w": f32(1)})
    write_tensors(tmp_path / "b.safetensors", {"w": f32(2)})
    refused(tmp_path, r"tensor 'w' is in both a\.safetensors and b\.safetensors")


def test_without_an_index_all_files_count(tmp_path: Path) -> None:
    write_tensors(tmp_path / "b.safetensors", {"b": f32(2)})
    write_tensors(tmp_path / "a.safetensors", {"a": f32(1)})
    with CheckpointFiles.open(tmp_path) as files:
        assert (files.read("a").tolist(), files.read("b").tolist()) == ([1], [2])


def test_a_repeated_name_in_a_header_is_refused(tmp_path: Path) -> None:
    """B18."""
    one, other = json.dumps(entry("F32", [1], 0, 4)), json.dumps(entry("F32", [1], 4, 8))
    write_file(tmp_path / ONE, f'{{"k": {one}, "k": {other}}}', bytes(8))
    refused(tmp_path, r"^model\.safetensors: the header holds the key 'k' twice$")


def test_a_repeated_key_inside_an_entry_is_refused(tmp_path: Path) -> None:
    """B18, one level down."""
    header = '{"k": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "data_offsets": [4, 8]}}'
    write_file(tmp_path / ONE, header, bytes(8))
    refused(tmp_path, "the header holds the key 'data_offsets' twice")


def test_tensors_that_share_bytes_are_refused_with_both_names(tmp_path: Path) -> None:
    """B19."""
    header = {"k_proj": entry("F32", [16], 0, 64), "v_proj": entry("F32", [16], 0, 64)}
    write_file(tmp_path / ONE, json.dumps(header), bytes(128))
    refused(tmp_path, r"the tensors 'k_proj' at bytes \[0, 64\) and 'v_proj' at \[0, 64\) of the data overlap")
    header["v_proj"] = entry("F32", [16], 60, 124)
    write_file(tmp_path / ONE, json.dumps(header), bytes(124))
    refused(tmp_path, r"the tensors 'k_proj' at bytes \[0, 64\) and 'v_proj' at \[60, 124\) of the data overlap")


def test_bytes_that_belong_to_no_tensor_are_refused_with_both_neighbours(tmp_path: Path) -> None:
    """B19."""
    header = {"v_proj": entry("F32", [16], 128, 192), "k_proj": entry("F32", [16], 0, 64)}
    write_file(tmp_path / ONE, json.dumps(header), bytes(192))
    refused(tmp_path, r"bytes \[64, 128\) of the data, between 'k_proj' and 'v_proj', belong to no tensor")
    write_file(tmp_path / ONE, json.dumps({"w": entry("F32", [1], 8, 12)}), bytes(12))
    refused(tmp_path, r"bytes \[0, 8\) of the data, before 'w', belong to no tensor")


CUTS: dict[str, Callable[[bytes], bytes]] = {
    "the last byte": lambda data: data[:-1],
    "half the data": lambda data: data[:-2048],
    "all data": lambda data: data[:-4096],
    "the end of the header": lambda data: data[:50],
    "the length of the header": lambda data: data[:5],
    "everything": lambda data: b"",
    "nothing, but one byte added": lambda data: data + b"\0",
}


@pytest.mark.parametrize("what", CUTS)
def test_a_cut_or_padded_file_gives_one_error_with_both_sizes(tmp_path: Path, what: str) -> None:
    """B23, when opened."""
    path = tmp_path / ONE
    write_tensors(path, {"w": ("F32", np.zeros(1024, np.float32))})
    whole = path.read_bytes()
    path.write_bytes(CUTS[what](whole))
    message = refused(
        tmp_path, r"^model\.safetensors is [\d,]+ bytes long where its header calls for .*; it was cut or changed"
    )
    assert f"is {path.stat().st_size:,} bytes" in message
    if len(CUTS[what](whole)) > 100:
        assert f"calls for {len(whole):,};" in message


def test_a_file_cut_after_opening_gives_the_same_error_when_read(tmp_path: Path) -> None:
    """B23, on the path that reads later."""
    path = tmp_path / ONE
    write_tensors(path, {"v": f32(1, 2), "w": ("F32", np.zeros(1024, np.float32))})
    size = path.stat().st_size
    with CheckpointFiles.open(tmp_path) as files:
        os.truncate(path, size - 1)
        with pytest.raises(WeightsInvalid, match=rf"is {size - 1:,} bytes long where its header calls for {size:,};"):
            files.read("w")
        assert files.read("v").tolist() == [1, 2]


def test_an_absurd_header_length_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    for length in (MOST_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        write_file(tmp_path / ONE, "{}", b"", length=length)
        refused(tmp_path, rf"model\.safetensors announces a header of {length:,} bytes, over the limit of 100,000,000")
    write_file(tmp_path / ONE, "{}", b"", length=MOST_HEADER_BYTES)
    refused(tmp_path, r"is 10 bytes long where its header calls for at least 100,000,008")


GARBAGE: list[tuple[str | bytes, str]] = [
    ("[]", "the header holds a JSON array where an object is due"),
    ("{", "the header is not valid JSON"),
    ("", "the header is not valid JSON"),
    ("{}}", "the header is not valid JSON"),
    (b'{"\xff": 1}', r"the header is not UTF-8 text \(byte 2 of 8\)"),
    ("{}".encode("utf-16"), "the header is not UTF-8 text"),
    ("[" * 200_000, "the header nests brackets too deeply"),
    ('{"w": ' + "9" * 5000 + "}", "the header is not valid JSON"),
    ('{"w": NaN}', "the header holds NaN"),
    ('{"w": 3}', "tensor 'w' is a JSON number where an object is due"),
    ('{"w": null}', "tensor 'w' is a JSON null where an object is due"),
    ('{"w": {"dtype": "F32"}}', "tensor 'w' has the keys .* where dtype, shape and data_offsets are due"),
    ('{"w": {"dtype": "F32", "shape": [], "data_offsets": [0, 4], "more": 1}}', "tensor 'w' has the keys"),
    ('{"w": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}', "tensor 'w' has the unknown dtype 'F4'"),
    ('{"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}', "has the unknown dtype"),
    ('{"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}', "has the shape 1 where a list"),
    ('{"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', r"has the shape \[1.0\] where a list"),
    ('{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', r"has the shape \[-1\] where a list"),
    ('{"w": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}', r"has the shape \[True\] where a list"),
    ('{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', r"has data_offsets \[4, 0\] where"),
    ('{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', r"has data_offsets \[0\] where"),
    ('{"w": {"dtype": "F32", "shape": [1], "data_offsets": "04"}}', "has data_offsets '04' where"),
    (
        '{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        r"is F32 \[2\], 8 bytes, but data_offsets span 4",
    ),
    (
        '{"w": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 4]}}',
        "far too many bytes, but data_offsets span 4",
    ),
    ('{"w": {"dtype": "F32", "shape": [4611686018427387905, 0], "data_offsets": [0, 0]}}', "far too many bytes"),
    (json.dumps({"w": entry("F32", [1] * 33, 0, 4)}), "has 33 dimensions, over the limit of 32"),
    ('{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', r"the tensor name .* is not valid text"),
    ('{"__metadata__": {"a": 1}}', "__metadata__ in the header must be an object of strings"),
    ('{"__metadata__": []}', "__metadata__ in the header must be an object of strings"),
]


@pytest.mark.parametrize(("header", "sentence"), GARBAGE)
def test_a_header_that_is_not_one_is_refused(tmp_path: Path, header: str | bytes, sentence: str) -> None:
    write_file(tmp_path / ONE, header, bytes(4))
    assert refused(tmp_path, sentence).startswith("model.safetensors: ")


LEAVING = ["../w.safetensors", "sub/../../w.safetensors", "/etc/hostname", "", ".", "..", "a\0b", "a\nb", "\ud800"]


@pytest.mark.parametrize("name", LEAVING)
def test_a_shard_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors(tmp_path / "w.safetensors", {"w": f32(1)})
    write_index(folder, {"w": name})
    refused(folder, "is not a path within the model folder")


def test_a_shard_that_links_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tensors(tmp_path / "w.safetensors", {"w": f32(1)})
    (folder / ONE).symlink_to(tmp_path / "w.safetensors")
    refused(folder, "is a link out of the model folder, to ")
    (folder / ONE).unlink()
    (folder / ONE).symlink_to(ONE)
    refused(folder, "can't be opened")


def test_links_of_the_hugging_face_cache_into_its_blobs_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    write_tensors(repository / "blobs" / "0123", {"w": f32(1)})
    (snapshot / ONE).symlink_to(Path("../../blobs/0123"))
    with CheckpointFiles.open(snapshot) as files:
        assert files.read("w").tolist() == [1]
    (repository / "blobs" / "deep").mkdir()
    (repository / "blobs" / "0123").rename(repository / "blobs" / "deep" / "0123")
    (snapshot / ONE).unlink()
    (snapshot / ONE).symlink_to(Path("../../blobs/deep/0123"))
    refused(snapshot, "is a link out of the model folder")


def test_shards_in_a_folder_below_and_links_within_are_fine(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_tensors(tmp_path / "sub" / "w.safetensors", {"w": f32(1)})
    (tmp_path / "link.safetensors").symlink_to("sub/w.safetensors")
    for name in ("sub/w.safetensors", "link.safetensors"):
        write_index(tmp_path, {"w": name})
        with CheckpointFiles.open(tmp_path) as files:
            assert files.read("w").tolist() == [1]


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ONE)
    refused(tmp_path, "is not a regular file")
    (tmp_path / ONE).unlink()
    (tmp_path / ONE).mkdir()
    refused(tmp_path, "is not a regular file")


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    refused(tmp_path, r"holds neither model\.safetensors\.index\.json nor a \*\.safetensors file")
    refused(tmp_path / "absent", "can't be listed")


BAD_INDEXES: list[tuple[bytes, str]] = [
    (b"{", "is not valid JSON"),
    (b"{}", "weight_map must be an object from tensor to file, not null"),
    (b'{"weight_map": []}', "weight_map must be an object"),
    (b'{"weight_map": {}}', "weight_map must be an object"),
    (b'{"weight_map": {"w": 1}}', "the file of tensor 'w' must be a string, not 1"),
    (b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "holds the key 'w' twice"),
]


@pytest.mark.parametrize(("content", "sentence"), BAD_INDEXES)
def test_a_damaged_index_is_refused_by_its_path(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert "model.safetensors.index.json" in refused(tmp_path, sentence)


def test_an_index_that_links_to_nothing_is_not_taken_for_absent(tmp_path: Path) -> None:
    write_tensors(tmp_path / ONE, {"w": f32(1)})
    (tmp_path / "model.safetensors.index.json").symlink_to("gone")
    refused(tmp_path, "is a link to a file that is not there")


@pytest.mark.parametrize("name", ["kimi_linear_bf16", "kimi_k3_mxfp4"])
def test_the_oracle_files_read_as_the_safetensors_library_reads_them(name: str) -> None:
    folder = shared("oracle", name)
    theirs: list[tuple[str, Any]] = safetensors.deserialize((folder / ONE).read_bytes())  # type: ignore[no-untyped-call]
    with CheckpointFiles.open(folder) as files:
        assert {key for key, _ in theirs} == set(files.tensors)
        for key, tensor in theirs:
            info = files.tensors[key]
            assert (info.dtype, list(info.shape)) == (tensor["dtype"], tensor["shape"])
            assert files.read(key).tobytes() == bytes(tensor["data"])
