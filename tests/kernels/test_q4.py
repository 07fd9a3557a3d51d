"""Quantising to MXFP4."""

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels.matrix import pack_mxfp4, unpack
from serai.kernels.q4 import quantise_mxfp4
from tests.kernels.simd_paths import digest, on_every_path


def dequantised(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = unpack(pack_mxfp4(packed, scales))[0]
    return values


def test_numbers_that_mxfp4_has_come_back_as_they_were() -> None:
    rng = np.random.default_rng(0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    weights = levels[rng.integers(0, 8, (16, 64))] * rng.choice([-1, 1], (16, 64)).astype(np.float32)
    weights[:, ::32] = 6  # the power of two is then the only one that fits
    weights *= 2.0 ** rng.integers(-20, 20, (16, 1))
    packed, scales, error = quantise_mxfp4(weights)
    assert np.array_equal(dequantised(packed, scales), weights)
    assert error == 0


def test_every_weight_is_as_near_as_its_scale_allows() -> None:
    weights = np.random.default_rng(1).standard_normal((16, 96), dtype=np.float32)
    packed, scales, error = quantise_mxfp4(weights)
    back = dequantised(packed, scales)
    assert error == pytest.approx(float(((weights - back) ** 2).sum()), rel=1e-5)
    # What any choice of code gives, under the scales that were chosen.
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    all_levels = np.concatenate([levels, -levels])[:, np.newaxis, np.newaxis]
    step = np.repeat(np.ldexp(np.float32(1), scales.astype(np.int32) - 127), 32, axis=1)
    nearest = np.abs(all_levels * step - weights).min(axis=0)
    assert np.allclose(np.abs(back - weights), nearest, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("draw", "most"), [("standard_normal", 0.1135), ("random", 0.0995), ("laplace", 0.1245)])
@pytest.mark.parametrize("seed", range(3))
def test_how_far_weights_move_is_bounded(draw: str, most: float, seed: int) -> None:
    """All together by `most` of what they are, which leaves a hundredth to what was measured; and none by more than a
    fifth of the largest of its 32, or a little more where that one is cut off."""
    weights = getattr(np.random.default_rng(seed), draw)(size=(64, 2048)).astype(np.float32)
    weights *= np.random.default_rng(9).choice([-1, 1], weights.shape)
    packed, scales, error = quantise_mxfp4(weights)
    moved = np.abs(dequantised(packed, scales) - weights)
    assert 0.97 * most < np.sqrt(error / float((weights**2).sum())) < most
    largest = np.repeat(np.abs(weights).reshape(64, -1, 32).max(axis=2), 32, axis=1)
    assert (moved <= 0.21 * largest).all()
    step = np.repeat(np.ldexp(np.float32(1), scales.astype(np.int32) - 127), 32, axis=1)
    assert np.sqrt(((moved / step) ** 2).mean()) < 0.25


def test_halves_go_to_the_even_code() -> None:
    weights = np.zeros((16, 32), np.float32)
    weights[0, :9] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25]
    weights[0, 9:] = 4  # so that the scale of one is the best
    packed, scales, _ = quantise_mxfp4(weights)
    assert scales[0, 0] == 127
    assert dequantised(packed, scales)[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0]


def test_zeros_and_extremes_stay_in_range() -> None:
    weights = np.zeros((16, 64), np.float32)
    weights[1], weights[2], weights[3] = 1e38, 1e-45, -1e-38
    packed, scales, _ = quantise_mxfp4(weights)
    assert scales.min() >= 1
    assert scales.max() <= 254
    back = dequantised(packed, scales)
    assert not back[0].any()
    assert np.allclose(back[1], 1e38, rtol=0.2)
    assert np.isfinite(back).all()


def digest_of_some() -> str:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal((37, 320), dtype=np.float32) * np.exp(rng.uniform(-30, 30, (37, 1))).astype(
        np.float32
    )
    results = [quantise_mxfp4(weights, spread=spread) for spread in (False, True)]
    arrays = [digest(packed, scales, np.array(error)) for packed, scales, error in results]
    assert arrays[0] == arrays[1], "on the pool as on one thread"
    return arrays[0]


def test_bits_are_the_same_on_every_path() -> None:
    assert len(set(on_every_path("tests.kernels.test_q4", "digest_of_some").values())) == 1


def test_other_numbers_of_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 columns, not 33"):
        quantise_mxfp4(np.ones((16, 33), np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    weights = np.ones((16, 32), np.float32)
    weights[3, 4] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantise_mxfp4(weights)
