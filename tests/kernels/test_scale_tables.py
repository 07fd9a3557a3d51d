"""Products of scales that are looked up: the numbers that multiplying gives, or they are not used."""

from typing import Any

import numpy as np
import pytest

from serai.kernels import matrix, q8
from serai.kernels.compile import kernel
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import Matrix
from serai.kernels.memory import addr
from serai.kernels.quantize import Quantized, quantize_rows
from serai.kernels.scale_tables import products_are_exact
from tests.kernels.test_matmul import normal, unset

ROWS = 40


def product(x: Any, w: Matrix) -> Any:
    q = Quantized.empty(len(x), w.cols)
    quantize_rows(x, 0, q)
    out = unset(len(x), w.rows)
    matmul_fast(q, w, out, 0)
    return out


def one_by_one(x: Any, w: Matrix) -> Any:
    """Rows alone multiply their scales."""
    return np.concatenate([product(x[i : i + 1].copy(), w) for i in range(len(x))])


@pytest.mark.parametrize("weights_size", [2.0**-95, 2.0**-60, 1.0, 2.0**100])
@pytest.mark.parametrize("size", [2.0**-90, 2.0**-20, 1.0, 2.0**60])
def test_many_rows_have_the_bits_of_one(weights_size: float, size: float) -> None:
    """Whether products stay within the normal numbers or leave them at either end."""
    rng = np.random.default_rng(0)
    w = matrix.pack_q8(normal(37, 96, seed=1) * np.float32(weights_size))
    x = normal(ROWS, 96) * np.exp2(rng.uniform(-8, 8, (ROWS, 1))).astype(np.float32) * np.float32(size)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(product(x, w), one_by_one(x, w))


def test_every_mantissa_is_looked_up_where_it_lies() -> None:
    """A block's scale is its largest value over 127, so 127 * (1 + m / 32) gives every mantissa there is."""
    w = matrix.pack_q8(normal(32, 64, seed=1))
    largest = 127 * (1 + np.arange(64) % 32 / np.float32(32)) * np.exp2(np.arange(64) // 32 - 3)
    x = normal(64, 64)
    x[:, [0, 32]] = largest[:, np.newaxis]
    q = Quantized.empty(64, 64)
    quantize_rows(x, 0, q)
    np.testing.assert_array_equal(q.scales, np.tile(largest / 127, (2, 1)).astype(np.float32))
    dense = matrix.unpack(w)[0].astype(np.float64)
    seen = (q.codes * q.scales[:, :, np.newaxis].astype(np.float64)).transpose(1, 0, 2).reshape(64, 64)
    np.testing.assert_allclose(product(x, w), seen @ dense.T, rtol=0, atol=1e-6 * np.abs(seen).max() * 64)
    np.testing.assert_array_equal(product(x, w), one_by_one(x, w))


def test_zeros_stay_zeros() -> None:
    """A scale of 0 has no exponent to add to."""
    weights, x = normal(40, 96, seed=1), normal(ROWS, 96)
    weights[3], weights[20, 32:64] = 0, 0
    x[5], x[6, :32], x[7, 64:] = 0, 0, 1e-38
    w = matrix.pack_q8(weights)
    out = product(x, w)
    np.testing.assert_array_equal(out, one_by_one(x, w))
    assert not out[:, 3].any()
    assert not out[5].any()
    assert np.isfinite(out).all()


def test_what_is_no_number_shows_where_it_belongs_and_nowhere_else() -> None:
    weights, x = normal(40, 96, seed=1), normal(ROWS, 96)
    clean = product(x, matrix.pack_q8(weights))
    weights[3, 40], x[5, 70], x[17, 0] = np.nan, np.inf, np.nan
    out = product(x, matrix.pack_q8(weights))
    for spoilt in (out[5], out[17], out[:, 3]):
        assert np.isnan(spoilt).all()
    others = np.delete(np.delete(out, 3, axis=1), [5, 17], axis=0)
    np.testing.assert_array_equal(others, np.delete(np.delete(clean, 3, axis=1), [5, 17], axis=0))


@kernel("void(u16[::1], u16[::1], i64, i64, b1[::1])")
def _are_exact(first: Any, second: Any, lowest: int, highest: int, out: Any) -> None:
    blocks = (addr(first, 0), addr(second, 0))
    out[0] = products_are_exact(q8.block_scales, blocks, first.size // 16, q8.SCALE_BYTES, (lowest, highest))


def are_exact(scales: Any, lowest: float, highest: float) -> bool:
    """For two blocks of outputs and two of columns: one scale is among ones of 1."""
    seen = []
    for at in (0, 31, 40, 63):
        blocks = np.full(64, 0x3F80, np.uint16)
        blocks[at] = np.float32(scales).view(np.uint32) >> 16
        numbers = np.array([lowest, highest], np.float32).view(np.int32).astype(np.int64)
        out = np.zeros(1, np.bool_)
        _are_exact(blocks[:32].copy(), blocks[32:].copy(), int(numbers[0]), int(numbers[1]), out)
        seen.append(bool(out[0]))
    assert len(set(seen)) == 1
    return seen[0]


def test_scales_are_looked_up_only_within_the_normal_numbers() -> None:
    smallest, largest = 2.0**-126, 2.0**127
    assert are_exact(1.0, 2.0**-30, 2.0**30)
    assert are_exact(0.0, 2.0**-30, 2.0**30)
    assert are_exact(1.0, smallest, 2.0**126)
    assert not are_exact(1.0, smallest / 2, 1.0)  # a denormal number has no exponent to add to
    assert not are_exact(1.0, 1.0, largest)  # mantissas may carry
    assert are_exact(2.0**-60, 2.0**-66, 1.0)
    assert not are_exact(2.0**-60, 2.0**-67, 1.0)
    assert are_exact(2.0**60, 1.0, 2.0**66)
    assert not are_exact(2.0**60, 1.0, 2.0**67)
    assert are_exact(2.0**-121, 1.0, 1.0)  # the entries grow by 32nds
    assert not are_exact(2.0**-122, 1.0, 1.0)
    assert not are_exact(np.nan, 1.0, 1.0)
    assert not are_exact(np.inf, 1.0, 1.0)
    assert not are_exact(1.0, 1.0, np.inf)
    assert not are_exact(1.0, 1.0, np.nan)
