"""Whole files written and read from front to back, past the page cache where the file system allows.

Direct transfers move whole blocks between the disk and an aligned buffer of ours; large parts go this way, because the
page cache belongs to the weights, and because a copy less is what keeps up with the disk. Wherever a file system, or a
transfer that stopped in the middle of a block, does not allow it, the rest goes through the page cache.
"""

import errno
import math
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files.disk import Disk

Buffer = bytes | bytearray | memoryview

BLOCK_BYTES: Final = 4096
# A page of K3's latents in one write: with 1 MiB, growing the file four times over took a third more time.
BUFFER_BYTES: Final = 1 << 22
DIRECT_FROM_BYTES: Final = 1 << 18

_free: list[NDArray[np.uint8]] = []
_free_lock: Final = threading.Lock()


@contextmanager
def aligned_buffer() -> Iterator[NDArray[np.uint8]]:
    """A page-aligned uint8 buffer of `BUFFER_BYTES` for this block alone, taken from those given back before."""
    with _free_lock:
        buffer = _free.pop() if _free else None
    if buffer is None:
        buffer = np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), np.uint8)
    try:
        yield buffer
    finally:
        with _free_lock:
            _free.append(buffer)


def write_pieces(disk: Disk, fd: int, pieces: Iterable[Buffer], *, direct: bool) -> None:
    """Write all pieces one after the other into a new file; short writes are continued.

    A direct write needs them to be whole blocks in all (ValueError): cutting off the rest of a last block afterwards
    would cost as much again as writing it.
    """
    if not direct:
        for piece in pieces:
            _write_all(disk, fd, memoryview(piece).cast("B"))
        return
    with aligned_buffer() as buffer:
        filled = 0
        for piece in pieces:
            rest = np.frombuffer(piece, np.uint8) if memoryview(piece).nbytes else buffer[:0]
            if filled % BLOCK_BYTES == 0 and (whole := _whole_blocks(rest)):
                _write_vector(disk, fd, [buffer[:filled].data, rest[:whole].data])
                filled, rest = 0, rest[whole:]
            while rest.size:
                count = min(buffer.size - filled, rest.size)
                buffer[filled : filled + count] = rest[:count]
                filled += count
                rest = rest[count:]
                if filled == buffer.size:
                    _write_all(disk, fd, buffer.data)
                    filled = 0
        if filled % BLOCK_BYTES:
            raise ValueError(f"a direct write ends {filled % BLOCK_BYTES} bytes into a block")
        _write_all(disk, fd, buffer[:filled].data)


def _whole_blocks(memory: NDArray[np.uint8]) -> int:
    """How many bytes of `memory` a direct transfer can take as they lie: whole blocks, if it begins on one."""
    return 0 if memory.ctypes.data % BLOCK_BYTES else memory.size // BLOCK_BYTES * BLOCK_BYTES


def _write_vector(disk: Disk, fd: int, pieces: list[memoryview]) -> None:
    """Write all pieces, in one call if the disk does so, else what is left of them one after the other."""
    try:
        done = disk.write_vector(fd, pieces)
    except OSError as error:
        if error.errno != errno.EINVAL or not disk.use_page_cache(fd):
            raise
        done = 0
    if done % BLOCK_BYTES:
        disk.use_page_cache(fd)
    for piece in pieces:
        skipped = min(done, piece.nbytes)
        done -= skipped
        _write_all(disk, fd, piece[skipped:])


def _write_all(disk: Disk, fd: int, data: memoryview) -> None:
    while data.nbytes:
        try:
            written = disk.write(fd, data)
        except OSError as error:
            if error.errno != errno.EINVAL or not disk.use_page_cache(fd):
                raise
            continue
        if written % BLOCK_BYTES:
            disk.use_page_cache(fd)
        data = data[written:]


class Reader:
    """An open regular file of `size_bytes`, read once from front to back."""

    def __init__(self, disk: Disk, fd: int, size_bytes: int, what: str, buffer: NDArray[np.uint8] | None) -> None:
        """With an aligned `buffer` the descriptor was opened for direct reads."""
        self.size_bytes: Final = size_bytes
        self.what: Final = what
        self._disk = disk
        self._fd = fd
        self._buffer = buffer
        self._start = self._end = 0  # what is in the buffer and not taken yet
        self._offset = 0  # of the next byte to read from the file
        self._ahead: list[NDArray[np.uint8]] = []  # what follows the buffer and is in memory of the caller's already

    def read_ahead(self, first_bytes: int, out: Sequence[NDArray[np.uint8]]) -> None:
        """Read the first `first_bytes` of the file, and what follows into `out`, in a single call if that is possible.

        To be called first. The bytes are had by `take` and by `fill` of the same arrays as if they were read then;
        whoever asks for others reads them anew.
        """
        if self._buffer is None or first_bytes % BLOCK_BYTES or first_bytes > self._buffer.size:
            return
        whole = [_whole_blocks(piece) for piece in out]
        if any(count < piece.size for count, piece in zip(whole[:-1], out[:-1], strict=True)):
            return
        pieces = [piece[:count] for piece, count in zip(out, whole, strict=True) if count]
        try:
            done = self._disk.read_vector(self._fd, [self._buffer[:first_bytes].data, *(one.data for one in pieces)], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return
        if done < first_bytes:
            return
        self._end = self._offset = first_bytes
        done -= first_bytes
        for piece in pieces:
            if done < piece.size:
                break
            self._ahead.append(piece)
            done -= piece.size

    def take(self, count: int) -> bytearray:
        """The next `count` bytes; `SnapshotCorrupt` if the file ends first."""
        data = bytearray(count)
        self.fill(np.frombuffer(data, np.uint8) if count else np.empty(0, np.uint8))
        return data

    def fill(self, out: NDArray[np.uint8]) -> None:
        """Fill `out` with the next bytes; `SnapshotCorrupt` if the file ends first. Short reads are continued."""
        if self._buffer is None:
            self._read_at_least(out, out.size)
            return
        while out.size:
            if self._start == self._end:
                if self._ahead and (known := self._ahead.pop(0)).ctypes.data == out.ctypes.data:
                    self._offset += known.size
                    out = out[known.size :]
                    continue
                self._ahead.clear()
                whole = _whole_blocks(out) if self._offset and self._offset % BLOCK_BYTES == 0 else 0
                if whole:
                    self._read_at_least(out[:whole], whole)
                    out = out[whole:]
                    continue
                self._refill()
            count = min(out.size, self._end - self._start)
            out[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            out = out[count:]

    def _refill(self) -> None:
        """Read the next blocks into the buffer: of a large file one at first, so that what follows needs no copy."""
        assert self._buffer is not None
        most = BLOCK_BYTES if self._offset == 0 and self.size_bytes >= DIRECT_FROM_BYTES else self._buffer.size
        # Whole blocks until the file's end, at which a direct read stops short by itself.
        wanted = min(most, self.size_bytes - self._offset)
        self._start, self._end = 0, wanted
        blocks = -(-wanted // BLOCK_BYTES) * BLOCK_BYTES
        self._read_at_least(self._buffer[:blocks], max(wanted, 1))

    def limit_buffer(self, count: int) -> None:
        """Read at most `count` bytes, a whole number of blocks, at a time."""
        if self._buffer is not None:
            self._buffer = self._buffer[:count]

    def _read_at_least(self, out: NDArray[np.uint8], count: int) -> None:
        done = 0
        while done < count:
            try:
                got = self._disk.read(self._fd, out[done:].data, self._offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._disk.use_page_cache(self._fd):
                    raise
                continue
            if got == 0:
                promised = self._offset + count - done
                raise SnapshotCorrupt(what=self.what, problem=f"its file ended at byte {self._offset} of {promised}")
            if got % BLOCK_BYTES and done + got < count:
                self._disk.use_page_cache(self._fd)
            done += got
            self._offset += got


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """An uninitialised array that begins on a block, so that the store need not copy it: the best home for a state."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + BLOCK_BYTES, np.uint8)
    start = -memory.ctypes.data % BLOCK_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)
