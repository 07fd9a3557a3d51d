"""Multiplying by half a scale as an addition to the exponent: the product's bits, wherever it is said to be exact."""

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels.compile import kernel
from serai.kernels.memory import addr, store_at
from serai.kernels.mxfp4 import SCALE_BYTES, exponent_steps, half_scales, step_exponents, steps_are_exact

Bytes = NDArray[np.uint8]
F32 = NDArray[np.float32]
MANTISSAS = (0, 1, 0x400000, 0x7FFFFF)


@kernel("b1(u8[::1], u8[::1], i64, i64, i64)")
def are_exact(some: Bytes, others: Bytes, groups: int, lowest: int, highest: int) -> bool:
    return bool(steps_are_exact((addr(some, 0), addr(others, 0)), groups, (lowest, highest)))


@kernel("void(u8[::1], f32[::1], f32[::1], f32[::1])")
def both_ways(scales: Bytes, number: F32, stepped: F32, multiplied: F32) -> None:
    at = addr(scales, 0)
    store_at(addr(stepped, 0), step_exponents(exponent_steps(at), addr(number, 0)))
    store_at(addr(multiplied, 0), half_scales(at) * number[0])


def of_exponent(exponent: int, mantissa: int = 0) -> int:
    """A float32's bits."""
    return exponent << 23 | mantissa


def scales_of(exponent: int, groups: int = 1) -> Bytes:
    return np.full(SCALE_BYTES * groups, exponent, np.uint8)


def are_the_product(exponent: int, scale: int) -> bool:
    """Whether stepping gives the bits of multiplying, for numbers of that exponent and sixteen such scales."""
    stepped, multiplied = np.full(16, np.nan, np.float32), np.full(16, np.nan, np.float32)
    same = True
    for mantissa in MANTISSAS:
        number = np.array([of_exponent(exponent, mantissa)], np.uint32).view(np.float32)
        both_ways(scales_of(scale), number, stepped, multiplied)
        same &= bool((stepped.view(np.uint32) == multiplied.view(np.uint32)).all())
    return same


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 126, 127, 128, 129, 252, 253, 254, 255])
def test_it_is_said_to_be_exact_where_the_product_is_a_normal_number_and_nowhere_else(exponent: int) -> None:
    for scale in range(256):
        product = exponent + scale - 128
        said = are_exact(scales_of(scale), scales_of(scale), 1, of_exponent(exponent), of_exponent(exponent, 0x7FFFFF))
        assert said == (1 <= exponent <= 254 and scale <= 254 and 1 <= product <= 254), scale
        assert not said or are_the_product(exponent, scale), scale


@pytest.mark.parametrize(("exponent", "scale", "product"), [(1, 128, 1), (127, 2, 1), (254, 128, 254), (128, 254, 254)])
def test_just_beyond_the_smallest_and_the_largest_exponent_the_bits_would_be_wrong(
    exponent: int, scale: int, product: int
) -> None:
    beyond = scale - 1 if product == 1 else scale + 1
    assert are_the_product(exponent, scale)
    assert not are_the_product(exponent, beyond)


@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize("at", [0, 15, 16, 47])
@pytest.mark.parametrize(("exponent", "within", "beyond"), [(127, 2, 1), (129, 253, 254), (120, 254, 255)])
def test_a_single_scale_beyond_is_seen_wherever_it_is(
    exponent: int, within: int, beyond: int, at: int, one: int
) -> None:
    """In the first group of sixteen or the last of three, of either block. A scale of 255 is no number."""
    number = of_exponent(exponent)
    blocks = scales_of(within, 3), scales_of(within, 3)
    assert are_exact(*blocks, 3, number, number)
    blocks[one][at] = beyond
    assert not are_exact(*blocks, 3, number, number)
    assert are_exact(*blocks, 1, number, number) == (at >= SCALE_BYTES), "of the first group alone"


def test_the_range_of_the_numbers_counts_at_both_ends() -> None:
    low, high = of_exponent(100), of_exponent(150, 5)
    for scale, said in ((28, False), (29, True), (232, True), (233, False)):
        assert are_exact(scales_of(scale), scales_of(128), 1, low, high) == said, scale
