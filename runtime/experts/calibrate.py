"""How many reads to keep in flight, found by trying for a moment.

Too few leave the disk waiting, too many only queue, hold scratch memory and take the processor from the kernels. The
smallest number within a twentieth of the best rate is taken, but never less than eight where there is memory for them:
fewer may be enough for an idle machine, but while the cores compute a thread that has read waits to begin its next read
(where one alone was good enough, one gave 0.92 of the disk's rate beside steps, four 0.94 and eight all of it).
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.runtime.experts.cache import aligned_records
from serai.runtime.experts.disk import ReadMode

TRIED = (8, 16)
GOOD_ENOUGH = 0.95
TRY_S = 0.15
"""For each number: some tens of records of a few MB on an NVMe disk."""


class Records(Protocol):
    """What can be read at random: the part of an `ExpertSource` that this needs."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> int: ...

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def mode(self) -> ReadMode: ...

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int: ...


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was tried and chosen. `tried` pairs a number of reads in flight with the bytes a second it gave."""

    reads_in_flight: int
    tried: tuple[tuple[int, float], ...]
    mode: ReadMode

    @property
    def bytes_per_s(self) -> float:
        """The rate at the number chosen."""
        return dict(self.tried)[self.reads_in_flight]

    def __str__(self) -> str:
        rates = ", ".join(f"{count}: {rate / 1e9:.2f}" for count, rate in self.tried)
        return f"{self.reads_in_flight} {self.mode.value} reads in flight (GB/s by number: {rates})"


def calibrate(
    source: Records,
    memory: Sequence[NDArray[np.uint8]],
    *,
    tried: Sequence[int] = TRIED,
    try_s: float = TRY_S,
    seed: int = 0,
) -> Calibration:
    """Read experts at random into `memory`, records of the source's size (slots not in use will do), with as many
    threads as are tried, and no more than there are records."""
    rates = []
    for count in sorted({min(count, len(memory)) for count in tried}):
        # Other experts for each: what was read a moment ago, a disk's own cache may give faster.
        rates.append((count, read_rate(source, memory[:count], try_s=try_s, seed=seed + count)))
    return Calibration(choose(rates), tuple(rates), source.mode)


def choose(rates: Sequence[tuple[int, float]]) -> int:
    """The smallest number whose rate is good enough."""
    best = max(rate for _, rate in rates)
    return min(count for count, rate in rates if rate >= GOOD_ENOUGH * best)


def read_rate(source: Records, memory: Sequence[NDArray[np.uint8]], *, try_s: float, seed: int = 0) -> float:
    """Bytes a second from disk with one thread for each record of `memory`."""
    total = len(source.layers) * source.experts

    def read(record: NDArray[np.uint8], scratch: NDArray[np.uint8], picks: np.random.Generator) -> int:
        pick = int(picks.integers(total))
        return source.read(source.layers[pick // source.experts], pick % source.experts, record, scratch)

    scratches = aligned_records(len(memory), source.scratch_bytes)
    picks = np.random.default_rng(seed).spawn(len(memory))
    return rate_of([partial(read, *one) for one in zip(memory, scratches, picks, strict=True)], try_s)


def rate_of(readers: Sequence[Callable[[], int]], try_s: float) -> float:
    """Bytes a second that these give together, each called on a thread of its own until `try_s` have passed, but at
    least once. A call gives the bytes it read; what it raises is raised here."""
    until_s = time.monotonic() + try_s
    results: list[int | BaseException] = []

    def work(reader: Callable[[], int]) -> None:
        total = 0
        try:
            while True:
                total += reader()
                if time.monotonic() >= until_s:
                    break
        except BaseException as error:  # noqa: BLE001  # raised below, on the caller's thread
            results.append(error)
        else:
            results.append(total)

    started_s = time.monotonic()
    threads = [threading.Thread(target=work, args=(reader,), daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - started_s
    total = 0
    for result in results:
        if isinstance(result, BaseException):
            raise result
        total += result
    return total / elapsed_s
