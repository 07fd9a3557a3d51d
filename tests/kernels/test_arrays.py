"""Where arrays lie: on lines, apart, weights on huge pages; and memory given back when nothing is left in it."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.kernels import arrays
from serai.kernels.arrays import BLOCK_BYTES, HUGE_BYTES, LEAST_BYTES, aligned, weight_array

needs_mappings = pytest.mark.skipif(arrays._MADV_HUGEPAGE is None, reason="weights lie on the heap on this system")


@pytest.fixture(autouse=True)
def own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_blocks", arrays._Blocks())


@pytest.mark.parametrize("make", [aligned, weight_array])
@pytest.mark.parametrize("count", [1, 1000, LEAST_BYTES + 1, BLOCK_BYTES + 5])
def test_arrays_start_on_a_line(make: Callable[..., Any], count: int) -> None:
    one = make(count, np.uint16)
    assert (one.size, one.dtype, one.ctypes.data % 64) == (count, np.uint16, 0)
    one[-1] = 7


def test_weights_keep_their_own_numbers() -> None:
    """Pieces of one block, each written to its last byte, with larger ones than a block between them."""
    sizes = [LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES + 63, BLOCK_BYTES - 1, BLOCK_BYTES + 1, LEAST_BYTES + 64]
    held = [weight_array(size, np.uint8) for size in [*sizes, *sizes[:3]]]
    for number, one in enumerate(held):
        one[:] = number
    assert all((one == number).all() for number, one in enumerate(held))


@needs_mappings
def test_small_arrays_lie_on_the_heap_and_others_side_by_side() -> None:
    small, first = weight_array(LEAST_BYTES - 1, np.uint8), weight_array(LEAST_BYTES, np.uint8)
    second, large = weight_array(LEAST_BYTES + 1, np.uint8), weight_array(BLOCK_BYTES, np.uint8)
    third = weight_array(LEAST_BYTES, np.uint8)
    assert first.ctypes.data % HUGE_BYTES == large.ctypes.data % HUGE_BYTES == 0
    assert second.ctypes.data == first.ctypes.data + LEAST_BYTES
    assert third.ctypes.data == second.ctypes.data + LEAST_BYTES + 64
    assert _memory_of(second) is _memory_of(third) is _memory_of(first)
    assert _memory_of(large) is not _memory_of(first)
    assert _memory_of(small) is not _memory_of(first)


@needs_mappings
@pytest.mark.parametrize("sizes", [(LEAST_BYTES, LEAST_BYTES), (BLOCK_BYTES,), (BLOCK_BYTES + 1,), (BLOCK_BYTES - 1,)])
def test_memory_is_given_back_with_its_last_array(sizes: tuple[int, ...]) -> None:
    held = [weight_array(size, np.uint8) for size in sizes]
    memory = weakref.ref(_memory_of(held[0]))
    while held:
        assert memory() is _memory_of(held[-1])
        held.pop()
        gc.collect()
    assert memory() is None
    again = weight_array(LEAST_BYTES, np.uint8)
    again[:] = 1


@needs_mappings
def test_weights_lie_on_huge_pages_where_there_are_any() -> None:
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text():
        pytest.skip("this system gives no huge pages")
    before = _huge_bytes()
    held = [weight_array(BLOCK_BYTES // 8, np.uint8) for _ in range(8)]
    for one in held:
        one[:] = 1
    assert _huge_bytes() - before > BLOCK_BYTES // 2


def _memory_of(array: Any) -> Any:
    """The mapping that an array is a piece of; itself, or what it was cut from, if there is none."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def _huge_bytes() -> int:
    """Bytes of this process on huge pages."""
    kept = Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0]
    return int(kept) << 10
