"""Disks that misbehave on purpose, or note what was asked of them."""

import errno
import os
import threading
from collections.abc import Callable, Sequence

from serai.checkpoints.files.disk import Disk


class ScalarDisk(Disk):
    """Moves one piece of several at a time, so that a subclass need override `write` and `read` alone."""

    def write_vector(self, fd: int, pieces: Sequence[memoryview]) -> int:
        return self.write(fd, next(piece for piece in pieces if piece.nbytes))

    def read_vector(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        return self.read(fd, next(piece for piece in into if piece.nbytes), offset)


class TracingDisk(ScalarDisk):
    """Notes every call that changes the disk, by name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}

    def _name(self, fd: int) -> str:
        target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        return target.rsplit("/", 1)[-1]

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        self.calls.append(("create", name))
        return super().create(name, folder=folder, direct=direct)

    def write(self, fd: int, data: memoryview) -> int:
        self.calls.append(("write", self._name(fd)))
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self.calls.append(("fsync", self._name(fd)))
        super().fsync(fd)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        self.calls.append(("rename", f"{name} -> {self._name(new_folder)}/{new_name}"))
        super().rename(name, new_name, folder=folder, new_folder=new_folder)


class ShortDisk(ScalarDisk):
    """Writes and reads at most `most_bytes` at a time."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes

    def write(self, fd: int, data: memoryview) -> int:
        return super().write(fd, data[: self.most_bytes])

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        return super().read(fd, into[: self.most_bytes], offset)


class FailingDisk(ScalarDisk):
    """Raises `OSError(code)` in `call` while `broken` is set, from the n-th such call on."""

    def __init__(self, call: str, code: int = errno.ENOSPC, *, after: int = 0) -> None:
        self.call = call
        self.code = code
        self.left = after
        self.broken = True

    def _maybe(self, call: str) -> None:
        if self.broken and call == self.call:
            if self.left == 0:
                raise OSError(self.code, os.strerror(self.code))
            self.left -= 1

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        self._maybe("create")
        return super().create(name, folder=folder, direct=direct)

    def write(self, fd: int, data: memoryview) -> int:
        self._maybe("write")
        return super().write(fd, data)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._maybe("read")
        return super().read(fd, into, offset)

    def fsync(self, fd: int) -> None:
        self._maybe("fsync")
        super().fsync(fd)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        self._maybe("rename")
        super().rename(name, new_name, folder=folder, new_folder=new_folder)


class WaitingDisk(ScalarDisk):
    """While armed, makes `skip` files and stops before the next until `go` is set; `reached` says that it got there."""

    def __init__(self, skip: int = 0) -> None:
        self.skip = skip
        self.reached = threading.Event()
        self.go = threading.Event()
        self.armed = False

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        if self.armed and self.skip == 0:
            self.reached.set()
            assert self.go.wait(30)
        elif self.armed:
            self.skip -= 1
        return super().create(name, folder=folder, direct=direct)


def eventually(thread: threading.Thread, work: Callable[[], None]) -> None:
    """Run `work` and join `thread`, whatever `work` does."""
    try:
        work()
    finally:
        thread.join(30)
    assert not thread.is_alive()
