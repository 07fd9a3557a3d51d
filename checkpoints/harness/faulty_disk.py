"""A disk with one fault: what `faults` gives a store to work on."""

import errno
import os
import signal
from collections.abc import Sequence
from enum import Enum

from serai.checkpoints.files.disk import Disk
from serai.checkpoints.harness.power import Unsynced


class Fault(Enum):
    """What happens at the chosen call."""

    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"
    TORN = "killed half-way through a write"
    POWER_CUT = "power cut after"
    NO_SPACE = "no space from then on"
    IO_ERROR = "one input/output error"
    SHORT = "a short write"


class FaultyDisk(Disk):
    """A disk with one fault at the call number `at`, counted from 0 over all calls that change something."""

    def __init__(self, at: int | None = None, fault: Fault = Fault.KILLED_BEFORE) -> None:
        self.at = at
        self.fault = fault
        self.calls: list[str] = []
        self._unsynced = Unsynced()

    def _before(self, call: str) -> bool:
        """Count a call, fail or be killed if it is the one; whether it is."""
        number = len(self.calls)
        self.calls.append(call)
        chosen = number == self.at
        if chosen and self.fault is Fault.KILLED_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if chosen and self.fault is Fault.IO_ERROR and call != "passing":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        full = self.at is not None and number >= self.at and self.fault is Fault.NO_SPACE
        if full and call in ("make_folder", "create", "write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return chosen

    def _after(self, chosen: bool) -> None:
        if chosen and self.fault is Fault.POWER_CUT:
            self._unsynced.cut_power()
        if chosen and self.fault in (Fault.KILLED_AFTER, Fault.POWER_CUT):
            os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, name: str, *, parent: int) -> None:
        chosen = self._before("make_folder")
        super().make_folder(name, parent=parent)
        self._unsynced.made_folder(name, parent)
        self._after(chosen)

    def create(self, name: str, *, folder: int, direct: bool = False) -> int:
        chosen = self._before("create")
        fd = super().create(name, folder=folder, direct=direct)
        self._after(chosen)
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        chosen = self._before("write")
        half = chosen and self.fault in (Fault.TORN, Fault.SHORT) and data.nbytes > 1
        written = super().write(fd, data[: data.nbytes // 2] if half else data)
        self._unsynced.wrote(fd)
        if chosen and self.fault is Fault.TORN:
            os.kill(os.getpid(), signal.SIGKILL)
        self._after(chosen)
        return written

    def write_vector(self, fd: int, pieces: Sequence[memoryview]) -> int:
        return self.write(fd, next(piece for piece in pieces if piece.nbytes))

    def fsync(self, fd: int) -> None:
        chosen = self._before("fsync")
        super().fsync(fd)
        self._unsynced.synced(fd)
        self._after(chosen)

    def rename(self, name: str, new_name: str, *, folder: int, new_folder: int) -> None:
        chosen = self._before("rename")
        self._unsynced.renaming(name, new_name, folder, new_folder)
        super().rename(name, new_name, folder=folder, new_folder=new_folder)
        self._after(chosen)

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        chosen = self._before("link")
        super().link(name, new_name, folder=folder)
        self._unsynced.linked(name, new_name, folder)
        self._after(chosen)

    def unlink(self, name: str, *, folder: int) -> None:
        chosen = self._before("unlink")
        self._unsynced.unlinking(name, folder)
        super().unlink(name, folder=folder)
        self._after(chosen)

    def passing(self, point: str) -> None:
        self._after(self._before("passing"))
