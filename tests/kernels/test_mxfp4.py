"""8-bit activations against MXFP4 and Q8 weights: the quantiser, the product, and its bits."""

from typing import Any

import numpy as np
import pytest

from serai.kernels import matrix, threads
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import Matrix
from serai.kernels.quantize import Quantized, quantize_rows
from tests.kernels.simd_paths import digest, on_every_path
from tests.kernels.test_matmul import normal, unset
from tests.kernels.test_matrix import mxfp4

SHAPES = [(1, 32), (37, 96), (64, 256), (161, 992)]


def quantized(x: Any) -> Quantized:
    out = Quantized.empty(*x.shape)
    out.codes[:], out.scales[:], out.starts[:] = 99, np.nan, 99
    wide = unset(len(x), x.shape[1] + 3)
    wide[:, 1:-2] = x
    quantize_rows(wide, 1, out)
    return out


def dequantized(q: Quantized) -> Any:
    blocks = q.codes * q.scales[:, :, np.newaxis].astype(np.float64)
    return blocks.transpose(1, 0, 2).reshape(q.rows, q.columns)


def packed(kind: str, rows: int, cols: int) -> Matrix:
    return matrix.pack_mxfp4(*mxfp4(rows, cols)) if kind == "mxfp4" else matrix.pack_q8(normal(rows, cols, seed=1))


def product(x: Any, w: Matrix) -> Any:
    out = unset(len(x), w.rows + 7)
    matmul_fast(quantized(x), w, out, 3)
    assert np.isnan(out[:, :3]).all()
    assert np.isnan(out[:, 3 + w.rows :]).all()
    return out[:, 3 : 3 + w.rows].copy()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_codes_are_the_nearest_multiples_of_the_scale(size: float) -> None:
    x = normal(5, 160) * np.float32(size)
    q = quantized(x)
    blocks = x.reshape(5, 5, 32).transpose(1, 0, 2).astype(np.float64)
    largest = np.abs(blocks).max(-1)
    np.testing.assert_array_equal(q.scales.view(np.uint32) & 0x3FFFF, 0)  # a mantissa of five bits
    assert (q.scales >= largest / 127 * (1 - 1e-6)).all()
    assert (q.scales < largest / 127 * (1 + 1 / 32)).all()
    assert (np.abs(q.codes - blocks / q.scales[..., np.newaxis]) <= 0.50002).all()
    sums = q.codes.sum(-1, dtype=np.int64)
    np.testing.assert_array_equal(q.starts, np.stack([-12 * sums, -128 * sums]))


def test_halves_round_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
    np.testing.assert_array_equal(quantized(x).codes[0, 0, :6], [127, 0, 2, 2, 0, -2])


def test_gaussian_activations_lose_half_a_percent() -> None:
    x = normal(64, 4096)
    assert np.linalg.norm(dequantized(quantized(x)) - x) / np.linalg.norm(x) < 0.0056


def test_zero_and_tiny_blocks_become_zero() -> None:
    for value in (0.0, -0.0, 1e-38, 1e-45):
        q = quantized(np.full((1, 32), value, np.float32))
        assert not q.codes.any()
        assert np.isfinite(q.scales).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_with_an_infinity_or_nan_shows_in_every_output(value: float) -> None:
    """B109: 8-bit codes cannot hold it, the scale does."""
    for position in (0, 17, 31):
        x = normal(3, 64)
        x[1, 32 + position] = value
        out = product(x, matrix.pack_mxfp4(*mxfp4(20, 64)))
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_matches_float64_of_the_quantised_activations(kind: str, shape: tuple[int, int]) -> None:
    w = packed(kind, *shape)
    dense = matrix.unpack(w)[0].astype(np.float64)
    for rows in (1, 3, 67):
        x = normal(rows, w.cols)
        seen = dequantized(quantized(x))
        assert (np.abs(product(x, w) - seen @ dense.T) <= 1e-6 * (np.abs(seen) @ np.abs(dense).T)).all()


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
def test_no_rows_have_no_outputs(kind: str) -> None:
    w, out = packed(kind, 37, 96), unset(2, 37)
    matmul_fast(Quantized.empty(0, 96), w, out[:0], 0)
    assert np.isnan(out).all()


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(kind: str, shape: tuple[int, int]) -> None:
    w = packed(kind, *shape)
    x = normal(261, w.cols)
    together = product(x, w)
    for rows in (1, 2, 7, 11, 12, 16, 23, 67, 129):
        np.testing.assert_array_equal(product(x[:rows], w), together[:rows])
    order = np.random.default_rng(0).permutation(261)
    np.testing.assert_array_equal(product(x[order], w), together[order])


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
def test_the_thread_count_decides_no_bits(kind: str) -> None:
    w, before = packed(kind, 600, 1024), threads.threads()
    results = []
    for n in (1, 2, 3):
        threads.set_threads(n)
        results.append(product(normal(30, 1024), w))
    threads.set_threads(before)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
@pytest.mark.parametrize("rows", [1, 7])
def test_rows_quantised_on_the_way_give_the_same_bits(kind: str, rows: int) -> None:
    x, w = normal(rows, 96, seed=3), packed(kind, 37, 96)
    room = Quantized.empty(rows, 96)
    room.codes[:], room.scales[:], room.starts[:] = 99, np.nan, 99
    wide = unset(rows, 100)
    wide[:, :96] = x
    first, second = unset(rows, w.rows), unset(rows, w.rows)
    matmul_fast(room, w, first, 0, rows=wide)
    matmul_fast(room, w, second, 0)  # what is left in the room is the quantised rows
    for out in (first, second):
        np.testing.assert_array_equal(out.view(np.uint32), product(x, w).view(np.uint32))


def test_extreme_weights_are_exact() -> None:
    """The largest codes in every place: the 8-bit dot must not saturate on any path."""
    packed = np.full((16, 16), 0x7F, np.uint8)  # 6 and -6 alternating: codes 15 low, 7 high
    w = matrix.pack_mxfp4(packed, np.full((16, 1), 127, np.uint8))
    x = np.tile(np.array([-127, 127], np.float32), 16)[np.newaxis]
    np.testing.assert_array_equal(product(x, w), np.full((1, 16), 32 * 6 * 127, np.float32))


def test_the_largest_8_bit_weights_are_exact() -> None:
    """Codes of 127 and -127 against activations of either sign: no path may saturate."""
    weights = np.tile(np.array([[127, -127], [127, 127]], np.float32), (8, 16))
    x = np.concatenate([np.full((1, 32), 127), np.full((1, 32), -127), np.tile([[127, -127]], (1, 16))])
    x = np.tile(x.astype(np.float32), (5, 1))
    np.testing.assert_array_equal(product(x, matrix.pack_q8(weights)), x @ weights.T)


def test_the_smallest_scale_is_kept() -> None:
    """Scale byte 0 is 2^-127, below the normal numbers; it is not flushed."""
    w = matrix.pack_mxfp4(np.full((16, 16), 0x66, np.uint8), np.zeros((16, 1), np.uint8))
    x = np.full((1, 32), 127, np.float32)
    np.testing.assert_array_equal(product(x, w), np.full((1, 16), np.float32(32 * 4 * 127 * 2.0**-127)))


def test_add_adds_the_finished_sum_once() -> None:
    w, x, out = matrix.pack_mxfp4(*mxfp4(37, 96)), normal(4, 96), normal(4, 40)
    expected = out.copy()
    expected[:, 2:39] += product(x, w)
    matmul_fast(quantized(x), w, out, 2, add=True)
    np.testing.assert_array_equal(out, expected)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot quantise"):
        matmul_fast(Quantized.empty(2, 64), packed("q8", 16, 64), unset(2, 16), 0, rows=normal(2, 32))
    w = matrix.pack_mxfp4(*mxfp4(16, 64))
    with pytest.raises(ValueError, match="MXFP4 and Q8 weights only, not f32"):
        matmul_fast(quantized(normal(1, 64)), matrix.pack(normal(4, 64)), unset(1, 4), 0)
    with pytest.raises(ValueError, match="32 columns do not fit weights of 64"):
        matmul_fast(quantized(normal(1, 32)), w, unset(1, 16), 0)
    with pytest.raises(ValueError, match="out of shape"):
        matmul_fast(quantized(normal(1, 64)), w, unset(1, 15), 0)
    with pytest.raises(ValueError, match="multiple of 32 columns, not 33"):
        Quantized.empty(1, 33)
    with pytest.raises(ValueError, match="cannot quantise"):
        quantize_rows(normal(1, 64), 1, Quantized.empty(1, 64))


def bits() -> str:
    kinds = [packed(kind, 37, 320) for kind in ("mxfp4", "q8")]
    return digest(*(product(normal(rows, 320), w) for w in kinds for rows in (1, 9, 21)))


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path("tests.kernels.test_mxfp4", "bits").values())) == 1
