"""What a disk gives: blocks in a row, and records of an expert's size at random, by reads in flight.

A file of random bytes is written into the folder, read past the page cache, and removed again. Reading at random is
`calibrate`, what a streaming model does when it is opened; each figure takes about `try_s`.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter
from serai.runtime.experts.cache import PAGE_BYTES, aligned_records
from serai.runtime.experts.calibrate import TRIED, Calibration, calibrate, rate_of
from serai.runtime.experts.disk import DiskCalls, DiskFile, ReadMode, reads_reach_disk

PROBE_BYTES = 1 << 30
"""Size of the file: several times what a disk's own memory holds of what was written last."""

FREE_SHARE = 4
"""The file takes at most one in so many of the bytes that are free."""

K3_RECORD_BYTES = 17_547_264
"""An expert of Kimi K3: three MXFP4 matrices of 3072 by 3584."""

BLOCK_BYTES = 4 << 20
SEQUENTIAL_TRIED = (1, 2, 4)
TRY_S = 0.4


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What was measured in `folder`. `sequential` pairs reads in flight with bytes a second, `random` is the same for
    records of `record_bytes`. `reaches_disk` is False where reads are served from memory in spite of the mode, None
    where the system doesn't tell."""

    folder: Path
    mode: ReadMode
    reaches_disk: bool | None
    file_bytes: int
    record_bytes: int
    block_bytes: int
    write_bytes_per_s: float
    sequential: tuple[tuple[int, float], ...]
    random: Calibration
    seconds: float

    def to_json(self) -> dict[str, object]:
        def rates(tried: Sequence[tuple[int, float]]) -> list[dict[str, float]]:
            return [{"in_flight": count, "bytes_per_s": rate} for count, rate in tried]

        return {
            "folder": str(self.folder),
            "mode": self.mode.value,
            "reaches_disk": self.reaches_disk,
            "file_bytes": self.file_bytes,
            "record_bytes": self.record_bytes,
            "block_bytes": self.block_bytes,
            "write_bytes_per_s": self.write_bytes_per_s,
            "sequential": rates(self.sequential),
            "random": rates(self.random.tried),
            "reads_in_flight": self.random.reads_in_flight,
            "bytes_per_s": self.random.bytes_per_s,
            "seconds": self.seconds,
        }


def measure_disk(
    folder: Path,
    *,
    record_bytes: int = K3_RECORD_BYTES,
    probe_bytes: int = PROBE_BYTES,
    try_s: float = TRY_S,
    tell: Callable[[str], None] = lambda _: None,
    calls: DiskCalls | None = None,
) -> DiskSpeed:
    """Write, read and remove a file of at most `probe_bytes` in `folder`.

    `record_bytes` is rounded up to whole pages. Raises `BadParameter` when the folder can't be written to or has no
    room for two records.
    """
    if record_bytes < 1:
        raise BadParameter(f"a read is of at least 1 byte, not {record_bytes}")
    record_bytes = -(-record_bytes // PAGE_BYTES) * PAGE_BYTES
    began_s = time.monotonic()
    room = min(probe_bytes, _free_bytes(folder) // FREE_SHARE)
    records = room // record_bytes
    if records < 2:
        raise BadParameter(
            f"{folder} has room for a file of {room:,} bytes to measure with, but two reads of {record_bytes:,} are "
            "needed; name another folder"
        )
    tell(f"writing {records * record_bytes / 1e9:.2f} GB into {folder}")
    with _probe_file(folder, records * record_bytes) as (path, write_rate):
        file = DiskFile.open(path, calls)
        try:
            reached = reads_reach_disk(file)
            probe = _Probe(file, records, record_bytes)
            memory = aligned_records(min(max(TRIED), records), max(record_bytes, BLOCK_BYTES))
            tell("reading blocks in a row")
            blocks = _Blocks(file)
            sequential = tuple(
                (count, rate_of([partial(blocks.read, one) for one in memory[:count]], try_s))
                for count in SEQUENTIAL_TRIED
            )
            tell("reading records at random")
            random = calibrate(probe, [one[:record_bytes] for one in memory], try_s=try_s)
        finally:
            file.close()
    return DiskSpeed(
        folder=folder,
        mode=random.mode,
        reaches_disk=reached,
        file_bytes=records * record_bytes,
        record_bytes=record_bytes,
        block_bytes=BLOCK_BYTES,
        write_bytes_per_s=write_rate,
        sequential=sequential,
        random=random,
        seconds=time.monotonic() - began_s,
    )


class _Probe:
    """The file as the records that `calibrate` reads."""

    layers = (0,)
    scratch_bytes = 0

    def __init__(self, file: DiskFile, records: int, record_bytes: int) -> None:
        self.experts = records
        self.mode: ReadMode = file.mode
        self._file = file
        self._record_bytes = record_bytes

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        self._file.read(expert * self._record_bytes, record, self._record_bytes)
        return self._record_bytes


class _Blocks:
    """Reads the file's blocks in the order they lie in it, whoever asks, and from its start again at its end."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._nbytes = min(file.size_bytes, BLOCK_BYTES)
        self._blocks = max(1, file.size_bytes // BLOCK_BYTES)
        self._lock = threading.Lock()
        self._next = 0

    def read(self, out: NDArray[np.uint8]) -> int:
        with self._lock:
            block, self._next = self._next, (self._next + 1) % self._blocks
        self._file.read(block * BLOCK_BYTES, out[: self._nbytes], self._nbytes)
        return self._nbytes


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        raise BadParameter(f"{folder} can't be measured ({error.strerror}); name a folder that exists") from None


@contextmanager
def _probe_file(folder: Path, nbytes: int) -> Iterator[tuple[Path, float]]:
    """A durable file of random bytes, and the bytes a second it was written with; it is gone afterwards."""
    block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    try:
        with NamedTemporaryFile(dir=folder, prefix=".serai-io-", suffix=".bin") as file:
            began_s = time.monotonic()
            for start in range(0, nbytes, BLOCK_BYTES):
                block[:8] = np.frombuffer(start.to_bytes(8, "little"), np.uint8)  # no two alike, to be stored once
                file.write(block.data[: nbytes - start])
            file.flush()
            os.fsync(file.fileno())
            rate = nbytes / (time.monotonic() - began_s)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            yield Path(file.name), rate
    except OSError as error:
        raise BadParameter(
            f"{folder} can't be measured: writing or reading a file of {nbytes:,} bytes failed ({error.strerror})"
        ) from error
