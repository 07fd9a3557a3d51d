"""The expert cache: a fixed number of equal slots in one stretch of memory.

The memory is taken once and never grows, so the cache can't pass its budget whatever is read into it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serai.runtime.experts.policy import DEFAULT_POLICY, Policy, SlotState
from serai.runtime.experts.slots import SlotTable

PAGE_BYTES = 4096
"""Slots and records are multiples of this and begin at one: what direct reads from any disk need."""


class ExpertCache(SlotTable):
    """A slot table with `record_bytes` of memory behind each slot."""

    def __init__(
        self,
        layers: Sequence[int],
        experts: int,
        slots: int,
        record_bytes: int,
        policy: Policy = DEFAULT_POLICY,
    ) -> None:
        super().__init__(layers, experts, slots, policy)
        if record_bytes < 1 or record_bytes % PAGE_BYTES:
            raise ValueError(f"a record must be a multiple of {PAGE_BYTES} bytes, not {record_bytes:,}")
        self.record_bytes = record_bytes
        self._memory = aligned_records(slots, record_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, used or not: what the cache takes of the budget."""
        return self._memory.nbytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of the slots that hold an expert or are loading one."""
        return (self.slots - self.count(SlotState.EMPTY)) * self.record_bytes

    def memory(self, slot: int) -> NDArray[np.uint8]:
        """A slot's memory, uint8 `[record_bytes]`."""
        record: NDArray[np.uint8] = self._memory[slot]
        return record

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these slots begin, int64."""
        return slots * self.record_bytes + self._memory.ctypes.data

    def check(self) -> None:
        super().check()
        if self._memory.ctypes.data % PAGE_BYTES or self._memory.nbytes != self.slots * self.record_bytes:
            raise AssertionError("expert cache: the slots are not whole pages")


def aligned_records(count: int, nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised uint8 `[count, nbytes]`, whole pages each, in one stretch.

    The system gives large stretches large pages. Read into small arrays, which have small ones, the same disk gave less
    than half the bytes a second.
    """
    return aligned_bytes(count * nbytes).reshape(count, nbytes)


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised uint8 `[nbytes]` that begins at a page."""
    raw = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + nbytes]
