"""Calls that were recorded do the same again, on other inputs, and nothing else is recorded or repeated."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels.compile import kernel
from serai.kernels.matmul import matmul
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import pack_f32, pack_q8
from serai.kernels.moe import activate
from serai.kernels.norms import copy_heads, rms_norm
from serai.kernels.quantize import Quantized
from serai.kernels.recorded import places, record

F32 = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@kernel("void(i64[::1], i64[::1], f32, f64, b1, Tuple((i64, UniTuple(b1, 2))), f64[::1])")
def note_all(
    numbers: NDArray[np.int64],
    others: NDArray[np.int64],
    single: float,
    double: float,
    truth: bool,
    nested: tuple[int, tuple[bool, bool]],
    out: NDArray[np.float64],
) -> None:
    out[0], out[1], out[2], out[3], out[4] = numbers.size, numbers.sum(), others[0], single, double
    out[5], out[6], out[7], out[8] = truth, nested[0], nested[1][0], nested[1][1]


@kernel("i64(i64[::1])")
def no_negative(numbers: NDArray[np.int64]) -> int:
    if numbers[0] < 0:
        raise ValueError("negative")
    return int(numbers[0])


def test_products_and_row_kernels_do_the_same_to_what_the_buffers_hold_now() -> None:
    """Arguments of all kinds that a step has: matrices of both kinds, offsets, flags, 8-bit activations, floats."""
    w, q8, weight = pack_f32(normal(48, 64)), pack_q8(normal(96, 64, seed=1)), normal(64, seed=2)
    x, normed, out, inner = normal(3, 64), normal(3, 64), normal(3, 160), normal(3, 40)
    codes = Quantized.empty(3, 64)

    def work() -> F32:
        rms_norm(x, 0, 64, weight, 1e-5, normed, 0)
        matmul(normed, 0, w, out, 16, add=True)
        matmul_fast(codes, q8, out, 64, rows=normed)
        activate(out, 0, 40, 40, SimpleNamespace(situ_beta=4.0, situ_linear_beta=25.0), inner, 0)
        copy_heads(x, 2, 16, out, 80, 20, 3, 7)
        return inner

    begun = out.copy()
    calls, given = record(work)
    assert given is inner
    for seed in (3, 4):
        x[:], out[:] = normal(3, 64, seed=seed), begun
        work()
        wanted = [one.copy() for one in (normed, out, inner)]
        out[:], normed[:], inner[:] = begun, np.nan, np.nan
        calls.again(places(()))
        for one, other in zip((normed, out, inner), wanted, strict=True):
            np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def test_inputs_may_lie_elsewhere_and_be_longer() -> None:
    few, fixed, out = np.array([1, 2], np.int64), np.array([7], np.int64), np.zeros(9)
    calls, _ = record(lambda: note_all(few, fixed, 0.1, -0.1, True, (1 << 40, (False, True)), out), (few,))
    assert out.tolist() == [2, 3, 7, np.float32(0.1), -0.1, 1, 1 << 40, 0, 1]
    fixed[0] = 8
    many = np.arange(100, dtype=np.int64)
    calls.again(places((many,)))
    assert out.tolist() == [100, 4950, 8, np.float32(0.1), -0.1, 1, 1 << 40, 0, 1]
    calls.again(places((few[:1],)))
    assert out[:2].tolist() == [1, 1]


def test_a_kernel_that_raises_ends_the_calls_and_is_named() -> None:
    number, out = np.array([1], np.int64), np.zeros(9)

    def work() -> None:
        no_negative(number)
        note_all(number, number, 0.0, 0.0, False, (0, (False, False)), out)

    calls, _ = record(work)
    number[0], out[0] = -1, 5
    with pytest.raises(RuntimeError, match="no_negative refuses what it took"):
        calls.again(places(()))
    assert out[0] == 5, "what came after was called"
    number[0] = 2
    calls.again(places(()))
    assert out[:2].tolist() == [1, 2]


def test_what_raises_is_not_recorded_and_neither_is_what_comes_after() -> None:
    number = np.array([-1], np.int64)
    with pytest.raises(ValueError, match="negative"):
        record(lambda: no_negative(number))
    number[0] = 1
    calls, given = record(lambda: 3)
    no_negative(number)
    assert (calls.names, given) == ((), 3)


def test_other_threads_are_not_recorded() -> None:
    number = np.array([1], np.int64)

    def work() -> None:
        no_negative(number)
        beside = threading.Thread(target=no_negative, args=(number,))
        beside.start()
        beside.join()

    calls, _ = record(work)
    assert calls.names == ("no_negative",)


@kernel("void(i64[::1], i64)")
def add_to(numbers: NDArray[np.int64], more: int) -> None:
    numbers[0] += more


@kernel("void(i64[::1], i64)")
def multiply(numbers: NDArray[np.int64], factor: int) -> None:
    numbers[0] *= factor


def test_two_threads_that_record_at_once_have_each_its_own_calls() -> None:
    """Call by call by turns, of kernels that were never recorded before; their launchers are then built at once too."""
    turn = threading.Barrier(2, timeout=30)
    recorded: dict[int, tuple[Any, NDArray[np.int64]]] = {}

    def one(number: int) -> None:
        mine = np.array([number], np.int64)

        def work() -> None:
            for called in (add_to, multiply) if number == 1 else (multiply, add_to):
                turn.wait()
                called(mine, 10 * number)
            turn.wait()

        recorded[number] = record(work)[0], mine

    threads = [threading.Thread(target=one, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first, ones), (second, twos) = recorded[1], recorded[2]
    assert (first.names, second.names) == (("add_to", "multiply"), ("multiply", "add_to"))
    assert (ones.tolist(), twos.tolist()) == ([110], [60])
    first.again(places(()))
    assert (ones.tolist(), twos.tolist()) == ([1200], [60])
    second.again(places(()))
    assert (ones.tolist(), twos.tolist()) == ([1200], [1220])


def test_an_error_in_the_middle_leaves_nobody_watched_and_what_watched_before_watching() -> None:
    numbers, out = np.array([1], np.int64), np.zeros(9)

    def fails() -> None:
        add_to(numbers, 1)
        raise OSError("in the middle")

    def outer() -> None:
        multiply(numbers, 5)
        with pytest.raises(OSError, match="in the middle"):
            record(fails)
        note_all(numbers, numbers, 0.0, 0.0, False, (0, (False, False)), out)

    calls, _ = record(outer)
    assert calls.names == ("multiply", "note_all"), "what failed is no part of either"
    add_to(numbers=numbers, more=0)  # a thread that is watched may not name its arguments
    assert numbers.tolist() == [6]
    calls.again(places(()))
    assert out[:2].tolist() == [1, 30]


def test_arrays_are_held_as_long_as_the_calls() -> None:
    """A temporary one has nobody else."""
    out = np.zeros(9)

    def work() -> Any:
        note_all(np.full(4, 3, np.int64), np.ones(1, np.int64), 0.0, 0.0, False, (0, (False, False)), out)

    calls, _ = record(work)
    rubbish = [np.full(4, -1, np.int64) for _ in range(100)]
    out[:] = 0
    calls.again(places(()))
    assert out[:2].tolist() == [4, 12], len(rubbish)


def test_what_would_not_be_repeated_rightly_is_refused() -> None:
    out, numbers = np.zeros(9), np.arange(4, dtype=np.int64)
    rest = (0.0, 0.0, False, (0, (False, False)), out)
    with pytest.raises(ValueError, match="an input goes into a kernel whole"):
        record(lambda: note_all(numbers[1:], numbers, *rest), (numbers,))
    with pytest.raises(TypeError, match="no_negative is watched, and takes its arguments by position"):
        record(lambda: no_negative(numbers=numbers))


def test_any_number_is_as_true_again_as_it_was() -> None:
    out, numbers = np.zeros(9), np.arange(4, dtype=np.int64)
    calls, _ = record(lambda: note_all(numbers, numbers, 0.0, 0.0, 256, (-5, (False, True)), out))  # type: ignore[arg-type]
    first = out.tolist()
    out[:] = 9
    calls.again(places(()))
    assert out.tolist() == first
    assert (out[5], out[6]) == (1, -5)
