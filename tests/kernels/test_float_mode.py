"""Kernels compute with subnormal numbers as they are, whatever mode a library has left the calling thread in."""

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from serai.kernels import norms, threads
from serai.kernels.threads import parallel_region

FLUSH_TO_ZERO, SUBNORMALS_ARE_ZERO = 1 << 15, 1 << 6
MXCSR = slice(28, 32)  # in the `fenv_t` of x86-64's glibc

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="where the mode is kept is known for x86-64 only"
)


@contextmanager
def subnormals_flushed() -> Iterator[None]:
    """As what was compiled with -ffast-math leaves a thread that loads it."""
    libm = ctypes.CDLL("libm.so.6")
    before, flushed = (ctypes.create_string_buffer(64) for _ in range(2))
    assert libm.fegetenv(before) == libm.fegetenv(flushed) == 0
    mode = int.from_bytes(flushed.raw[MXCSR], sys.byteorder) | FLUSH_TO_ZERO | SUBNORMALS_ARE_ZERO
    ctypes.memmove(ctypes.addressof(flushed) + MXCSR.start, mode.to_bytes(4, sys.byteorder), 4)
    assert libm.fesetenv(flushed) == 0
    try:
        yield
    finally:
        assert libm.fesetenv(before) == 0


@pytest.mark.parametrize("rows", [1, 4_096])
def test_a_step_computes_with_subnormal_numbers_whatever_the_threads_mode(rows: int) -> None:
    """One row is computed by the launching thread alone, many by all of the pool."""
    tiny = np.full((rows, 64), 1e-40, np.float32)
    out = np.empty_like(tiny)
    count = threads.threads()
    threads.set_threads(1)
    try:
        with subnormals_flushed():
            flushed = (tiny + tiny).view(np.uint32)
            threads.set_threads(max(2, count))  # new ones have the mode of whoever starts them
            with parallel_region():
                norms.add(tiny, tiny, out)
    finally:
        threads.set_threads(count)
    assert not flushed.any(), "the mode was on, or this shows nothing"
    np.testing.assert_array_equal(out.view(np.uint32), (tiny + tiny).view(np.uint32))
    assert out.all()
