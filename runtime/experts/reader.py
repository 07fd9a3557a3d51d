"""Reads experts into their slots: a few threads, each with one read under way, that never need the event loop.

The engine thread posts what it misses and collects what has ended; between the two it computes. What goes first is told
by `Rank`.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from serai.runtime.experts.cache import aligned_records
from serai.runtime.experts.errors import ExpertUnreadable, FileEnded
from serai.runtime.experts.source import ExpertSource

TRIES = 2
"""A read the disk failed is made once more: many such errors pass, and one that doesn't won't pass the third time."""


class Rank(IntEnum):
    """Whose reads go first: those that a step waits for, then those that a wide one comes to later, for which no answer
    is to wait, then those that are only guessed at."""

    WANTED = 0
    LATER = 1
    GUESSED = 2


@dataclass(frozen=True, slots=True)
class Read:
    """One expert to be read into a slot; `record` is the slot's memory."""

    layer: int
    expert: int
    slot: int
    record: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Ended:
    """A read that is over. With an `error` the slot holds nothing of use; any but `ExpertUnreadable` is our mistake."""

    read: Read
    error: Exception | None


@dataclass(frozen=True, slots=True)
class ReadCounters:
    """What the reader has done. `reading_s` is the time in which at least one read was under way."""

    reads: int = 0
    read_bytes: int = 0
    retries: int = 0
    failed: int = 0
    reading_s: float = 0.0


class ExpertReader:
    """`threads` readers of one source. Any thread may call it; in practice the engine thread alone does."""

    def __init__(self, source: ExpertSource, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"reading needs at least one thread, not {threads}")
        self._source = source
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._over = threading.Condition(self._lock)
        # By slot, in the order they came; a slot has at most one read.
        self._queues: dict[Rank, OrderedDict[int, Read]] = {rank: OrderedDict() for rank in Rank}
        self._ended: list[Ended] = []
        self._counters = ReadCounters()
        self._under_way = 0
        self._busy_since_s = 0.0
        self._closing = False
        scratch = aligned_records(threads, source.scratch_bytes)
        self.scratch_bytes = scratch.nbytes
        # Daemons, so that a process that dies without closing the runtime isn't held up by a disk that hangs.
        self._threads = [
            threading.Thread(target=self._run, args=(array,), name=f"serai-read-{number}", daemon=True)
            for number, array in enumerate(scratch)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        """How many reads are in flight at most."""
        return len(self._threads)

    @property
    def counters(self) -> ReadCounters:
        with self._lock:
            under_way_s = time.monotonic() - self._busy_since_s if self._under_way else 0.0
            return replace(self._counters, reading_s=self._counters.reading_s + under_way_s)

    @property
    def has_wanted(self) -> bool:
        """Whether reads that a step waits for have not begun yet."""
        with self._lock:
            return bool(self._queues[Rank.WANTED])

    def post(self, reads: Sequence[Read], rank: Rank = Rank.WANTED) -> None:
        """Have these read, in this order, after what was posted before with this rank or a better one."""
        if not reads:
            return
        with self._lock:
            for read in reads:
                self._queues[rank][read.slot] = read
            self._work.notify(len(reads))

    def promote(self, slots: Iterable[int], rank: Rank = Rank.WANTED) -> None:
        """Those of these reads that have a worse rank and were not begun yet go where reads of this one wait."""
        with self._lock:
            for slot in slots:
                for worse in list(Rank)[rank + 1 :]:
                    read = self._queues[worse].pop(slot, None)
                    if read is not None:
                        self._queues[rank][slot] = read

    def cancel(self, slots: Iterable[int]) -> list[int]:
        """Those of the slots whose reads had not begun; they won't be read now. The others will still end."""
        with self._lock:
            queues = self._queues.values()
            return [slot for slot in slots if any(queue.pop(slot, None) is not None for queue in queues)]

    def collect(self) -> list[Ended]:
        """What has ended since the last call, without waiting."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until there is something to collect; False if there was nothing in that time."""
        with self._lock:
            return self._over.wait_for(lambda: bool(self._ended), timeout_s)

    def close(self) -> None:
        """Let reads under way end, drop the others and wait for the threads. Slots may be freed afterwards."""
        with self._lock:
            self._closing = True
            for queue in self._queues.values():
                queue.clear()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, scratch: NDArray[np.uint8]) -> None:
        while (read := self._next()) is not None:
            read_bytes, tries = 0, 0
            error: Exception | None = None
            while tries < TRIES:
                tries += 1
                try:
                    read_bytes = self._source.read(read.layer, read.expert, read.record, scratch)
                except OSError as failure:
                    error = self._unreadable(read, f"failed with {failure.strerror or failure}, twice", failure)
                except FileEnded as failure:
                    why = f"ended at {failure.size_bytes:,} of {failure.needed_bytes:,} bytes"
                    error = self._unreadable(read, why, failure)
                    break  # what was cut off won't come back
                except Exception as failure:  # noqa: BLE001  # it is raised where the expert was asked for
                    error = failure
                    break
                else:
                    error = None
                    break
            self._end(Ended(read, error), read_bytes, tries - 1)

    def _next(self) -> Read | None:
        with self._lock:
            self._work.wait_for(lambda: any(self._queues.values()) or self._closing)
            if self._closing:
                return None
            first = next(queue for queue in self._queues.values() if queue)
            _, read = first.popitem(last=False)
            if self._under_way == 0:
                self._busy_since_s = time.monotonic()
            self._under_way += 1
            return read

    def _end(self, ended: Ended, read_bytes: int, retries: int) -> None:
        with self._lock:
            self._under_way -= 1
            counters = self._counters
            self._counters = replace(
                counters,
                reads=counters.reads + 1,
                read_bytes=counters.read_bytes + read_bytes,
                retries=counters.retries + retries,
                failed=counters.failed + (ended.error is not None),
                reading_s=counters.reading_s + (0.0 if self._under_way else time.monotonic() - self._busy_since_s),
            )
            self._ended.append(ended)
            self._over.notify_all()

    def _unreadable(self, read: Read, why: str, cause: Exception) -> ExpertUnreadable:
        error = ExpertUnreadable(
            layer=read.layer, expert=read.expert, path=self._source.path(read.layer, read.expert), why=why
        )
        error.__cause__ = cause
        return error
