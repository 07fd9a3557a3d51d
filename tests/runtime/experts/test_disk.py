"""Large reads, direct and buffered."""

import os
import signal
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.runtime.errors import WeightsInvalid
from serai.runtime.experts.cache import PAGE_BYTES, aligned_bytes
from serai.runtime.experts.disk import DiskCalls, DiskFile, ReadMode, reads_reach_disk
from serai.runtime.experts.errors import FileEnded
from tests.runtime.experts.faults import NoDirect, ShortReads

SIZE = 5 * PAGE_BYTES + 123


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, NDArray[np.uint8]]:
    data = np.random.default_rng(3).integers(0, 256, SIZE, dtype=np.uint8)
    path = tmp_path / "records"
    path.write_bytes(data.tobytes())
    return path, data


def read(file: DiskFile, offset: int, pages: int, needed: int | None = None) -> NDArray[np.uint8]:
    out = aligned_bytes(pages * PAGE_BYTES)
    file.read(offset, out, pages * PAGE_BYTES if needed is None else needed)
    return out


def ways() -> list[DiskCalls]:
    return [
        DiskCalls(),
        NoDirect(at_open=True),
        NoDirect(at_open=False),
        ShortReads(PAGE_BYTES),
        ShortReads(1000),
        ShortReads(PAGE_BYTES + 1),
    ]


@pytest.mark.parametrize("calls", ways(), ids=lambda calls: f"{type(calls).__name__}{vars(calls)}")
def test_every_way_of_reading_gives_the_same_bytes(stored: tuple[Path, NDArray[np.uint8]], calls: DiskCalls) -> None:
    """B121, B123."""
    path, data = stored
    file = DiskFile.open(path, calls)
    assert np.array_equal(read(file, 0, 5), data[: 5 * PAGE_BYTES])
    assert np.array_equal(read(file, 2 * PAGE_BYTES, 2), data[2 * PAGE_BYTES : 4 * PAGE_BYTES])
    tail = read(file, 4 * PAGE_BYTES, 2, PAGE_BYTES + 123)  # a read at the unaligned end of the file
    assert np.array_equal(tail[: PAGE_BYTES + 123], data[4 * PAGE_BYTES :])
    file.close()
    file.close()


def test_direct_reads_that_are_refused_fall_back_and_drop_their_pages(stored: tuple[Path, NDArray[np.uint8]]) -> None:
    """B121."""
    path, _ = stored
    for calls in (NoDirect(at_open=True), NoDirect(at_open=False)):
        file = DiskFile.open(path, calls)
        assert file.mode is ReadMode.BUFFERED
        read(file, PAGE_BYTES, 2)
        assert calls.forgotten == [(PAGE_BYTES, 2 * PAGE_BYTES)]
        file.close()


def test_memory_file_systems_are_told_from_disks(tmp_path: Path) -> None:
    """B121: a bypass that is none must not pass as a disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or not Path("/proc/self/io").exists():
        pytest.skip("needs /dev/shm and /proc/self/io")
    path = memory / f"serai-test-{os.getpid()}"
    try:
        path.write_bytes(bytes(2 * PAGE_BYTES))
        file = DiskFile.open(path)
        assert reads_reach_disk(file) is False
        file.close()
    finally:
        path.unlink(missing_ok=True)


def test_a_file_cut_after_opening_is_an_error_that_says_where_it_ends(stored: tuple[Path, NDArray[np.uint8]]) -> None:
    """B25, B123."""
    path, _ = stored
    for calls in (DiskCalls(), NoDirect(at_open=True), ShortReads(1000)):
        os.truncate(path, SIZE)
        file = DiskFile.open(path, calls)
        os.truncate(path, PAGE_BYTES + 10)
        with pytest.raises(FileEnded, match=r"records ended at 4,106 of 12,288 bytes"):
            read(file, PAGE_BYTES, 2)
        file.close()


def test_no_read_ends_early_when_the_disk_gives_nothing(stored: tuple[Path, NDArray[np.uint8]]) -> None:
    """B123: reads of 4,096 bytes, then of none."""

    class DriesUp(DiskCalls):
        reads = 0

        def read(self, descriptor: int, out: memoryview, offset: int) -> int:
            self.reads += 1
            return super().read(descriptor, out[:PAGE_BYTES], offset) if self.reads < 4 else 0

    file = DiskFile.open(stored[0], DriesUp())
    with pytest.raises(FileEnded, match=r"ended at 20,603 of 16,384"):
        read(file, 0, 4)
    file.close()


def test_signals_do_not_disturb_reads(stored: tuple[Path, NDArray[np.uint8]]) -> None:
    """B124."""
    path, data = stored
    handled = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled
        handled += 1

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        file = DiskFile.open(path, ShortReads(1000))
        for _ in range(2000):
            assert np.array_equal(read(file, 0, 5), data[: 5 * PAGE_BYTES])
            if handled > 20:
                break
        file.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled > 20


def test_unaligned_reads_are_refused_in_every_mode(stored: tuple[Path, NDArray[np.uint8]]) -> None:
    file = DiskFile.open(stored[0], NoDirect(at_open=True))
    for offset, out in ((1, aligned_bytes(PAGE_BYTES)), (0, aligned_bytes(2 * PAGE_BYTES)[1 : PAGE_BYTES + 1])):
        with pytest.raises(ValueError, match="whole pages"):
            file.read(offset, out, 10)
    with pytest.raises(ValueError, match="4,097 bytes do not fit 4,096"):
        file.read(0, aligned_bytes(PAGE_BYTES), PAGE_BYTES + 1)
    file.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsInvalid, match="nowhere can't be opened"):
        DiskFile.open(tmp_path / "nowhere")
