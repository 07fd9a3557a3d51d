"""Norms, attention residuals and gates against float64, into buffers full of NaN, in any number of rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.kernels import naive, norms, threads
from tests.kernels.simd_paths import digest, on_every_path

F32 = NDArray[np.float32]
WIDTHS = [1, 15, 16, 17, 64, 65, 200, 2304]


def normal(*shape: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scaled(size: float, *shape: int, seed: int = 0) -> F32:
    return (normal(*shape, seed=seed) * size).astype(np.float32)


def unset(*shape: int) -> F32:
    return np.full(shape, np.nan, np.float32)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1.0, 1e15])
def test_rms_norm_matches_float64_and_touches_only_its_columns(n: int, scale: float) -> None:
    x, w, out = normal(3, n + 7) * np.float32(scale), normal(n, seed=1), unset(3, n + 4)
    norms.rms_norm(x, 5, n, w, 1e-5, out, 3)
    expected = naive.rms_norm(x[:, 5 : 5 + n].astype(np.float64), w, 1e-5)
    np.testing.assert_allclose(out[:, 3 : 3 + n], expected, rtol=1e-6, atol=1e-30)
    assert np.isnan(out[:, :3]).all()
    assert np.isnan(out[:, 3 + n :]).all()


def test_rms_norm_in_place_gives_the_same_bits() -> None:
    x, w, out = normal(2, 100), normal(100, seed=1), unset(2, 100)
    norms.rms_norm(x, 0, 100, w, 1e-6, out, 0)
    norms.rms_norm(x, 0, 100, w, 1e-6, x, 0)
    np.testing.assert_array_equal(x, out)


@pytest.mark.parametrize("hidden", [16, 33, 56, 112, 128, 200])
@pytest.mark.parametrize(("n_blocks", "use_ps"), [(0, 1), (1, 0), (1, 1), (3, 0), (3, 1), (8, 1), (17, 0), (17, 1)])
@pytest.mark.parametrize("size", [3.0, 3e-3])
def test_attention_residual_matches_float64(hidden: int, n_blocks: int, use_ps: int, size: float) -> None:
    """Scores of about 1, so that every state counts, and states so small, too, that each eps does."""
    blocks, ps = scaled(size, n_blocks + 2, 4, hidden), scaled(size, 4, hidden, seed=1)
    blocks[n_blocks:] = np.nan
    score_w, norm_w = directions(hidden)
    out = run_attn_res(blocks, n_blocks, ps, use_ps, score_w, norm_w)
    np.testing.assert_allclose(out, defined(blocks, n_blocks, ps, use_ps, score_w, norm_w), rtol=2e-5, atol=2e-6)


def test_as_many_states_are_mixed_as_there_is_room_for_and_none_or_more_are_refused() -> None:
    most, hidden = norms.MAX_RESIDUALS, 16
    blocks, ps = normal(most, 2, hidden), normal(2, hidden, seed=1)
    score_w, norm_w = directions(hidden)
    for n_blocks, use_ps in ((most, 0), (most - 1, 1)):
        out = run_attn_res(blocks, n_blocks, ps, use_ps, score_w, norm_w)
        np.testing.assert_allclose(out, defined(blocks, n_blocks, ps, use_ps, score_w, norm_w), rtol=2e-5, atol=2e-6)
    for n_blocks, use_ps in ((most, 1), (0, 0)):
        with pytest.raises(ValueError, match="1 to 256"):
            run_attn_res(blocks, n_blocks, ps, use_ps, score_w, norm_w)


def directions(hidden: int) -> tuple[F32, F32]:
    """A score vector that gives scores of about 1, and a norm's weight."""
    return (normal(hidden, seed=2) / np.sqrt(hidden)).astype(np.float32), normal(hidden, seed=3)


def defined(blocks: F32, n_blocks: int, ps: F32, use_ps: int, score_w: F32, norm_w: F32) -> NDArray[np.float64]:
    """What `run_attn_res` should give, in float64."""
    mixed = ps.astype(np.float64)
    if n_blocks:
        states = [block.astype(np.float64) for block in blocks[:n_blocks]]
        weight = score_w.astype(np.float64)
        mixed = naive.attention_residual(states, mixed if use_ps else None, weight, np.ones(1), 1e-5)
    return np.asarray(naive.rms_norm(mixed, norm_w.astype(np.float64), 1e-6))


def run_attn_res(blocks: F32, n_blocks: int, ps: F32, use_ps: int, score_w: F32, norm_w: F32) -> F32:
    out = unset(*ps.shape)
    norms.attn_res(blocks, n_blocks, ps, use_ps, score_w, 1e-5, norm_w, 1e-6, out)
    return out


def test_attention_residual_of_a_dominant_state_is_that_state() -> None:
    blocks, ps = normal(2, 1, 64), normal(1, 64, seed=1)
    score_w = (ps[0] * 1e4).astype(np.float32)
    out = run_attn_res(blocks, 2, ps, 1, score_w, np.ones(64, np.float32))
    np.testing.assert_allclose(out, naive.rms_norm(ps.astype(np.float64), None, 1e-6), rtol=1e-6)


def test_sigmoid_gate_multiplies_in_place_only_its_columns() -> None:
    x, gate = normal(3, 50), normal(3, 60, seed=1) * 20
    before = x.copy()
    norms.sigmoid_gate(x, 4, gate, 9, 33)
    expected = before[:, 4:37] * naive.sigmoid(gate[:, 9:42].astype(np.float64))
    np.testing.assert_allclose(x[:, 4:37], expected, rtol=4e-7)
    np.testing.assert_array_equal(x[:, :4], before[:, :4])
    np.testing.assert_array_equal(x[:, 37:], before[:, 37:])


@pytest.mark.parametrize("n", [1, 16, 17, 40])
def test_copied_heads_land_in_their_columns_and_nowhere_else(n: int) -> None:
    x, out, expected = normal(3, 150), unset(3, 160), unset(3, 160)
    norms.copy_heads(x, 2, n + 3, out, 5, n + 7, 3, n)
    for head in range(3):
        source, target = 2 + head * (n + 3), 5 + head * (n + 7)
        expected[:, target : target + n] = x[:, source : source + n]
    np.testing.assert_array_equal(out, expected)


def test_add_is_one_rounded_addition() -> None:
    a, b, out = normal(3, 37), normal(3, 37, seed=1), unset(3, 37)
    norms.add(a, b, out)
    np.testing.assert_array_equal(out, a + b)
    norms.add(a, b, a)
    np.testing.assert_array_equal(a, out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 15, 16, 36])
def test_finite_check_reports_nan_and_both_infinities(value: float, position: int) -> None:
    """B109: the check is of bits, so that no compiler option can remove it."""
    x, out = normal(3, 37), np.full(3, 7, np.uint8)
    x[2] = np.finfo(np.float32).max
    x[1, position] = value
    norms.is_finite_rows(x, out)
    assert out.tolist() == [1, 0, 1]


def results(rows: int) -> list[NDArray[Any]]:
    """Every kernel of the file over the first `rows` rows of a fixed input."""
    x, w = normal(40, 2304)[:rows].copy(), normal(2304, seed=1)
    blocks, gate = normal(5, 40, 2304, seed=2)[:, :rows].copy(), normal(40, 2304, seed=3)[:rows].copy()
    normed, gated, total = unset(rows, 2304), x.copy(), unset(rows, 2304)
    copied, finite, odd = np.zeros((rows, 2304), np.float32), np.full(rows, 7, np.uint8), x.copy()
    odd[::3, 1000] = np.nan
    norms.rms_norm(x, 0, 2304, w, 1e-5, normed, 0)
    norms.sigmoid_gate(gated, 0, gate, 0, 2304)
    norms.add(x, gate, total)
    norms.copy_heads(x, 4, 150, copied, 0, 140, 12, 128)
    norms.is_finite_rows(odd, finite)
    mixed = run_attn_res(blocks, 5, x, 1, w / np.float32(48), w)
    return [normed, gated, total, copied, finite, mixed]


def bits() -> str:
    return digest(*results(5))


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path(__name__, "bits").values())) == 1


def test_a_rows_bits_do_not_depend_on_rows_or_threads() -> None:
    whole = results(40)
    assert all(np.isfinite(one).all() for one in whole)
    before = threads.threads()
    try:
        for count in (1, 2, 3):
            threads.set_threads(count)
            for rows in (1, 7, 40):
                for part, full in zip(results(rows), whole, strict=True):
                    np.testing.assert_array_equal(part, full[:rows])
    finally:
        threads.set_threads(before)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: norms.rms_norm(x[:, ::2], 0, 4, np.ones(4, np.float32), 1e-5, unset(4, 4), 0),
        lambda x: norms.rms_norm(x.astype(np.float64), 0, 4, np.ones(4, np.float32), 1e-5, unset(4, 4), 0),
        lambda x: norms.add(x, x, x[::2]),
    ],
)
def test_a_strided_or_wrongly_typed_array_is_refused(call: Callable[[F32], None]) -> None:
    """B07: never a silent private copy."""
    with pytest.raises(TypeError):
        call(normal(4, 8))
