"""Packing keeps every value, in any shape, and refuses what it cannot hold."""

import numpy as np
import pytest

from serai.kernels import matrix, naive
from serai.kernels.matrix import Format
from serai.kernels.q4 import quantise_mxfp4

SHAPES = [(1, 1), (16, 7), (37, 33), (64, 64), (100, 1000)]


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def bits(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << 16, shape, dtype=np.uint16)


def mxfp4(rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random MXFP4 weights as shipped, scales around 1."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, cols // 2), dtype=np.uint8)
    return packed, rng.integers(118, 132, (rows, cols // 32), dtype=np.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_weights_come_back_bit_for_bit(shape: tuple[int, int]) -> None:
    w, b = floats(*shape), bits(*shape)
    np.testing.assert_array_equal(matrix.unpack(matrix.pack_f32(w))[0], w)
    packed = matrix.pack_bf16(b)
    np.testing.assert_array_equal(matrix.unpack(packed)[0].view(np.uint32) >> 16, b)
    assert packed.nbytes == -(-shape[0] // 16) * 16 * shape[1] * 2


@pytest.mark.parametrize("shape", [(1, 32), (37, 96), (64, 64), (130, 256)])
def test_mxfp4_comes_back_as_its_definition_decodes_it(shape: tuple[int, int]) -> None:
    packed, scales = mxfp4(*shape)
    m = matrix.pack_mxfp4(packed, scales)
    np.testing.assert_array_equal(matrix.unpack(m)[0], naive.mxfp4_decode(packed, scales))
    assert m.nbytes == -(-shape[0] // 16) * shape[1] // 32 * 272


@pytest.mark.parametrize("shape", [(1, 32), (37, 96), (64, 64), (130, 1024)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_q8_is_within_half_a_step_of_the_weights(shape: tuple[int, int], size: float) -> None:
    w = floats(*shape) * np.float32(size)
    m = matrix.pack_q8(w)
    largest = np.abs(w).reshape(shape[0], -1, 32).max(-1)
    step = np.repeat(largest / 127, 32, axis=1) * (1 + 2**-7)
    assert (np.abs(matrix.unpack(m)[0] - w) <= 0.501 * step).all()
    assert m.nbytes == -(-shape[0] // 16) * 16 * shape[1] // 32 * 34


def test_q8_is_the_same_from_bf16_bits_as_from_their_values() -> None:
    widened = (bits(20, 64).astype(np.uint32) % 0x4000 << 16).view(np.float32)
    narrow = (widened.view(np.uint32) >> 16).astype(np.uint16)
    one, other = matrix.pack_q8(widened), matrix.pack_q8(narrow)
    np.testing.assert_array_equal(one.data, other.data)
    np.testing.assert_array_equal(one.scales, other.scales)


def test_q8_keeps_zeros_and_shows_what_is_no_number() -> None:
    w = np.zeros((3, 64), np.float32)
    w[1, 40], w[2, 3] = np.nan, np.inf
    values = matrix.unpack(matrix.pack_q8(w))[0]
    np.testing.assert_array_equal(values[0], 0)
    assert np.isnan(values[1, 32:]).all()
    assert np.isnan(values[2, :32]).all()
    with pytest.raises(ValueError, match="multiple of 32 columns, not 33"):
        matrix.pack_q8(floats(4, 33))


def test_q4_is_the_quantiser_then_the_packing_from_either_type() -> None:
    widened = (bits(37, 96).astype(np.uint32) % 0x4000 << 16).view(np.float32)
    one, other = matrix.pack_q4(widened), matrix.pack_q4((widened.view(np.uint32) >> 16).astype(np.uint16))
    packed, scales, _ = quantise_mxfp4(widened)
    expected = matrix.pack_mxfp4(packed, scales)
    for made in (one, other):
        np.testing.assert_array_equal(made.data, expected.data)
        np.testing.assert_array_equal(made.scales, expected.scales)
    w = np.random.default_rng(4).standard_normal((64, 512), dtype=np.float32)
    error = np.linalg.norm(matrix.unpack(matrix.pack_q4(w))[0] - w) / np.linalg.norm(w)
    assert 0.09 < error < 0.12


def test_heads_may_be_an_array_or_a_list() -> None:
    heads = floats(3, 18, 5)
    for given in (heads, list(heads)):
        m = matrix.pack_heads(given)
        assert (m.heads, m.rows, m.cols, m.format) == (3, 18, 5, Format.F32)
        np.testing.assert_array_equal(matrix.unpack(m), heads)


def test_data_starts_on_a_cache_line() -> None:
    assert all(matrix.pack(floats(17, 3)).data.ctypes.data % 64 == 0 for _ in range(20))


def test_concatenated_pieces_begin_at_their_offsets_and_leave_zeros_between() -> None:
    pieces = [floats(5, 8), floats(16, 8) + 1, floats(33, 8) + 2]
    m, starts = matrix.concat(pieces, align=32)
    assert starts == (0, 32, 64)
    whole = matrix.unpack(m)[0]
    for piece, start in zip(pieces, starts, strict=True):
        np.testing.assert_array_equal(whole[start : start + len(piece)], piece)
    assert not whole[5:32].any()
    assert m.rows == 128


def test_mixed_pieces_are_widened_and_bf16_ones_stay() -> None:
    mixed, _ = matrix.concat([floats(4, 8), bits(4, 8)])
    assert mixed.format is Format.F32
    np.testing.assert_array_equal(matrix.unpack(mixed)[0][16:20].view(np.uint32) >> 16, bits(4, 8))
    same, _ = matrix.concat([bits(4, 8), bits(4, 8)])
    assert same.format is Format.BF16


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16 bits"):
        matrix.pack(np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        matrix.pack(floats(2, 2, 2))
    with pytest.raises(ValueError, match="nothing empty"):
        matrix.pack(np.empty((0, 4), np.float32))
    with pytest.raises(ValueError, match="multiple of 32 columns, not 48"):
        matrix.pack_mxfp4(np.zeros((4, 24), np.uint8), np.zeros((4, 1), np.uint8))
    with pytest.raises(ValueError, match=r"must be \[4, 2\]"):
        matrix.pack_mxfp4(np.zeros((4, 32), np.uint8), np.zeros((4, 1), np.uint8))
    with pytest.raises(ValueError, match="same columns"):
        matrix.concat([floats(2, 3), floats(2, 4)])
    with pytest.raises(ValueError, match="multiple of 16"):
        matrix.concat([floats(2, 3)], align=8)


def test_a_matrix_says_what_it_is() -> None:
    assert repr(matrix.pack_heads(floats(3, 18, 5))) == "<Matrix f32 3 x [18, 5], 1920 bytes>"
