"""What a disk can do, to hold a store against: the same bytes written and read past the page cache, nothing else.

As many threads as the store uses, one file each; whole blocks, in transfers of a few megabytes, and fsync at the end.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.report import BenchFailed

BLOCK_BYTES = 4096
TRANSFER_BYTES = 4 << 20

Memory = NDArray[Any]


class NoDirectTransfers(BenchFailed):
    """The file system can't go past the page cache, so there is no disk speed to compare with."""


def write_raw(folder: Path, memory: Sequence[Memory], threads: int) -> tuple[float, int]:
    """Write all of `memory` below `folder` and make it durable; seconds and bytes. Leaves its files for `read_raw`."""
    return _timed(folder, memory, threads, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.pwrite, lambda fd: os.fsync(fd))


def read_raw(folder: Path, memory: Sequence[Memory], threads: int) -> tuple[float, int]:
    """Read what `write_raw` left into `memory` of the same sizes; seconds and bytes."""

    def read(fd: int, piece: memoryview, offset: int) -> int:
        return os.preadv(fd, [piece], offset)

    return _timed(folder, memory, threads, os.O_RDONLY, read, lambda fd: None)


def drop_page_cache(folder: Path) -> None:
    """Let go of what the system caches of the files below `folder`, so that reading them means the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _timed(
    folder: Path,
    memory: Sequence[Memory],
    threads: int,
    flags: int,
    transfer: Callable[[int, memoryview, int], int],
    end: Callable[[int], None],
) -> tuple[float, int]:
    shares = _shares(memory, threads)

    def work(number: int) -> None:
        with _direct(folder / f"raw-{number}", flags) as fd:
            offset = 0
            for piece in shares[number]:
                if transfer(fd, piece, offset) != piece.nbytes:
                    raise BenchFailed(f"a transfer of {piece.nbytes} bytes below {folder} stopped short")
                offset += piece.nbytes
            end(fd)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return time.perf_counter() - began_s, sum(piece.nbytes for share in shares for piece in share)


def _shares(memory: Sequence[Memory], threads: int) -> list[list[memoryview]]:
    """Transfers for each thread; what doesn't fill a block, less than that for each array, is left out."""
    shares: list[list[memoryview]] = [[] for _ in range(threads)]
    number = 0
    for array in memory:
        data = array.reshape(-1).view(np.uint8)
        if data.ctypes.data % BLOCK_BYTES:
            raise ValueError("direct transfers need memory that begins on a block")
        whole = data[: data.size // BLOCK_BYTES * BLOCK_BYTES]
        for start in range(0, whole.size, TRANSFER_BYTES):
            shares[number % threads].append(whole[start : start + TRANSFER_BYTES].data)
            number += 1
    return shares


@contextmanager
def _direct(file: Path, flags: int) -> Any:
    """The open file, past the page cache. `NoDirectTransfers` where the file system has no such thing."""
    try:
        fd = os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise NoDirectTransfers(
                f"{file.parent} has no direct transfers to compare with; name another --dir"
            ) from None
        raise
    try:
        yield fd
    finally:
        os.close(fd)
