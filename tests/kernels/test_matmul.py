"""Products against float64, and the same bits for any rows, order, threads and SIMD path."""

from typing import Any

import numpy as np
import pytest

from serai.kernels import matrix, threads
from serai.kernels.matmul import matmul
from serai.kernels.matrix import Matrix
from tests.kernels.simd_paths import digest, on_every_path
from tests.kernels.test_matrix import mxfp4

WIDE, MANY = (770, 300), 263
"""Outputs and columns, and rows, that plain weights multiply in tiles."""
SHAPES = [(1, 1), (16, 7), (37, 33), (64, 128), (100, 300), (161, 1001), WIDE]
MXFP4_SHAPES = [(1, 32), (37, 96), (161, 992)]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def unset(*shape: int) -> Any:
    return np.full(shape, np.nan, np.float32)


def weights(kind: str, rows: int, cols: int) -> Matrix:
    if kind == "mxfp4":
        return matrix.pack_mxfp4(*mxfp4(rows, cols))
    w = normal(rows, cols, seed=1)
    if kind == "q8":
        return matrix.pack_q8(w)
    return matrix.pack(w if kind == "f32" else (w.view(np.uint32) >> 16).astype(np.uint16))


CASES = [(kind, shape) for kind in ("f32", "bf16") for shape in SHAPES] + [
    (kind, shape) for kind in ("mxfp4", "q8") for shape in MXFP4_SHAPES
]


def product(x: Any, w: Matrix) -> Any:
    """The product alone, after checking that nothing beside its columns was touched or read."""
    rows, outputs = len(x), w.rows
    wide, out = unset(rows, w.cols + 5), unset(rows, outputs + 7)
    wide[:, 2 : 2 + w.cols] = x
    matmul(wide, 2, w, out, 3)
    assert np.isnan(out[:, :3]).all()
    assert np.isnan(out[:, 3 + outputs :]).all()
    return out[:, 3 : 3 + outputs].copy()


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_product_matches_float64(kind: str, shape: tuple[int, int]) -> None:
    w = weights(kind, *shape)
    dense = matrix.unpack(w)[0].astype(np.float64)
    for rows in (1, 3, 67, MANY):
        x = normal(rows, w.cols)
        expected = x.astype(np.float64) @ dense.T
        bound = np.abs(x).astype(np.float64) @ np.abs(dense).T
        assert (np.abs(product(x, w) - expected) <= 2e-6 * bound).all()


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_row_has_the_same_bits_in_any_company(kind: str, shape: tuple[int, int]) -> None:
    w = weights(kind, *shape)
    x = normal(MANY, w.cols)
    together = product(x, w)
    for rows in (1, 2, 7, 67):
        np.testing.assert_array_equal(product(x[:rows], w), together[:rows])
    order = np.random.default_rng(0).permutation(MANY)
    np.testing.assert_array_equal(product(x[order], w), together[order])


@pytest.mark.parametrize("kind", ["f32", "bf16", "mxfp4", "q8"])
def test_the_thread_count_decides_no_bits(kind: str) -> None:
    w, before = weights(kind, 800, 992), threads.threads()
    results = []
    for n in (1, 2, 3):
        threads.set_threads(n)
        results.append([product(normal(rows, 992), w) for rows in (1, 30, MANY)])
    threads.set_threads(before)
    for outs in results[1:]:
        for out, expected in zip(outs, results[0], strict=True):
            np.testing.assert_array_equal(out, expected)


def test_bf16_weights_give_the_bits_of_the_same_weights_in_f32() -> None:
    w = weights("bf16", 50, 300)
    x = normal(9, 300)
    np.testing.assert_array_equal(product(x, w), product(x, matrix.pack(matrix.unpack(w)[0])))


def test_a_piece_of_a_concatenation_gives_the_bits_of_its_own_product() -> None:
    pieces = [normal(5, 200, seed=3), normal(70, 200, seed=4)]
    whole, starts = matrix.concat(pieces)
    x = normal(4, 200)
    together = product(x, whole)
    for piece, start in zip(pieces, starts, strict=True):
        np.testing.assert_array_equal(together[:, start : start + len(piece)], product(x, matrix.pack(piece)))


def test_add_adds_the_finished_sum_once() -> None:
    w = weights("bf16", *WIDE)
    for rows in (1, 5, MANY):
        x, out = normal(rows, w.cols), normal(rows, w.rows + 3, seed=2)
        expected = out.copy()
        expected[:, 1 : 1 + w.rows] += product(x, w)
        matmul(x, 0, w, out, 1, add=True)
        np.testing.assert_array_equal(out, expected)


def test_a_sum_of_numbers_too_small_is_plus_zero_in_any_company() -> None:
    w = matrix.pack(np.full(WIDE, -1e-30, np.float32))
    x = np.full((MANY, w.cols), 1e-30, np.float32)
    for rows in (1, 5, MANY):
        out = product(x[:rows], w)
        assert not out.any()
        assert not np.signbit(out).any()


@pytest.mark.parametrize("rows", [1, 6, MANY])
def test_heads_read_and_write_at_their_strides(rows: int) -> None:
    heads = normal(17, 20, 33)
    x, out = normal(rows, 17 * 40), unset(rows, 17 * 24 + 2)
    matmul(x, 1, matrix.pack_heads(heads), out, 2, x_stride=40, out_stride=24)
    for h in range(17):
        alone = product(x[:, 1 + 40 * h : 34 + 40 * h], matrix.pack(heads[h]))
        np.testing.assert_array_equal(out[:, 2 + 24 * h : 22 + 24 * h], alone)
    assert np.isnan(out[:, :2]).all()
    assert np.isnan(out[:, 22:26]).all()


def test_columns_that_are_not_there_are_refused() -> None:
    w = weights("f32", 16, 8)
    with pytest.raises(ValueError, match="x of shape"):
        matmul(normal(2, 8), 1, w, unset(2, 16), 0)
    with pytest.raises(ValueError, match="x of shape"):
        matmul(normal(2, 8), -1, w, unset(2, 16), 0)
    with pytest.raises(ValueError, match="out of shape"):
        matmul(normal(2, 8), 0, w, unset(3, 16), 0)
    with pytest.raises(ValueError, match="overlap"):
        matmul(normal(2, 16), 0, matrix.pack_heads(normal(2, 16, 8)), unset(2, 64), 0, x_stride=8)


def test_other_dtypes_and_layouts_are_refused() -> None:
    """B07: a slice or another dtype must not be copied silently."""
    w = weights("f32", 16, 8)
    with pytest.raises(TypeError):
        matmul(np.ones((2, 8)), 0, w, unset(2, 16), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        matmul(normal(2, 8), 0, w, unset(4, 16)[::2], 0)


def test_infinities_and_nan_pass_through() -> None:
    """B109: nothing assumes finite numbers."""
    w = matrix.pack(np.ones((800, 40), np.float32))
    for rows in (1, 4, MANY):
        x = np.ones((rows, 40), np.float32)
        x[0, 7] = np.inf
        assert np.isposinf(product(x, w)[0]).all()
        x[0, 9] = -np.inf
        assert np.isnan(product(x, w)[0]).all()
        if rows > 1:
            assert np.isfinite(product(x, w)[1:]).all()


def bits() -> str:
    """Products of all formats in few and many rows, as a hash."""
    made = (product(normal(rows, w.cols), w) for w in _bit_cases() for rows in (1, 9, MANY))
    return digest(*made)


def _bit_cases() -> list[Matrix]:
    plain = [weights("f32", 37, 301), weights("bf16", 37, 301), weights("f32", 801, 301), weights("bf16", 801, 301)]
    return [*plain, weights("mxfp4", 37, 320), weights("q8", 37, 320)]


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path("tests.kernels.test_matmul", "bits").values())) == 1
