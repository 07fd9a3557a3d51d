"""Folders held open by descriptor: whole files written durably, read back completely, and found without a path."""

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files.disk import Disk
from serai.checkpoints.files.streams import DIRECT_FROM_BYTES, Buffer, Reader, aligned_buffer, write_pieces


@dataclass(frozen=True, slots=True)
class FreshFile:
    """A complete temporary file that is open still: its bytes may not be on the disk before `Folder.settle`."""

    name: str
    fd: int
    direct: bool


@dataclass(frozen=True, slots=True)
class Folder:
    """An open folder. Its descriptor stays valid when someone renames or replaces the path it was opened by."""

    disk: Disk
    fd: int

    def close(self) -> None:
        os.close(self.fd)

    @contextmanager
    def child(self, name: str, *, create: bool) -> Iterator["Folder"]:
        """The folder `name` inside this one, created if asked to, closed afterwards; `sync` makes a new one durable."""
        child = self.open_child(name, create=create)
        try:
            yield child
        finally:
            child.close()

    def open_child(self, name: str, *, create: bool) -> "Folder":
        try:
            return Folder(self.disk, self.disk.open_folder(name, parent=self.fd))
        except FileNotFoundError:
            if not create:
                raise
        with suppress(FileExistsError):  # another thread was faster; opening it decides whether it is a folder
            self.disk.make_folder(name, parent=self.fd)
        return Folder(self.disk, self.disk.open_folder(name, parent=self.fd))

    def names(self) -> list[str]:
        with os.scandir(self.fd) as entries:
            return [entry.name for entry in entries]

    def sync(self) -> None:
        self.disk.fsync(self.fd)

    def write_temporary(self, pieces: Iterable[Buffer], *, size_bytes: int, direct: bool) -> str:
        """Write a new file of `size_bytes` under a random name, fsync it and return the name.

        A failed one is removed again. `direct` keeps a large file, of whole blocks, out of the page cache.
        """
        return self.settle(self.write_fresh(pieces, size_bytes=size_bytes, direct=direct))

    def write_fresh(self, pieces: Iterable[Buffer], *, size_bytes: int, direct: bool) -> FreshFile:
        """As `write_temporary`, but the fsync is left to `settle`: many files that wait for it together cost the disk
        one flush, where each by itself costs one of its own.
        """
        name = f"{secrets.token_hex(16)}.tmp"
        direct = direct and size_bytes >= DIRECT_FROM_BYTES
        fresh = FreshFile(name, self.disk.create(name, folder=self.fd, direct=direct), direct)
        try:
            write_pieces(self.disk, fresh.fd, pieces, direct=direct)
        except BaseException:
            self.drop(fresh)
            raise
        return fresh

    def settle(self, fresh: FreshFile) -> str:
        """Have a fresh file on the disk, close it and return its name; one that fails is removed."""
        try:
            self.disk.fsync(fresh.fd)
            if fresh.direct:  # what the file system could not do directly
                self.disk.forget_pages(fresh.fd)
        except BaseException:
            self.drop(fresh)
            raise
        os.close(fresh.fd)
        return fresh.name

    def drop(self, fresh: FreshFile) -> None:
        """Close and remove a fresh file that nobody wants."""
        os.close(fresh.fd)
        self.remove(fresh.name)

    def publish(self, name: str, target: "Folder", new_name: str) -> None:
        """Move a temporary file to its final name in `target`, in one step. `target.sync()` makes that durable."""
        try:
            self.disk.rename(name, new_name, folder=self.fd, new_folder=target.fd)
        except OSError:
            self.remove(name)
            raise

    def remove(self, name: str) -> bool:
        """Unlink a file; whether it was there."""
        try:
            self.disk.unlink(name, folder=self.fd)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def reading(self, name: str, what: str, *, direct: bool = False) -> Iterator[Reader]:
        """A reader of a regular file; `FileNotFoundError` if missing, `SnapshotCorrupt` if it is something else."""
        try:
            fd = self.disk.open(name, folder=self.fd, direct=direct)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SnapshotCorrupt(what=what, problem=f"its file cannot be opened ({error.strerror})") from error
        with ExitStack() as stack:
            stack.callback(os.close, fd)
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SnapshotCorrupt(what=what, problem="its name belongs to something that is no regular file")
            buffer = stack.enter_context(aligned_buffer()) if direct else None
            yield Reader(self.disk, fd, status.st_size, what, buffer)
            if direct:
                self.disk.forget_pages(fd)
