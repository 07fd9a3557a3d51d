"""The operating-system calls a store makes, one method each, so that a test can fail or kill any of them.

Every name is relative to an open folder and never follows a symlink; files are born 0600 and folders 0700 whatever the
umask allows.
"""

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from serai.checkpoints.errors import StoreFailed, StoreFull

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Disk:
    """The real disk. Subclasses override single calls to inject faults."""

    def open_folder(self, name: str, *, parent: int | None) -> int:
        """A descriptor of the folder `name`; `OSError` if it is missing, no folder or (below a parent) a symlink."""
        nofollow = 0 if parent is None else os.O_NOFOLLOW
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | nofollow, dir_fd=parent)

    def make_folder(self, name: str, *, parent: int) -> None:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent)

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        """A descriptor of a new, empty file; `FileExistsError` if anything, a symlink included, has the name.

        `direct` asks for transfers past the page cache and is dropped where the file system has none.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, FILE_MODE, dir_fd=folder)
        if direct:
            self._use_direct(fd)
        return fd

    def open(self, name: str, *, folder: int, direct: bool = False) -> int:
        """A descriptor for reading; `OSError` if the name is missing or a symlink.

        Never waits for a pipe put in its place. `direct` as for `create`.
        """
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if direct:
            self._use_direct(fd)
        return fd

    def _use_direct(self, fd: int) -> None:
        with suppress(OSError):  # not offered by every file system; the page cache then serves
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def use_page_cache(self, fd: int) -> bool:
        """Make further transfers go through the page cache; whether they did not before."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return bool(flags & os.O_DIRECT)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def write_vector(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write several pieces in one call; like `write` it may stop short."""
        return os.writev(fd, pieces)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def read_vector(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read into several pieces in one call; like `read` it may stop short."""
        return os.preadv(fd, into, offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        """Give a file a second name; `FileExistsError` if anything has it."""
        os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def unlink(self, name: str, *, folder: int) -> None:
        os.unlink(name, dir_fd=folder)

    def passing(self, point: str) -> None:
        """Called at named points between other calls, such as before and after the index commits; does nothing here."""

    def forget_pages(self, fd: int) -> None:
        """Ask the kernel to drop the file from the page cache, which belongs to the weights."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class ReadOnlyDisk(Disk):
    """A disk on which nothing can be changed, whatever the file system would allow."""

    def make_folder(self, name: str, *, parent: int) -> None:
        raise _read_only()

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        raise _read_only()

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        raise _read_only()

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        raise _read_only()

    def unlink(self, name: str, *, folder: int) -> None:
        raise _read_only()


def _read_only() -> OSError:
    return OSError(errno.EROFS, "it was opened for reading only")


def mapped(error: OSError, *, path: str, doing: str) -> StoreFull | StoreFailed:
    """The error of this project that an `OSError` on a store stands for."""
    if error.errno in _FULL:
        return StoreFull(path=path, doing=doing)
    return StoreFailed(path=path, doing=doing, reason=error.strerror or str(error))
