"""The mixture of experts: routing, grouping, the experts' products, their sum, and the activations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from serai.kernels import naive, threads
from serai.kernels.activation import activate
from serai.kernels.arrays import aligned
from serai.kernels.experts import ExpertLayout, pack_expert
from serai.kernels.matrix import Format
from serai.kernels.moe import combine, combine_some, experts
from serai.kernels.quantize import Quantized
from serai.kernels.route import group, look_up, route
from tests.kernels.simd_paths import digest, on_every_path
from tests.kernels.test_matmul import normal, unset
from tests.kernels.test_matrix import mxfp4


@dataclass(frozen=True)
class Act:
    situ_beta: float = 0.0
    situ_linear_beta: float | None = None


def activated(gate: Any, up: Any, act: Act) -> Any:
    """The definition."""
    if act.situ_beta:
        return naive.situ(gate, up, act.situ_beta, act.situ_linear_beta)
    return naive.swiglu(gate, up)


SWIGLU, SITU, HALF_SITU = Act(), Act(4.0, 25.0), Act(4.0)


# Activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [SWIGLU, SITU, HALF_SITU])
@pytest.mark.parametrize("n", [1, 15, 16, 33, 1024, 2100])
def test_activations_match_float64_and_touch_only_their_columns(act: Act, n: int) -> None:
    x, out = unset(3, 2 * n + 9), unset(3, n + 4)
    x[:, 2 : 2 + n], x[:, 5 + n : 5 + 2 * n] = normal(3, n) * 8, normal(3, n, seed=1) * 30
    activate(x, 2, 5 + n, n, act, out, 3)
    gate, up = x[:, 2 : 2 + n].astype(np.float64), x[:, 5 + n : 5 + 2 * n].astype(np.float64)
    np.testing.assert_allclose(out[:, 3 : 3 + n], activated(gate, up, act), rtol=2e-6, atol=1e-30)
    assert np.isnan(out[:, :3]).all()
    assert np.isnan(out[:, 3 + n :]).all()


@pytest.mark.parametrize("act", [SWIGLU, SITU])
def test_extreme_gates_stay_finite_and_nan_shows(act: Act) -> None:
    x, out = np.zeros((1, 32), np.float32), unset(1, 16)
    x[0, :5], x[0, 16:] = [-1e4, -88, 0, 88, 1e4], 2.0
    x[0, 5] = np.nan
    activate(x, 0, 16, 16, act, out, 0)
    assert np.isfinite(out[0, :5]).all()
    assert np.isnan(out[0, 5])


def test_columns_of_an_activation_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        activate(normal(1, 8), 0, 5, 4, SWIGLU, unset(1, 4), 0)
    with pytest.raises(ValueError, match="2 rows for 1"):
        activate(normal(1, 8), 0, 4, 4, SWIGLU, unset(2, 4), 0)


# Routing ---------------------------------------------------------------------------------------------------------


def routed(
    logits: Any, bias: Any, k: int, groups: tuple[int, int] = (1, 1), renormalize: bool = True, scale: float = 1.0
) -> tuple[Any, Any]:
    rows, n = logits.shape
    wide = unset(rows, n + 7)
    wide[:, 4 : 4 + n] = logits
    ids, weights = np.full((rows, k), -7, np.int32), unset(rows, k)
    route(wide, 4, np.asarray(bias, np.float32), k, *groups, renormalize, scale, ids, weights)
    return ids, weights


def logit(scores: list[float]) -> Any:
    s = np.array([scores], np.float64)
    return np.log(s / (1 - s)).astype(np.float32)


def test_the_bias_picks_experts_but_does_not_weight_them() -> None:
    """B09"""
    ids, weights = routed(logit([0.9, 0.8, 0.1, 0.2]), [-1, 0, 0.75, 0], 2)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[0.8889, 0.1111]], atol=5e-5)


@pytest.mark.parametrize("experts_k", [(1, 1), (4, 2), (16, 16), (37, 5), (256, 8), (896, 16)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_matches_its_definition(experts_k: tuple[int, int], renormalize: bool) -> None:
    n, k = experts_k
    logits, bias = normal(50, n) * 3, normal(n, seed=1) * np.float32(0.1)
    ids, weights = routed(logits, bias, k, renormalize=renormalize, scale=2.446)
    expected_ids, expected = naive.route(logits.astype(np.float64), bias, k, 1, 1, renormalize, 2.446)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


@pytest.mark.parametrize("groups", [(8, 3), (4, 1), (64, 20)])
def test_grouped_routing_matches_its_definition(groups: tuple[int, int]) -> None:
    logits, bias = normal(50, 64) * 3, normal(64, seed=1) * np.float32(0.1)
    k = min(6, 64 // groups[0] * groups[1])
    ids, weights = routed(logits, bias, k, groups)
    expected_ids, expected = naive.route(logits.astype(np.float64), bias, k, *groups, True, 1.0)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-6)


def test_ties_take_the_lowest_experts() -> None:
    ids, weights = routed(np.zeros((2, 40), np.float32), np.zeros(40), 5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_array_equal(weights, np.full((2, 5), 0.2, np.float32))
    ids, _ = routed(np.zeros((1, 64), np.float32), np.zeros(64), 6, (16, 2))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_picks_are_distinct_experts_whatever_the_logits() -> None:
    for value in (np.nan, np.inf, -np.inf, 1e30, -1e30):
        ids, _ = routed(np.full((1, 20), value, np.float32), np.zeros(20), 16)
        assert ids[0].tolist() == list(range(16))


def test_an_expert_whose_score_is_nan_comes_last() -> None:
    logits = np.zeros((1, 20), np.float32)
    logits[0, :17] = np.nan
    ids, weights = routed(logits, np.zeros(20), 4, renormalize=False)
    assert ids.tolist() == [[0, 17, 18, 19]]
    assert np.isnan(weights[0, 0])


def test_sizes_that_make_no_routing_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot pick 5 of 4"):
        routed(normal(1, 4), np.zeros(4), 5)
    with pytest.raises(ValueError, match="cannot pick 3 of 2"):
        routed(normal(1, 4), np.zeros(4), 3, (2, 1))
    with pytest.raises(ValueError, match="3 groups"):
        routed(normal(1, 4), np.zeros(4), 1, (3, 1))
    with pytest.raises(ValueError, match="1 to 4096 experts"):
        routed(normal(1, 4097), np.zeros(4097), 1)
    with pytest.raises(ValueError, match="no 8 columns"):
        route(normal(1, 8), 1, normal(8), 1, 1, 1, True, 1.0, np.zeros((1, 1), np.int32), unset(1, 1))


# Grouping --------------------------------------------------------------------------------------------------------


def grouped(ids: Any, n_experts: int) -> tuple[Any, Any, Any]:
    most = min(ids.size, n_experts)
    experts, start = np.full(most, -1, np.int32), np.full(most + 1, -1, np.int32)
    pairs, found = np.full(ids.size, -1, np.int32), np.full(1, -1, np.int32)
    group(ids, n_experts, experts, start, pairs, found)
    return experts[: found[0]], start[: found[0] + 1], pairs


def test_grouping_lists_every_pair_by_expert_and_row() -> None:
    ids = np.array([[1, 4], [0, 4], [1, 2]], np.int32)
    found, start, pairs = grouped(ids, 6)
    assert found.tolist() == [0, 1, 2, 4]
    assert start.tolist() == [0, 1, 3, 4, 6]
    assert pairs.tolist() == [2, 0, 4, 5, 1, 3]


def test_places_left_repeat_the_last_expert_without_pairs() -> None:
    """As many as other picks could have taken, so that the arrays of every call are as long."""
    ids = np.array([[1, 4], [1, 4], [1, 4]], np.int32)
    experts, start = np.full(9, -1, np.int32), np.full(9, -1, np.int32)
    found, addresses = np.zeros(1, np.int32), np.zeros(6, np.int64)
    group(ids, 8, experts, start, np.zeros(6, np.int32), found)
    assert found[0] == 2
    assert experts.tolist() == [1, 4, 4, 4, 4, 4, -1, -1, -1]
    assert start.tolist() == [0, 3, 6, 6, 6, 6, 6, -1, -1]
    look_up(np.arange(100, 108), experts[:6], addresses)
    assert addresses.tolist() == [101, 104, 104, 104, 104, 104]
    group(ids[:0], 8, experts, start, np.zeros(0, np.int32), found)
    assert (found[0], start[0]) == (0, 0)


def test_grouping_any_picks_is_a_stable_sort() -> None:
    ids = np.random.default_rng(0).integers(0, 896, (67, 16)).astype(np.int32)
    found, start, pairs = grouped(ids, 896)
    np.testing.assert_array_equal(pairs, np.argsort(ids.reshape(-1), kind="stable"))
    np.testing.assert_array_equal(found, np.unique(ids))
    np.testing.assert_array_equal(np.diff(start), np.unique(ids, return_counts=True)[1])


def test_picks_that_are_no_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="not among the experts"):
        grouped(np.array([[3, -1]], np.int32), 4)
    two = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match="need 2, 3 and 2 places"):
        group(np.zeros((1, 2), np.int32), 4, two, two, two, two)


# Experts ---------------------------------------------------------------------------------------------------------


class Experts:
    """Random experts in records, and their dense weights."""

    def __init__(self, weight_format: Format, latent: int, inner: int, count: int) -> None:
        self.layout = ExpertLayout(weight_format, latent, inner)
        self.records = aligned(count * self.layout.record_bytes, np.uint8).reshape(count, -1)
        self.records[:] = 0xAA
        self.dense = []
        for e in range(count):
            shapes = ((inner, latent), (inner, latent), (latent, inner))
            parts = [self._weights(n, k, 10 * e + i) for i, (n, k) in enumerate(shapes)]
            w1, w3, w2 = (stored for stored, _ in parts)
            pack_expert(self.layout, w1, w3, w2, self.records[e])
            self.dense.append([dense.astype(np.float64) for _, dense in parts])
        self.addresses = self.records.ctypes.data + np.arange(count, dtype=np.int64) * self.layout.record_bytes

    def _weights(self, n: int, k: int, seed: int) -> tuple[Any, Any]:
        if self.layout.format is Format.MXFP4:
            stored = mxfp4(n, k, seed)
            return stored, naive.mxfp4_decode(*stored)
        w = normal(n, k, seed=seed)
        if self.layout.format is Format.F32:
            return w, w
        bits = (w.view(np.uint32) >> 16).astype(np.uint16)
        return bits, naive.bf16_widen(bits)

    def run(self, x: Any, ids: Any, act: Act, fast: bool = False, calls: int = 1) -> Any:
        """Every pair's output, the visited experts in so many calls, last ones first."""
        (rows, k), layout = ids.shape, self.layout
        wide = unset(rows, layout.latent + 3)
        wide[:, 2:-1] = x
        found, start, pairs = grouped(ids, len(self.records))
        mid, y = unset(ids.size, layout.inner), unset(ids.size, layout.latent)
        quantised = None
        if fast:
            quantised = Quantized.empty(rows + 1, layout.latent), Quantized.empty(ids.size, layout.inner)
        for part in reversed(np.array_split(np.arange(len(found)), calls)):
            if len(part):
                where, ends = self.addresses[found[part]], start[part[0] : part[-1] + 2]
                experts(wide, 2, layout, where, ends, pairs, k, act, mid, y, fast=fast, quantised=quantised)
        return y

    def expected(self, x: Any, ids: Any, act: Act) -> Any:
        out = np.empty((ids.size, self.layout.latent))
        for row, picks in enumerate(ids):
            for j, e in enumerate(picks):
                w1, w3, w2 = self.dense[e]
                gate, up = w1 @ x[row].astype(np.float64), w3 @ x[row].astype(np.float64)
                out[row * ids.shape[1] + j] = w2 @ activated(gate, up, act)
        return out


def picks(rows: int, k: int, count: int) -> Any:
    rng = np.random.default_rng(rows)
    return np.sort(np.stack([rng.permutation(count)[:k] for _ in range(rows)]), axis=1).astype(np.int32)


KINDS = [
    (Format.F32, 20, 37, False),
    (Format.BF16, 100, 33, False),
    (Format.MXFP4, 96, 160, False),
    (Format.MXFP4, 96, 160, True),
]


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("weight_format", "latent", "inner", "fast"), KINDS)
@pytest.mark.parametrize("rows", [1, 5, 150])
def test_experts_match_float64(weight_format: Format, latent: int, inner: int, fast: bool, rows: int) -> None:
    made = Experts(weight_format, latent, inner, 7)
    x, ids = normal(rows, latent), picks(rows, 3, 7)
    for act in (SWIGLU, SITU):
        y = made.run(x, ids, act, fast)
        assert relative(y, made.expected(x, ids, act)) < (0.04 if fast else 1e-6)


@pytest.mark.parametrize(("weight_format", "latent", "inner", "fast"), KINDS)
def test_a_pair_has_the_same_bits_in_any_company(weight_format: Format, latent: int, inner: int, fast: bool) -> None:
    made = Experts(weight_format, latent, inner, 5)
    x, ids = normal(150, latent), picks(150, 2, 5)
    together = made.run(x, ids, SITU, fast)
    for rows in (1, 7, 67):
        np.testing.assert_array_equal(made.run(x[:rows], ids[:rows], SITU, fast), together[: 2 * rows])
    order = np.random.default_rng(1).permutation(150)
    shuffled = made.run(x[order], ids[order], SITU, fast).reshape(150, 2, -1)
    np.testing.assert_array_equal(shuffled, together.reshape(150, 2, -1)[order])


@pytest.mark.parametrize(("weight_format", "latent", "inner", "fast"), KINDS)
def test_more_rows_than_pass_by_together_and_none(weight_format: Format, latent: int, inner: int, fast: bool) -> None:
    """Two experts with 150 rows each, and between them one that nobody picked."""
    made = Experts(weight_format, latent, inner, 3)
    x, ids = normal(300, latent), np.repeat(np.array([[0], [2]], np.int32), 150, axis=0)
    quantised = (Quantized.empty(300, latent), Quantized.empty(300, inner)) if fast else None
    pairs, mid, y = np.arange(300, dtype=np.int32), unset(300, inner), unset(300, latent)
    start = np.array([0, 150, 150, 300], np.int32)
    experts(x, 0, made.layout, made.addresses, start, pairs, 1, SITU, mid, y, fast=fast, quantised=quantised)
    for some in (slice(0, 9), slice(145, 155), slice(291, 300)):
        np.testing.assert_array_equal(made.run(x[some], ids[some], SITU, fast), y[some])


@pytest.mark.parametrize("codes", [(0, 30), (100, 140), (127, 128), (220, 256)])
@pytest.mark.parametrize("size", [1e-29, 1.0, 1e30])
def test_scales_of_any_size_have_the_same_bits_in_any_company(codes: tuple[int, int], size: float) -> None:
    """Many rows take a shorter way to a product of scales, where it is a normal number."""
    made = Experts(Format.MXFP4, 96, 160, 3)
    scales = made.records[:, made.layout.offsets[3] : made.layout.offsets[-1]]
    scales[:] = np.random.default_rng(2).integers(*codes, scales.shape)
    x, ids = normal(90, 96) * np.float32(size), picks(90, 2, 3)
    # Some blocks of zeros and one that is no number, but not in all experts' rows.
    x[80:, 32:64], x[85, 3] = 0.0, np.nan
    for rows in (60, 84, 90):
        together = made.run(x[:rows], ids[:rows], SITU, True).reshape(rows, 2, -1)
        for first in range(0, rows, 9):
            some = slice(first, min(first + 9, rows))
            alone = made.run(x[some], ids[some], SITU, True)
            np.testing.assert_array_equal(alone, together[some].reshape(alone.shape))


@pytest.mark.parametrize(("weight_format", "latent", "inner", "fast"), KINDS)
def test_experts_may_come_in_several_calls(weight_format: Format, latent: int, inner: int, fast: bool) -> None:
    made = Experts(weight_format, latent, inner, 7)
    x, ids = normal(9, latent), picks(9, 4, 7)
    together = made.run(x, ids, SWIGLU, fast)
    for calls in (2, 5):
        np.testing.assert_array_equal(made.run(x, ids, SWIGLU, fast, calls), together)


@pytest.mark.parametrize("fast", [False, True])
def test_the_thread_count_decides_no_bits(fast: bool) -> None:
    made, before = Experts(Format.MXFP4, 256, 320, 5), threads.threads()
    x, ids, results = normal(40, 256), picks(40, 3, 5), []
    for n in (1, 2, 3):
        threads.set_threads(n)
        results.append(made.run(x, ids, SITU, fast))
    threads.set_threads(before)
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])


def test_a_row_with_nan_spoils_only_its_own_pairs() -> None:
    """B109"""
    made = Experts(Format.MXFP4, 64, 64, 3)
    x, ids = normal(4, 64), picks(4, 2, 3)
    clean = made.run(x, ids, SITU, True)
    x[2, 5] = np.nan
    for fast in (False, True):
        y = made.run(x, ids, SITU, fast).reshape(4, 2, -1)
        assert np.isnan(y[2]).all()
        assert np.isfinite(y[[0, 1, 3]]).all()
    np.testing.assert_array_equal(y[[0, 1, 3]], clean.reshape(4, 2, -1)[[0, 1, 3]])


def test_a_record_is_whole_pages_and_ends_in_zeros() -> None:
    layout = ExpertLayout(Format.MXFP4, 96, 160)
    assert layout.record_bytes % 4096 == 0
    assert layout.offsets[-1] == 3 * 96 * 160 * 17 // 32
    made = Experts(Format.MXFP4, 96, 160, 1)
    assert not made.records[0, layout.offsets[-1] :].any()


def test_what_does_not_fit_an_expert_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        ExpertLayout(Format.MXFP4, 48, 64)
    with pytest.raises(ValueError, match="latent and an inner"):
        ExpertLayout(Format.F32, 0, 64)
    layout = ExpertLayout(Format.F32, 8, 16)
    record = np.zeros(layout.record_bytes, np.uint8)
    with pytest.raises(ValueError, match=r"must be f32 \[16, 8\]"):
        pack_expert(layout, normal(8, 16), normal(16, 8), normal(8, 16), record)
    with pytest.raises(ValueError, match="a record is uint8"):
        pack_expert(layout, normal(16, 8), normal(16, 8), normal(8, 16), record[:-1])
    made = Experts(Format.MXFP4, 32, 32, 2)
    start, pairs = np.array([0, 1], np.int32), np.zeros(1, np.int32)
    args = (made.layout, made.addresses[:1], start, pairs, 1, SWIGLU, unset(1, 32), unset(1, 32))
    with pytest.raises(ValueError, match="need scratch"):
        experts(normal(1, 32), 0, *args, fast=True)
    with pytest.raises(ValueError, match="no 32 columns from 1"):
        experts(normal(1, 32), 1, *args)
    with pytest.raises(ValueError, match="1 pairs of 2 rows"):
        experts(normal(2, 32), 0, *args)
    with pytest.raises(ValueError, match="need 3 starts"):
        experts(normal(1, 32), 0, made.layout, made.addresses, *args[2:])


# Their sum -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "k", "latent"), [(1, 1, 1), (3, 4, 37), (5, 16, 1040)])
def test_outputs_are_summed_in_ascending_order(rows: int, k: int, latent: int) -> None:
    y, weights, out = normal(rows * k, latent), normal(rows, k, seed=1), unset(rows, latent)
    combine(y, weights, out)
    each = y.reshape(rows, k, latent)
    np.testing.assert_allclose(out, np.einsum("rk,rkl->rl", weights.astype(np.float64), each), rtol=1e-4, atol=1e-5)
    total = weights[:, :1] * each[:, 0]
    for j in range(1, k):  # a float64 product of float32 numbers is exact: one rounding, as in a fused multiply-add
        total = (weights[:, j : j + 1].astype(np.float64) * each[:, j] + total).astype(np.float32)
    np.testing.assert_allclose(out, total, rtol=2e-7, atol=1e-9)
    assert (out == total).mean() > 0.999


@pytest.mark.parametrize(("rows", "k", "latent"), [(1, 1, 1), (7, 4, 37), (40, 8, 1040)])
def test_a_few_pairs_at_a_time_give_the_same_sum(rows: int, k: int, latent: int) -> None:
    """Experts in ascending order, in calls of any size: the bits of all at once, the sign of a zero too."""
    y, weights = normal(rows * k, latent), normal(rows, k, seed=1)
    y[::3] *= -0.0
    whole, out = unset(rows, latent), unset(rows, latent)
    combine(y, weights, whole)
    pairs = np.arange(rows * k, dtype=np.int32).reshape(rows, k).T.reshape(-1)  # first picks, then second ones
    for some in np.array_split(pairs, 5):
        combine_some(np.ascontiguousarray(y[some]), np.ascontiguousarray(some), weights, out)
    assert out.tobytes() == whole.tobytes()


def test_shapes_that_do_not_combine_are_refused() -> None:
    with pytest.raises(ValueError, match="do not combine"):
        combine(normal(4, 8), normal(2, 3), unset(2, 8))
    with pytest.raises(ValueError, match="do not make"):
        combine_some(normal(4, 8), np.arange(3, dtype=np.int32), normal(2, 3), unset(2, 8))
    with pytest.raises(ValueError, match="not all among 6"):
        combine_some(normal(1, 8), np.array([6], np.int32), normal(2, 3), unset(2, 8))


def bits() -> str:
    """Everything of this file in few and many rows, as a hash."""
    made = []
    for rows in (1, 9, 60):
        ids, weights = routed(normal(rows, 30), normal(30, seed=1) * 0.1, 3)
        ids %= 5
        for weight_format, latent, inner, fast in KINDS:
            y = Experts(weight_format, latent, inner, 5).run(normal(rows, latent), ids, SITU, fast)
            out = unset(rows, latent)
            combine(y, weights, out)
            made += [ids, weights, y, out]
    return digest(*made)


def test_every_simd_path_gives_the_same_bits() -> None:
    assert len(set(on_every_path("tests.kernels.test_moe", "bits").values())) == 1
