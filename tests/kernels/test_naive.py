"""The definitions keep the promises other tests lean on: known values, textbook limits, ties, masks."""

import numpy as np
import pytest

from serai.kernels import naive


def test_gate_is_bounded_or_softplus_as_configured() -> None:
    """B08: a bounded gate is a sigmoid, not a clamp of the older formula."""
    zero, rate = np.zeros((1, 1)), np.ones(1)
    assert naive.log_decay(zero, rate, -5.0)[0, 0] == -2.5
    assert naive.log_decay(zero, rate, 0.0)[0, 0] == pytest.approx(-np.log(2))
    near_bound = naive.log_decay(zero + 10, rate, -5.0)[0, 0]
    assert -5 < near_bound < -4.999
    assert naive.log_decay(zero + 10, rate, 0.0)[0, 0] < -10


def test_softplus_and_sigmoid_survive_extremes() -> None:
    x = np.array([-np.inf, -800.0, -30.0, 0.0, 20.0, 20.1, 800.0, np.inf])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        np.testing.assert_allclose(naive.sigmoid(x)[[0, 3, 7]], [0, 0.5, 1])
        assert naive.softplus(x)[5] == 20.1
        assert naive.softplus(x)[0] == 0
    assert np.isnan(naive.sigmoid(np.array([np.nan])))[0]


def test_bf16_rounds_to_nearest_even_and_keeps_nan_and_infinity() -> None:
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -0.0, np.inf, -np.inf, 3.4e38, 2.0**-133], np.float32)
    expected = [1.0, 1.0, 1 + 2**-6, -0.0, np.inf, -np.inf, np.inf, 2.0**-133]
    np.testing.assert_allclose(naive.bf16_widen(naive.bf16_round(x)), np.array(expected, np.float32), rtol=1e-3)
    payload_only_low_bits = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(naive.bf16_widen(naive.bf16_round(payload_only_low_bits))).all()


def test_8_bit_latents_are_off_by_half_a_scale_at_most_and_each_part_has_its_own() -> None:
    latents = np.random.default_rng(3).standard_normal((50, 24)).astype(np.float32)
    latents[:, 16:] *= 1000
    codes, scales = naive.q8_latents(latents, 16)
    wide = naive.q8_widen(codes, scales, 16)
    assert (np.abs(wide - latents) <= 0.5001 * np.repeat(scales, (16, 8), axis=1)).all()
    assert (np.abs(codes[:, :16]).max(axis=1) == 127).all(), "the largest number of a part has the largest code"
    assert scales[:, 1].min() > 100 * scales[:, 0].max()


def test_8_bit_latents_of_nothing_and_of_what_is_no_number() -> None:
    """Ties go to even; a part that is 0 has a scale of 0, one with a NaN or infinity none."""
    latents = np.array([[127, 2.5, 3.5, 0], [0, 0, 0, 1e-31], [np.nan, 1, 1, 2], [1, 1, 1, np.inf]], np.float32)
    codes, scales = naive.q8_latents(latents, 3)
    assert codes.tolist() == [[127, 2, 4, 0], [0, 0, 0, 0], [0, 0, 0, 127], [127, 127, 127, 0]]
    wide = naive.q8_widen(codes, scales, 3)
    assert np.isnan(wide).tolist() == [[False] * 4, [False] * 4, [True] * 3 + [False], [False] * 3 + [True]]
    assert wide[0].tolist() == [127, 2, 4, 0]
    assert wide[1].tolist() == [0, 0, 0, 0]


def test_mxfp4_low_nibble_is_the_even_column_and_scales_are_powers_of_two() -> None:
    packed = np.zeros((1, 32), np.uint8)
    packed[0, 0], packed[0, 16] = 0x72, 0xF9
    decoded = naive.mxfp4_decode(packed, np.array([[127, 130]], np.uint8))
    assert decoded.shape == (1, 64)
    assert decoded[0, :2].tolist() == [1.0, 6.0]
    assert decoded[0, 32:34].tolist() == [-0.5 * 8, -6.0 * 8]
    assert naive.mxfp4_decode(packed, np.zeros((1, 2), np.uint8))[0, 0] == 2.0**-127


def test_router_breaks_ties_by_lowest_id_and_weighs_without_the_bias() -> None:
    logits = np.array([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    bias = np.array([0.0, 0.0, 0.0, 5.0])
    ids, weights = naive.route(logits, bias, 2, 1, 1, False, 1.0)
    assert ids.tolist() == [[1, 3], [0, 3]]
    np.testing.assert_allclose(weights, naive.sigmoid(np.take_along_axis(logits, ids, axis=1)))
    _, normed = naive.route(logits, bias, 2, 1, 1, True, 2.5)
    np.testing.assert_allclose(normed.sum(axis=1), 2.5)


def test_router_keeps_only_the_groups_whose_two_best_are_strongest() -> None:
    strength = np.array([[0.9, 0.01, 0.01, 0.5, 0.5, 0.01, 0.45, 0.45, 0.45]])
    logits = np.log(strength / (1 - strength))
    ids, _ = naive.route(logits, np.zeros(9), 2, 3, 1, True, 1.0)
    assert ids.tolist() == [[3, 4]]
    ids, _ = naive.route(logits, np.zeros(9), 3, 3, 2, True, 1.0)
    assert ids.tolist() == [[0, 3, 4]]


def test_attention_residual_of_one_block_is_the_block() -> None:
    rng = np.random.default_rng(0)
    block, norm, proj = rng.standard_normal((3, 8)), rng.standard_normal(8), rng.standard_normal(8)
    np.testing.assert_allclose(naive.attention_residual([block], None, norm, proj, 1e-6), block)
    mixed = naive.attention_residual([block], block, norm, proj, 1e-6)
    np.testing.assert_allclose(mixed, block)


def test_short_conv_split_anywhere_gives_the_same_values() -> None:
    rng = np.random.default_rng(1)
    x, weight, tail = rng.standard_normal((9, 5)), rng.standard_normal((5, 4)), rng.standard_normal((3, 5))
    whole, last = naive.short_conv(x, weight, tail)
    for split in range(1, 9):
        first, middle = naive.short_conv(x[:split], weight, tail)
        second, end = naive.short_conv(x[split:], weight, middle)
        np.testing.assert_array_equal(np.concatenate([first, second]), whole)
        np.testing.assert_array_equal(end, last)


def test_a_masked_latent_has_no_influence_even_if_it_is_infinite_in_score() -> None:
    """B109: the mask is minus infinity, and minus infinity never becomes NaN."""
    rng = np.random.default_rng(2)
    q, latents = rng.standard_normal((2, 3, 6)), rng.standard_normal((5, 6))
    out = naive.mla_absorbed(q, latents, 0.5, 4)
    changed = latents.copy()
    changed[4] = 1e300
    np.testing.assert_array_equal(naive.mla_absorbed(q, changed, 0.5, 4)[0], out[0])
    assert np.isfinite(out).all()


def test_mixture_sums_each_tokens_experts() -> None:
    ids = np.array([[0, 2], [1, 2]])
    weights = np.array([[0.5, 0.25], [1.0, 2.0]])
    out = naive.mixture(np.ones((2, 1)), ids, weights, lambda e, rows: rows * 10.0**e)
    np.testing.assert_allclose(out[:, 0], [0.5 + 25, 10 + 200])
    with pytest.raises(ValueError, match="at least one token"):
        naive.mixture(np.ones((0, 1)), ids[:0], weights[:0], lambda e, rows: rows)
