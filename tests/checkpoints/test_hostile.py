"""Files that are damaged, or made to abuse their reader, are refused by name: no crash, no large allocation."""

import resource
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from safetensors.numpy import load as load_safetensors

from serai.checkpoints import NodeRecord, Packing, Store
from serai.checkpoints.errors import FormatUnknown, SeraiError, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.files.codec import Codec
from serai.checkpoints.format import (
    FORMAT_VERSION,
    PART_HEADER_BYTES,
    DocumentKind,
    PartHeader,
    frame_document,
    part_file_bytes,
)
from tests.checkpoints.samples import FINGERPRINT, make_node, make_snapshot, same_bits, saved

STATE = make_snapshot(11, smooth=True)


def part_files(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / "parts").rglob("*") if file.is_file())


def part_hash(file: Path) -> str:
    return file.parent.name + file.name


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, NodeRecord]:
    """A store with one snapshot, all parts packed with zstd."""
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        node = make_node(11)
        store.record(node)
        store.save(node.id, STATE, FINGERPRINT, reason="pause", packing=Packing.SMALL)
    return folder, node


def read_all(store: Store, node: NodeRecord) -> None:
    store.tokens(node.id)
    store.load(node.id)


def refused(folder: Path, node: NodeRecord) -> SeraiError:
    with Store.open(str(folder)) as store, pytest.raises((SnapshotCorrupt, FormatUnknown)) as caught:
        store.load(node.id)
    return caught.value


def rewrite_payload(
    file: Path, payload: bytes, codec: Codec = Codec.ZSTD_PLANES_4, raw_bytes: int | None = None
) -> None:
    """Put another payload behind a header whose lengths and check sum are right."""
    raw = int.from_bytes(file.read_bytes()[16:24], "little") if raw_bytes is None else raw_bytes
    data = PartHeader(codec, raw, len(payload), part_hash(file)).pack() + payload
    file.write_bytes(data + bytes(part_file_bytes(len(payload)) - len(data)))


def payload_of(file: Path) -> bytes:
    data = file.read_bytes()
    return data[PART_HEADER_BYTES : PART_HEADER_BYTES + int.from_bytes(data[24:32], "little")]


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame + b"yyy",
        lambda frame: frame + frame,
        lambda frame: frame[:-10],
        lambda frame: frame[:40] + bytes([frame[40] ^ 1]) + frame[41:],
        lambda frame: b"",
        lambda frame: bytes(len(frame)),
    ],
    ids=["junk after", "two frames", "cut", "flipped bit", "empty", "zeros"],
)
@pytest.mark.parametrize("honest_length", [True, False])
def test_a_frame_that_is_not_exactly_the_one_written_is_refused(
    packed: tuple[Path, NodeRecord], change: Callable[[bytes], bytes], honest_length: bool
) -> None:
    """B67, whether or not the header's length was changed along; B62: zeros of the right length are refused."""
    folder, node = packed
    for file in part_files(folder):
        data = file.read_bytes()
        payload = change(payload_of(file))
        if honest_length:
            rewrite_payload(file, payload)
        else:
            file.write_bytes(data[:PART_HEADER_BYTES] + payload)
        refused(folder, node)
        file.write_bytes(data)


@pytest.mark.parametrize("content", [b"", bytes(4096), b"\xff" * 64], ids=["empty", "zeros", "ones"])
def test_files_of_nothing_are_refused(packed: tuple[Path, NodeRecord], content: bytes) -> None:
    """B54, B62: a file of 0 bytes, or of zeros, is a clean error wherever it stands."""
    folder, node = packed
    for file in [*part_files(folder), *(folder / "manifests").iterdir()]:
        data = file.read_bytes()
        file.write_bytes(content)
        refused(folder, node)
        file.write_bytes(data)
    next((folder / "nodes").iterdir()).write_bytes(content)
    with Store.open(str(folder)) as store, pytest.raises(SnapshotCorrupt):
        store.tokens(node.id)


def test_frames_without_a_content_size_are_read(packed: tuple[Path, NodeRecord]) -> None:
    """B68: what a streaming writer leaves, with no size in its frame, is bounded by our own header and read."""
    folder, node = packed
    for file in part_files(folder):
        data = file.read_bytes()
        raw = zstandard.ZstdDecompressor().decompress(payload_of(file))
        writer = zstandard.ZstdCompressor(level=3).compressobj()
        frame = writer.compress(raw[:100]) + writer.compress(raw[100:]) + writer.flush()
        assert zstandard.get_frame_parameters(frame).content_size == zstandard.CONTENTSIZE_UNKNOWN
        rewrite_payload(file, frame, Codec(int.from_bytes(data[12:16], "little")))
    with Store.open(str(folder)) as store:
        assert same_bits(store.load(node.id), STATE)


def test_parts_are_safetensors_in_zstd(packed: tuple[Path, NodeRecord]) -> None:
    """B68: other readers get the same bytes: zstd's and, once the byte planes are joined, safetensors'."""
    folder, _ = packed
    found = []
    for file in part_files(folder):
        frame = payload_of(file)
        raw = zstandard.ZstdDecompressor().stream_reader(frame).read()
        header = 8 + int.from_bytes(raw[:8], "little")
        planes = np.frombuffer(raw[header:], np.uint8).reshape(4, -1)
        joined = raw[:header] + np.ascontiguousarray(planes.T).tobytes()
        assert blake3(joined).hexdigest() == part_hash(file)
        found.append(load_safetensors(joined))
    states = [tensors for tensors in found if "kda" in tensors]
    assert len(states) == 1
    assert np.array_equal(states[0]["kda"], STATE.kda)
    assert np.array_equal(states[0]["conv"], STATE.conv)
    assert sum("latents" in tensors for tensors in found) == 3


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd command")
def test_the_zstd_command_unpacks_what_was_stored(packed: tuple[Path, NodeRecord]) -> None:
    """B68: a frame of a file, as it lies there, and one that a streaming writer made."""
    folder, _ = packed
    for file in part_files(folder):
        frame = payload_of(file)
        raw = zstandard.ZstdDecompressor().stream_reader(frame).read()
        writer = zstandard.ZstdCompressor(level=3).compressobj()
        for one in (frame, writer.compress(raw) + writer.flush()):
            done = subprocess.run(["zstd", "-d", "-c"], input=one, check=True, capture_output=True)
            assert done.stdout == raw
        assert subprocess.run(["zstd", "-t"], input=frame[:-10], check=False, capture_output=True).returncode != 0


def bomb(unpacked_bytes: int, *, claim_bytes: int | None = None) -> bytes:
    """A zstd frame of zeros that unpacks to `unpacked_bytes`, perhaps claiming another size."""
    if claim_bytes is None:
        writer = zstandard.ZstdCompressor(level=3).compressobj()
    else:
        writer = zstandard.ZstdCompressor(level=3).compressobj(size=unpacked_bytes)
    block = bytes(1 << 20)
    frame = b"".join(writer.compress(block) for _ in range(unpacked_bytes >> 20)) + writer.flush()
    if claim_bytes is not None:
        # magic, descriptor (8-byte content size, single segment), size; then the blocks as they were
        header = zstandard.frame_header_size(frame)
        frame = frame[:4] + b"\xe0" + claim_bytes.to_bytes(8, "little") + frame[header:]
    return frame


@pytest.mark.parametrize("claim_bytes", [None, 1 << 60])
def test_a_bomb_stops_at_the_size_the_layout_allows(packed: tuple[Path, NodeRecord], claim_bytes: int | None) -> None:
    """B69: a frame of 800 MB behind a header that says little, or one that claims 2^60, costs no memory."""
    folder, node = packed
    frame = bomb(800 << 20, claim_bytes=claim_bytes)
    largest = max(part_files(folder), key=lambda file: file.stat().st_size)
    rewrite_payload(largest, frame)
    with Store.open(str(folder)) as store:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        with pytest.raises(SnapshotCorrupt):
            store.load(node.id)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # in KiB


def test_a_part_that_claims_too_much_is_refused_before_it_is_read(packed: tuple[Path, NodeRecord]) -> None:
    """B69: the size in a part's header must be the one its snapshot's layout gives."""
    folder, node = packed
    rewrite_payload(part_files(folder)[0], b"x" * 64, raw_bytes=1 << 60)
    assert "claims to unpack to" in str(refused(folder, node))


def test_other_versions_are_refused_by_number(packed: tuple[Path, NodeRecord]) -> None:
    """B58: a later version, or none, is refused with the one found and those supported."""
    folder, node = packed
    for file in [*part_files(folder), *(folder / "manifests").iterdir(), folder / "nodes" / node.id]:
        data = file.read_bytes()
        for version in (FORMAT_VERSION + 1, 0, 0xFFFFFFFF):
            file.write_bytes(data[:8] + version.to_bytes(4, "little") + data[12:])
            told = rf"{version}, .*reads 1 to {FORMAT_VERSION}"
            with Store.open(str(folder)) as store, pytest.raises(FormatUnknown, match=told):
                read_all(store, node)
        file.write_bytes(data)


def change_manifest(folder: Path, node: NodeRecord, change: Callable[[jsonio.Json], object]) -> None:
    """Rewrite the manifest's JSON, with a hash that fits, and point the index at it."""
    (file,) = (folder / "manifests").iterdir()
    value = jsonio.decode(file.read_bytes()[64:], "test")
    change(value)
    document = frame_document(DocumentKind.MANIFEST, jsonio.encode(value))
    file.unlink()
    (folder / "manifests" / document.hash).write_bytes(document.data)
    with Store.open(str(folder)) as store, store._index.change():
        store._index._rows("UPDATE snapshots SET manifest = ? WHERE node = ?", (document.hash, node.id))


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["parts"].update(lora=["ab" * 32]),
        lambda value: value["storage"].update(state="os.system"),
        lambda value: value["fingerprint"].update(evil="x"),
        lambda value: value["fingerprint"].pop("weights"),
        lambda value: value.pop("layout"),
        lambda value: value["layout"].update(kda_shape=[3, 2, 8, 2**53]),
        lambda value: value["layout"].update(kda_shape=[3, 2, 8, True]),
        lambda value: value["layout"].update(page_tokens=0),
        lambda value: value["layout"].update(latent_width=2**60),
        lambda value: value["layout"].update(vocab=-1),
        lambda value: value["layout"].update(latent_type="q8"),
        lambda value: value.update(position=2**52),
        lambda value: value.update(position=8),
        lambda value: value.update(node="a" * 26),
        lambda value: value.update(chain=""),
        lambda value: value["parts"]["pages"].reverse(),
        lambda value: value["parts"]["state"].__setitem__(0, "../../../etc/passwd"),
        lambda value: value["parts"]["state"].__setitem__(0, ["x"]),
        lambda value: value["parts"]["state"].pop(),
        lambda value: value["parts"].update(logits="é" * 64),
        lambda value: value.clear(),
    ],
)
def test_a_manifest_that_lies_is_refused(
    packed: tuple[Path, NodeRecord], change: Callable[[jsonio.Json], object]
) -> None:
    """B58: unknown kinds and types are refused by name, and impossible sizes before anything is allocated."""
    folder, node = packed
    change_manifest(folder, node, change)
    refused(folder, node)


def test_a_form_of_latents_that_is_not_known_is_refused_by_name(packed: tuple[Path, NodeRecord]) -> None:
    """A later version's, so nothing that is written anew."""
    folder, node = packed
    change_manifest(folder, node, lambda value: value["layout"].update(latent_type="q4"))
    with Store.open(str(folder)) as store, pytest.raises(FormatUnknown, match=r"latent_type as 'q4'.*bfloat16"):
        store.load(node.id)


def test_symlinks_are_never_followed(packed: tuple[Path, NodeRecord], tmp_path: Path) -> None:
    """B71: a link in the store's place for a file, or for a folder, is refused and its target untouched."""
    folder, node = packed
    target = tmp_path / "target"
    for file in [part_files(folder)[0], next((folder / "manifests").iterdir()), folder / "nodes" / node.id]:
        data = file.read_bytes()
        target.write_bytes(data)
        file.unlink()
        file.symlink_to(target)
        with Store.open(str(folder)) as store, pytest.raises(SnapshotCorrupt, match="cannot be opened"):
            read_all(store, node)
        file.unlink()
        file.write_bytes(data)
    outside = tmp_path / "outside"
    outside.mkdir()
    prefix = part_files(folder)[0].parent
    prefix.rename(tmp_path / "moved")
    prefix.symlink_to(outside, target_is_directory=True)
    with Store.open(str(folder)) as store:
        with pytest.raises(SeraiError):
            store.load(node.id)
        with pytest.raises(SeraiError):
            store.save(node.id, STATE, FINGERPRINT, reason="again", packing=Packing.SMALL)
    assert list(outside.iterdir()) == []


def test_a_folder_swapped_while_the_store_is_open_changes_nothing(tmp_path: Path) -> None:
    """B71: folders are held by descriptor, so a link put in their place between check and use is not met."""
    folder, outside = tmp_path / "s", tmp_path / "outside"
    outside.mkdir()
    with Store.open(str(folder)) as store:
        for name in ("parts", "manifests", "nodes", "tmp"):
            (folder / name).rename(folder / f"{name}.moved")
            (folder / name).symlink_to(outside, target_is_directory=True)
        node = saved(store, make_snapshot(5))
        assert same_bits(store.load(node.id), make_snapshot(5))
    assert list(outside.iterdir()) == []


def test_a_damaged_part_is_written_anew_by_the_next_save(packed: tuple[Path, NodeRecord]) -> None:
    """Content already stored is not written twice, unless its file is known to be bad."""
    folder, node = packed
    file = part_files(folder)[0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with Store.open(str(folder)) as store:
        assert store.has_snapshot(node.id)
        with pytest.raises(SnapshotCorrupt):
            store.load(node.id)
        assert not store.has_snapshot(node.id)
    with Store.open(str(folder)) as store:
        assert not store.has_snapshot(node.id)
        report = store.save(node.id, STATE, FINGERPRINT, reason="replayed")
        assert report.parts_new == 1
        assert store.has_snapshot(node.id)
        assert same_bits(store.load(node.id), STATE)


def test_nothing_of_a_pipe_or_device_is_read(packed: tuple[Path, NodeRecord]) -> None:
    """A named pipe in a part's place neither blocks nor is read."""
    folder, node = packed
    file = part_files(folder)[0]
    file.unlink()
    subprocess.run(["mkfifo", str(file)], check=True)
    assert "no regular file" in str(refused(folder, node))


def test_what_follows_a_payload_in_its_last_block_is_refused(packed: tuple[Path, NodeRecord]) -> None:
    """B67: the zeros that fill the last block are zeros."""
    folder, node = packed
    file = part_files(folder)[0]
    data = bytearray(file.read_bytes())
    data[-1] = 1
    file.write_bytes(data)
    assert "something follows its payload" in str(refused(folder, node))
