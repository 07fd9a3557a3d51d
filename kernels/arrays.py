"""Where arrays lie: on a cache line, and packed weights on huge pages that matrices share.

A step walks through all weights, so the addresses of their pages must be found as fast as the bytes come. An array of
its own has huge pages in its middle only, and those of less than a few megabytes, as scales are, have none: products
with 3 MB of weights took 5 % longer, those with 13 MB 3 %.
"""

import mmap
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 64 << 20
"""What is asked of the system at a time; memory that nobody has written to takes none."""

LEAST_BYTES = 64 << 10
"""Smaller arrays are left to the heap: a few of them should not hold a block."""

HUGE_BYTES = 2 << 20
"""Of a huge page, where there are any."""

_LINE = 64
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def aligned(count: int, dtype: Any) -> NDArray[Any]:
    """An uninitialised flat array that starts on a cache line."""
    size = np.dtype(dtype).itemsize
    raw = np.empty(count * size + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + count * size].view(dtype)


def weight_array(count: int, dtype: Any) -> NDArray[Any]:
    """The same for weights that are loaded together and go together: a block is given back with its last array, so one
    that stays holds what all others of its block took."""
    nbytes = count * np.dtype(dtype).itemsize
    if _MADV_HUGEPAGE is None or nbytes < LEAST_BYTES:
        return aligned(count, dtype)
    return _blocks.take(nbytes).view(dtype)


def fresh_memory(nbytes: int, *, huge: bool) -> mmap.mmap:
    """Whole pages straight from the operating system, `huge` ones where there are any, that nobody has written to.

    Private: what is shared stays in memory when it is given back, and only this process's count of it shrinks.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # a kernel may be built without them
            memory.madvise(_MADV_HUGEPAGE)
    return memory


class _Blocks:
    """Memory that arrays are cut from, one after the other; the arrays alone hold it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: weakref.ref[mmap.mmap] | None = None
        self._at = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """So many bytes from a cache line on: of the newest block, if it is there and has room, or of another."""
        if nbytes >= BLOCK_BYTES:
            memory = fresh_memory(nbytes + HUGE_BYTES, huge=True)
            return _cut(memory, _first_huge(memory), nbytes)
        with self._lock:
            newest = None if self._newest is None else self._newest()
            if newest is None or self._at + nbytes > len(newest):
                newest = fresh_memory(BLOCK_BYTES + HUGE_BYTES, huge=True)
                self._newest, self._at = weakref.ref(newest), _first_huge(newest)
            taken = _cut(newest, self._at, nbytes)
            self._at += -(-nbytes // _LINE) * _LINE
        return taken


def _cut(memory: mmap.mmap, at: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(memory, np.uint8)[at : at + nbytes]


def _first_huge(memory: mmap.mmap) -> int:
    """Where the first huge page of that memory can begin."""
    return -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_BYTES


_blocks = _Blocks()
