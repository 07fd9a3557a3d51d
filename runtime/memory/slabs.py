"""Memory for many buffers of one size, straight from the operating system, and back to it at any time.

From the C library's heap, buffers that come and go lie between small objects that stay, and what is freed between those
can't be given back: over a day of many sessions a fifth of the budget came to lie there unused.
"""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.arrays import HUGE_BYTES, fresh_memory

SLAB_BYTES = 4 << 20
"""What is asked for at a time. Memory nobody has written to takes none."""

_ALIGNMENT = 64
"""One cache line and one vector register."""

_MADV_DONTNEED: int | None = getattr(mmap, "MADV_DONTNEED", None)


class Slabs:
    """Buffers of `size_bytes` each. Sizes that whole pages fit badly are left to the heap."""

    def __init__(self, size_bytes: int) -> None:
        self._size = size_bytes
        self._stride = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._paged = _MADV_DONTNEED is not None and 0 < size_bytes >= 8 * (self._stride - size_bytes)
        self._spare: list[NDArray[np.uint8]] = []
        self._dry: list[NDArray[np.uint8]] = []
        self._homes: dict[int, tuple[mmap.mmap, int]] = {}

    @property
    def spare(self) -> int:
        """How many that were given back are in memory."""
        return len(self._spare)

    def take(self) -> NDArray[np.uint8]:
        """A buffer with unknown content, uint8 `[size_bytes]`, aligned to 64 bytes at least."""
        if self._spare:
            return self._spare.pop()
        if not self._dry:
            self._add()
        return self._dry.pop()

    def give_back(self, buffer: NDArray[Any]) -> None:
        """Keep a buffer that `take` gave, in whatever type it was viewed, for the next who asks."""
        self._spare.append(buffer.view(np.uint8))

    def trim(self) -> int:
        """Return what is spare to the operating system; gives the bytes freed."""
        freed = len(self._spare) * self._size
        if self._paged and _MADV_DONTNEED is not None:
            for buffer in self._spare:
                memory, offset = self._homes[buffer.ctypes.data]
                memory.madvise(_MADV_DONTNEED, offset, self._stride)
            self._dry += self._spare
        self._spare.clear()
        return freed

    def _add(self) -> None:
        """More that nobody has written to yet."""
        if not self._paged:
            raw = np.empty(self._size + _ALIGNMENT, dtype=np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            self._dry.append(raw[start : start + self._size])
            return
        count = max(1, SLAB_BYTES // self._stride)
        # A step walks through all of a state.
        memory = fresh_memory(count * self._stride, huge=self._stride >= HUGE_BYTES)
        whole = np.frombuffer(memory, dtype=np.uint8)
        for offset in range((count - 1) * self._stride, -1, -self._stride):
            buffer = whole[offset : offset + self._size]
            self._homes[buffer.ctypes.data] = memory, offset
            self._dry.append(buffer)
