"""Where arrays lie: on a cache line, and packed weights on huge pages that matrices share.

A step walks through all weights, so the addresses of their pages must be found as fast as the bytes come. An array of
its own has huge pages in its middle only, and those of less than a few megabytes, as scales are, have none: products
with 3 MB of weights took 5 % longer, those with 13 MB 3 %.
"""

import mmap
import threading
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

RUN_BYTES = 64 << 20
"""What is asked of the system at a time; memory that nobody has written to takes none. A run is given back when the
last of its arrays is gone."""

LEAST_BYTES = 64 << 10
"""Smaller arrays are left to the heap: a few of them should not hold a run."""

_LINE = 64
_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def aligned(count: int, dtype: Any) -> NDArray[Any]:
    """An uninitialised flat array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(count * size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + count * size].view(dtype)


def weight_array(count: int, dtype: Any) -> NDArray[Any]:
    """The same for weights: a piece of a run, if it is large enough for that."""
    nbytes = count * np.dtype(dtype).itemsize
    if _MADV_HUGEPAGE is None or nbytes < LEAST_BYTES:
        return aligned(count, dtype)
    return _runs.take(nbytes).view(dtype)


class _Runs:
    """Runs of huge pages, of which the newest has room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """So many bytes from a cache line on."""
        room = -(-nbytes // _LINE) * _LINE
        with self._lock:
            if room > self._left.size:
                fresh = _run(room)
                # The run with more room left serves the next ones.
                if fresh.size - room < self._left.size:
                    return fresh[:nbytes]
                self._left = fresh
            taken, self._left = self._left[:nbytes], self._left[room:]
        return taken


def _run(least: int) -> NDArray[np.uint8]:
    """Memory that nobody has written to, on huge pages where there are any."""
    nbytes = -(-max(least, RUN_BYTES) // _HUGE_BYTES) * _HUGE_BYTES
    memory = mmap.mmap(-1, nbytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(_MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    return whole[start : start + nbytes]


_runs = _Runs()
