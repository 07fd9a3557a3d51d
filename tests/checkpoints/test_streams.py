"""Direct transfers: the same bytes whatever their lengths, and nothing left in the page cache."""

import ctypes
import errno
import mmap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints import LOSSLESS, Snapshot, StateLayout, Store
from serai.checkpoints.files.disk import Disk
from serai.checkpoints.files.manifest import logits_specs, page_specs, state_specs
from serai.checkpoints.files.streams import BLOCK_BYTES, BUFFER_BYTES, aligned_buffer
from serai.checkpoints.format import PART_HEADER_BYTES, safetensors_header
from serai.checkpoints.snapshot import new_snapshot
from tests.checkpoints.disks import ScalarDisk, ShortDisk
from tests.checkpoints.samples import FINGERPRINT, LAYOUT, make_node, make_snapshot, same_bits

BIG = StateLayout(
    kda_shape=(2, 8, 128, 128),
    conv_shape=(2, 3, 3, 1024),
    mla_layers=3,
    latent_width=64,
    latent_type=LAYOUT.latent_type,
    page_tokens=2048,
    vocab=100_000,
)


def save_and_load(folder: Path, state: Snapshot, disk: Disk) -> None:
    with Store.open(str(folder / "s"), disk=disk) as store:
        node = make_node(state.position)
        store.record(node)
        store.save(node.id, state, FINGERPRINT, reason="pause")
        assert same_bits(store.load(node.id), state)


class StoppingDisk(ScalarDisk):
    """Stops its first transfers of a file in the middle of a block."""

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[: BLOCK_BYTES + 100] if data.nbytes > 2 * BLOCK_BYTES else data)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return super().read(fd, into[: BLOCK_BYTES + 100] if offset % BLOCK_BYTES == 0 else into, offset)


class RefusingDisk(Disk):
    """A file system that takes the flag for direct transfers and refuses the transfers."""

    refused = 0

    def write(self, fd: int, data: memoryview) -> int:
        self._refuse(fd)
        return super().write(fd, data)

    def write_vector(self, fd: int, pieces: Sequence[memoryview]) -> int:
        self._refuse(fd)
        return super().write_vector(fd, pieces)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._refuse(fd)
        return super().read(fd, into, offset)

    def read_vector(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        self._refuse(fd)
        return super().read_vector(fd, into, offset)

    def _refuse(self, fd: int) -> None:
        if self.use_page_cache(fd):
            self.refused += 1
            self._use_direct(fd)
            raise OSError(errno.EINVAL, "no direct transfers here")


DISKS = [Disk(), ShortDisk(100_001), StoppingDisk(), RefusingDisk()]


@pytest.mark.parametrize("disk", DISKS, ids=lambda disk: type(disk).__name__)
def test_states_larger_than_a_buffer_go_past_the_cache_or_through_it(disk_path: Path, disk: Disk) -> None:
    save_and_load(disk_path, make_snapshot(5000, layout=BIG), disk)
    if isinstance(disk, RefusingDisk):
        assert disk.refused > 0


def aligned(state: Snapshot) -> Snapshot:
    """The same state in memory that begins on blocks."""
    copy = new_snapshot(state.layout, state.position)
    pairs = [(copy.kda, state.kda), (copy.conv, state.conv)]
    pairs += [(mine.rows, theirs.rows) for mine, theirs in zip(copy.pages, state.pages, strict=True)]
    for mine, theirs in pairs:
        assert mine.ctypes.data % BLOCK_BYTES == 0
        mine[:] = theirs
    return replace(copy, logits=state.logits)


@pytest.mark.parametrize("disk", DISKS, ids=lambda disk: type(disk).__name__)
@pytest.mark.parametrize("position", [2048, 5000])
def test_aligned_states_need_no_copy_and_are_stored_alike(disk_path: Path, disk: Disk, position: int) -> None:
    state = make_snapshot(position, layout=BIG)
    save_and_load(disk_path, aligned(state), disk)
    save_and_load(disk_path / "other", state, disk)
    files = [
        {file.relative_to(folder): file.read_bytes() for file in (folder / "s" / "parts").rglob("*") if file.is_file()}
        for folder in (disk_path, disk_path / "other")
    ]
    assert files[0] == files[1]


def test_many_lengths_round_trip(disk_path: Path) -> None:
    with Store.open(str(disk_path / "s")) as store:
        for rows in (1, 340, 341, 342, 1365, 2047, 2048, 2049):  # around the length from which transfers are direct
            state = make_snapshot(rows, layout=BIG, seed=rows)
            node = make_node(rows)
            store.record(node)
            store.save(node.id, state, FINGERPRINT, reason="pause")
            assert same_bits(store.load(node.id), state)


def resident_share(file: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        view = np.frombuffer(mapped, np.uint8)
        address = view.ctypes.data
        del view  # or the mapping could not be closed
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), found) == 0
        return sum(entry & 1 for entry in found) / pages


def test_a_save_and_a_load_leave_the_page_cache_to_others(disk_path: Path) -> None:
    """B125: of 64 MiB saved and loaded, less than a quarter stays in the page cache."""
    layout = StateLayout(
        kda_shape=(16, 16, 128, 128),
        conv_shape=(16, 3, 3, 2048),
        mla_layers=4,
        latent_width=576,
        latent_type=LAYOUT.latent_type,
        page_tokens=512,
        vocab=1000,
    )
    state = make_snapshot(6000, layout=layout)
    assert state.size_bytes > 64 << 20
    save_and_load(disk_path, state, Disk())
    files = [file for file in (disk_path / "s" / "parts").rglob("*") if file.is_file()]
    resident = sum(resident_share(file) * file.stat().st_size for file in files)
    assert resident < 0.25 * sum(file.stat().st_size for file in files)


def test_buffers_are_aligned_and_used_again() -> None:
    with aligned_buffer() as first, aligned_buffer() as second:
        assert first.ctypes.data % BLOCK_BYTES == second.ctypes.data % BLOCK_BYTES == 0
        assert first.size == BUFFER_BYTES
        assert first.ctypes.data != second.ctypes.data
        addresses = {first.ctypes.data, second.ctypes.data}
    with aligned_buffer() as third:
        assert third.ctypes.data in addresses


def test_large_tensors_begin_on_a_block_of_their_file() -> None:
    for specs in (state_specs(BIG, LOSSLESS, 2), page_specs(BIG, LOSSLESS, 2048), logits_specs(BIG)):
        assert (PART_HEADER_BYTES + len(safetensors_header(specs))) % BLOCK_BYTES == 0
    assert len(safetensors_header(page_specs(BIG, LOSSLESS, 5))) < 200
