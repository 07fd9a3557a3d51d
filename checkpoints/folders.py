"""Folders held open by descriptor: whole files written durably, read back completely, and found without a path."""

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from serai.checkpoints.disk import Disk
from serai.checkpoints.errors import SnapshotCorrupt

Buffer = bytes | bytearray | memoryview


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

    def write_temporary(self, pieces: Iterable[Buffer], *, keep_cached: bool) -> str:
        """Write a new file under a random name, fsync it and return the name. A failed one is removed again."""
        name = f"{secrets.token_hex(16)}.tmp"
        fd = self.disk.create(name, folder=self.fd)
        try:
            try:
                for piece in pieces:
                    self._write_all(fd, memoryview(piece).cast("B"))
                self.disk.fsync(fd)
                if not keep_cached:
                    self.disk.forget_pages(fd)
            finally:
                os.close(fd)
        except OSError:
            self.remove(name)
            raise
        return name

    def _write_all(self, fd: int, data: memoryview) -> None:
        while data.nbytes:
            written = self.disk.write(fd, data)
            data = data[written:]

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
    def reading(self, name: str, what: str) -> Iterator["Reader"]:
        """A reader of a regular file; `FileNotFoundError` if missing, `SnapshotCorrupt` if it is something else."""
        try:
            fd = self.disk.open(name, folder=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SnapshotCorrupt(what=what, problem=f"its file cannot be opened ({error.strerror})") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SnapshotCorrupt(what=what, problem="its name belongs to something that is no regular file")
            yield Reader(self.disk, fd, status.st_size, what)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Reader:
    """An open regular file of `size_bytes`, read by offset."""

    disk: Disk
    fd: int
    size_bytes: int
    what: str

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; `SnapshotCorrupt` if the file ends first. Short reads are continued."""
        done = 0
        while done < view.nbytes:
            count = self.disk.read(self.fd, view[done:], offset + done)
            if count == 0:
                raise SnapshotCorrupt(
                    what=self.what, problem=f"its file ended at byte {offset + done} of {offset + view.nbytes}"
                )
            done += count

    def read(self, count: int, offset: int) -> bytearray:
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data

    def forget_pages(self) -> None:
        self.disk.forget_pages(self.fd)
