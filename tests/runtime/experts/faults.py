"""Disks that misbehave in one chosen way."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serai.runtime.experts.disk import DiskCalls


class ShortReads(DiskCalls):
    """Every read moves at most `most` bytes, and what lies behind them is rubbish."""

    def __init__(self, most: int) -> None:
        self.most = most

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        count = super().read(descriptor, out, offset)
        if count > self.most:
            out[self.most : count] = b"\xaa" * (count - self.most)
        return min(count, self.most)


class NoDirect(DiskCalls):
    """Direct reads are refused: when the file is opened, or only at the first read."""

    def __init__(self, *, at_open: bool) -> None:
        self.at_open = at_open
        self.direct: set[int] = set()
        self.forgotten: list[tuple[int, int]] = []

    def open(self, path: Path, *, direct: bool) -> int:
        if direct and self.at_open:
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = super().open(path, direct=False)
        if direct:
            self.direct.add(descriptor)
        return descriptor

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        if descriptor in self.direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().read(descriptor, out, offset)

    def forget(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.forgotten.append((offset, nbytes))
        super().forget(descriptor, offset, nbytes)

    def close(self, descriptor: int) -> None:
        self.direct.discard(descriptor)  # the system gives the number to another file
        super().close(descriptor)


class FailingReads(DiskCalls):
    """The reads numbered in `failing` (counted from 0 once `armed`) fail with EIO."""

    def __init__(self, failing: Callable[[int], bool]) -> None:
        self.failing = failing
        self.armed = False
        self.reads = 0
        self._lock = threading.Lock()

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        if self.armed:
            with self._lock:
                number, self.reads = self.reads, self.reads + 1
            if self.failing(number):
                raise OSError(errno.EIO, "Input/output error")
        return super().read(descriptor, out, offset)


class GatedReads(DiskCalls):
    """Once `armed`, reads wait until `gate` is opened: a slow disk without a clock."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.armed = False
        self.waiting = threading.Semaphore(0)

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        if self.armed:
            self.waiting.release()
            if not self.gate.wait(30):
                raise AssertionError("the test never opened the gate")
        return super().read(descriptor, out, offset)


class SlowReads(DiskCalls):
    """Every read takes a little longer, some more than others: reads end in another order than they began."""

    def __init__(self, longest_s: float = 4e-3) -> None:
        self.reads = 0
        self._longest_s = longest_s
        self._lock = threading.Lock()

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        with self._lock:
            self.reads += 1
            delay_s = (self.reads * 7 % 5) / 4 * self._longest_s
        time.sleep(delay_s)
        return super().read(descriptor, out, offset)
