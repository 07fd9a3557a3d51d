"""Large reads that pass the page cache by, where the file system allows it.

Direct reads (`O_DIRECT`) must begin and end at whole pages of file and memory. Some file systems accept the flag when
the file is opened and refuse the read, so a file is opened by trying: one aligned read decides its mode. Where direct
reads are refused, ordinary ones are made and the pages they leave behind are dropped again, so that reading a model
never pushes everything else out of memory.
"""

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import WeightsInvalid
from serai.runtime.experts.cache import PAGE_BYTES, aligned_bytes
from serai.runtime.experts.errors import FileEnded

_DIRECT: int | None = getattr(os, "O_DIRECT", None)
_HAS_ADVICE = hasattr(os, "posix_fadvise")


class ReadMode(Enum):
    """How a file is read; the value is the word for people."""

    DIRECT = "direct"
    BUFFERED = "buffered"


class DiskCalls:
    """The operating-system calls made on model files, one method each, so that a test can delay or fail any of them."""

    def open(self, path: Path, *, direct: bool) -> int:
        """A descriptor for reading; `OSError` if the file or the mode is refused."""
        if direct and _DIRECT is None:
            raise OSError("this system has no direct reads")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (_DIRECT or 0 if direct else 0))

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        """Read at most `len(out)` bytes; Python itself repeats a call that a signal interrupted."""
        return os.preadv(descriptor, [out], offset)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def expect_random(self, descriptor: int) -> None:
        """Tell the kernel not to read ahead: the next record wanted is anywhere."""
        if _HAS_ADVICE:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def forget(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Let go of the pages of these bytes."""
        if _HAS_ADVICE:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


class DiskFile:
    """One model file open for large reads; any number of threads may read at once."""

    def __init__(self, path: Path, calls: DiskCalls, buffered: int, direct: int | None) -> None:
        self.path = path
        self.mode = ReadMode.BUFFERED if direct is None else ReadMode.DIRECT
        self.size_bytes = calls.size(buffered)
        self._calls = calls
        self._buffered = buffered
        self._direct = direct

    @classmethod
    def open(cls, path: Path, calls: DiskCalls | None = None) -> "DiskFile":
        """Open a file and find out how it can be read. Raises `WeightsInvalid` when it can't be read at all."""
        calls = DiskCalls() if calls is None else calls
        try:
            buffered = calls.open(path, direct=False)
        except OSError as error:
            raise WeightsInvalid(f"{path} can't be opened ({error.strerror})") from error
        direct = None
        try:
            direct = _open_direct(path, calls)
            if direct is None:
                calls.expect_random(buffered)
            return cls(path, calls, buffered, direct)
        except BaseException:
            for descriptor in (buffered, direct):
                if descriptor is not None:
                    calls.close(descriptor)
            raise

    def read(self, offset: int, out: NDArray[np.uint8], needed_bytes: int) -> None:
        """Read at least the first `needed_bytes` of `out` from `offset` on.

        `offset`, the address of `out` and its length are multiples of `PAGE_BYTES`; what of `out` lies past the end of
        the file stays as it was. Raises `FileEnded` when the file ends before `needed_bytes`, `OSError` when the disk
        fails.
        """
        if offset % PAGE_BYTES or out.nbytes % PAGE_BYTES or out.ctypes.data % PAGE_BYTES:
            raise ValueError(f"reads are of whole pages, not of {out.nbytes:,} bytes at {offset:,}")
        if needed_bytes > out.nbytes:
            raise ValueError(f"{needed_bytes:,} bytes do not fit {out.nbytes:,}")
        view = out.data
        descriptor = self._buffered if self._direct is None else self._direct
        done = 0
        while done < needed_bytes:
            # One call moves at most 2 GiB, and may always move less than asked.
            count = self._calls.read(descriptor, view[done:], offset + done)
            if count == 0:
                raise FileEnded(
                    path=self.path, size_bytes=self._calls.size(descriptor), needed_bytes=offset + needed_bytes
                )
            done += count
            if done % PAGE_BYTES:
                descriptor = self._buffered  # a direct read can't go on from the middle of a page
        if descriptor == self._buffered:
            self._calls.forget(descriptor, offset, out.nbytes)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        buffered, direct, self._buffered, self._direct = self._buffered, self._direct, -1, None
        for descriptor in (buffered, direct):
            if descriptor is not None and descriptor >= 0:
                self._calls.close(descriptor)


class DiskFiles:
    """Model files by path, all open from the start: one that can't be read is found before a step needs it."""

    def __init__(self, paths: Sequence[Path], calls: DiskCalls | None = None) -> None:
        self._files: dict[Path, DiskFile] = {}
        try:
            for path in dict.fromkeys(paths):
                self._files[path] = DiskFile.open(path, calls)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, path: Path) -> DiskFile:
        return self._files[path]

    @property
    def mode(self) -> ReadMode:
        """DIRECT when every file can be read so."""
        direct = all(file.mode is ReadMode.DIRECT for file in self._files.values())
        return ReadMode.DIRECT if direct else ReadMode.BUFFERED

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _open_direct(path: Path, calls: DiskCalls) -> int | None:
    """A descriptor for direct reads, or None where one aligned read shows that there are none."""
    try:
        descriptor = calls.open(path, direct=True)
    except OSError:
        return None
    try:
        calls.read(descriptor, aligned_bytes(PAGE_BYTES).data, 0)
    except OSError:
        calls.close(descriptor)
        return None
    return descriptor


def reads_reach_disk(file: DiskFile) -> bool | None:
    """Whether reading the file's first page again really asks the storage device; None where the system doesn't tell.

    A file system may grant direct reads and serve them from memory (tmpfs does, ZFS may): then rates measured on it
    are not a disk's. Other threads must not read meanwhile.
    """
    page = aligned_bytes(PAGE_BYTES)
    needed = min(file.size_bytes, PAGE_BYTES)
    file.read(0, page, needed)
    before = _device_bytes()
    file.read(0, page, needed)
    after = _device_bytes()
    return None if before is None or after is None else after > before


def _device_bytes() -> int | None:
    """Bytes this process has had fetched from storage devices so far."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)
