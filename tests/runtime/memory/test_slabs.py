"""Buffers come from the operating system and go back to it, whatever lies between them."""

from pathlib import Path

import numpy as np
import pytest

from serai.runtime.bench.resident import resident_bytes
from serai.runtime.memory.slabs import Slabs


@pytest.mark.parametrize("size", [88, 4_096, 8_192, 125_952, 5 << 20])
def test_buffers_are_aligned_and_none_lies_on_another(size: int) -> None:
    slabs = Slabs(size)
    taken = [slabs.take() for _ in range(50 if size < 1 << 20 else 3)]
    for number, buffer in enumerate(taken):
        assert buffer.dtype == np.uint8
        assert buffer.shape == (size,)
        assert buffer.ctypes.data % 64 == 0
        buffer.fill(number)
    for number, buffer in enumerate(taken):
        assert (buffer == number).all()


def test_a_model_without_a_fixed_state_has_buffers_of_no_bytes() -> None:
    slabs = Slabs(0)
    assert [slabs.take().shape, slabs.take().shape] == [(0,), (0,)]


def test_what_was_given_back_is_taken_first_and_counted_as_spare() -> None:
    slabs = Slabs(4_096)
    first, second = slabs.take(), slabs.take()
    slabs.give_back(first.view(np.float32))
    assert slabs.spare == 1
    assert slabs.take().ctypes.data == first.ctypes.data
    assert slabs.spare == 0
    slabs.give_back(second)
    slabs.trim()
    assert slabs.spare == 0
    again = slabs.take()
    again.fill(7)
    assert (again == 7).all()


def test_trimming_gives_memory_back_though_every_other_buffer_stays() -> None:
    size, count = 24 << 10, 2_000
    slabs = Slabs(size)
    taken = [slabs.take() for _ in range(count)]
    for buffer in taken:
        buffer.fill(1)
    full = resident_bytes()
    for buffer in taken[::2]:
        slabs.give_back(buffer)
    slabs.trim()
    assert full - resident_bytes() > 0.8 * size * count / 2
    assert all((buffer == 1).all() for buffer in taken[1::2])
    # Shared memory would leave the process too, and still lie there with what was in it.
    assert not any(slabs.take().any() for _ in range(count // 2))


def test_large_buffers_lie_on_huge_pages_where_there_are_any() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this system gives no huge pages")
    before = _huge_bytes()
    buffer = Slabs(64 << 20).take()
    buffer.fill(1)
    assert _huge_bytes() - before > buffer.nbytes // 2


def _huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    kept = Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0]
    return int(kept) << 10
