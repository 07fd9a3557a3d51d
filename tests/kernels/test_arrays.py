"""Where arrays lie: on lines, apart from each other, and runs given back when nothing is left in them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from serai.kernels import arrays
from serai.kernels.arrays import LEAST_BYTES, RUN_BYTES, aligned, weight_array


@pytest.mark.parametrize("make", [aligned, weight_array])
@pytest.mark.parametrize("count", [1, 1000, LEAST_BYTES + 1, RUN_BYTES + 5])
def test_arrays_start_on_a_line(make: Callable[..., Any], count: int) -> None:
    one = make(count, np.uint16)
    assert (one.size, one.dtype, one.ctypes.data % 64) == (count, np.uint16, 0)
    one[-1] = 7


def test_weights_keep_their_own_numbers() -> None:
    """Pieces of one run, each written to its last byte, with larger ones than a run between them."""
    sizes = [LEAST_BYTES, LEAST_BYTES + 1, 3 * LEAST_BYTES + 63, RUN_BYTES - 1, RUN_BYTES + 1, LEAST_BYTES + 64]
    held = [weight_array(size, np.uint8) for size in sizes * 3]
    for number, one in enumerate(held):
        one[:] = number
    assert all((one == number).all() for number, one in enumerate(held))


def test_a_run_is_given_back_with_its_last_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_runs", arrays._Runs())
    first, second = weight_array(LEAST_BYTES, np.uint8), weight_array(LEAST_BYTES, np.uint8)
    run = weakref.ref(_memory_of(first))
    assert _memory_of(second) is run()
    # What follows is larger than what is left, so that the next run is the one with room.
    third = weight_array(RUN_BYTES, np.uint8)
    weight_array(RUN_BYTES - LEAST_BYTES, np.uint8)
    assert _memory_of(third) is not run()
    arrays._runs._left = np.empty(0, np.uint8)
    del first
    gc.collect()
    assert run() is not None
    del second
    gc.collect()
    assert run() is None


def _memory_of(array: Any) -> Any:
    """The mapping that an array is a piece of."""
    base = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base
