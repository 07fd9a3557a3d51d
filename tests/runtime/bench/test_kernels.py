"""`serai bench kernels`: its claims follow from times and sizes; the peaks' own kernels do what they say."""

from collections.abc import Callable

import numpy as np
import pytest

from serai.kernels import peaks
from serai.kernels.arrays import aligned
from serai.kernels.matrix import Format, unpack
from serai.runtime.bench import kernels
from serai.runtime.bench.kernel_cases import TOKEN_OPERATIONS, Attention, Case, KdaLayers, fast_product, weights
from serai.runtime.bench.kernels import Peaks, Scale, bench_kernels

SMALL = Scale(1 << 20, 1 << 16, 1, 300, 2_000)
PEAK = Peaks(read=1e9, copy=2e9, int8=1e12, bfloat16=2e11, float32=1e11)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_stream_reads_and_copies_every_number_once(streams: int) -> None:
    numbers = aligned(1 << 18, np.float32)
    numbers[:] = np.random.default_rng(0).integers(0, 8, numbers.size)
    out, copied = np.zeros(16 * 4, np.float32), aligned(numbers.size, np.float32)
    peaks.read_stream(numbers, streams, out)
    tasks = numbers.nbytes // streams // peaks.TASK_BYTES
    first_lines = sum(numbers[task * peaks.TASK_BYTES // 4 :][:64].sum() for task in range(tasks))
    assert out.sum() == numbers.sum() + first_lines  # a sum starts from the first four lines of its task
    peaks.copy_stream(numbers, copied, streams)
    np.testing.assert_array_equal(copied, numbers)


def test_made_weights_are_as_large_as_asked_and_hold_numbers() -> None:
    for weight_format in (Format.BF16, Format.MXFP4, Format.Q8):
        w = weights(weight_format, 1 << 18, 256)
        assert w.nbytes == pytest.approx(1 << 18, rel=0.2)
        assert np.isfinite(unpack(w)).all()


def test_kda_layers_stay_finite_and_say_what_they_move() -> None:
    layers = KdaLayers(2, 2, 3)
    layers.step_all()
    assert np.isfinite(layers.after).all()
    assert layers.nbytes == 2 * (layers.before.nbytes)
    layers.after[: layers.state_bytes // 8] = np.nan
    for _ in range(20):
        layers.recur_all()
    assert np.isfinite(layers.after).all()
    assert layers.nbytes - layers.state_bytes == 2 * 2 * 9 * 2 * 128 * 4
    before, after = layers.before, layers.after
    layers.swap()
    assert layers.before is after
    assert layers.after is before


def test_attention_counts_each_row_up_to_its_own_token() -> None:
    attention = Attention(5, 2)
    assert attention.case("x").operations == (4 + 5) * TOKEN_OPERATIONS
    products, expanding = 96 * (192 + 128) * (4 + 5), 96 * (128 + 128) * 512 * 5
    assert attention.expanded_operations == 2 * (products + expanding)


def test_the_peak_of_pairs_adds_both_products() -> None:
    numbers, out = np.full(64, 0.5, np.float32), np.zeros(3 * 192, np.float32)
    numbers.view(np.uint32)[:] |= 0x3E80  # the lower half: 0.25
    peaks.pair_peak(numbers, 3, 4, out)
    np.testing.assert_array_equal(out, numbers[0] + np.float32(4 * (0.5 * 0.5 + 0.25 * 0.25)))


def test_ratios_are_of_the_peak_a_case_names() -> None:
    row = kernels._row(Case("x", lambda: None, 10**9, 5 * 10**10, "float32"), 2.0, PEAK)
    assert row["of stream read"] == pytest.approx(0.5)
    assert row["of stream copy"] == pytest.approx(0.25)
    assert row["of register peak"] == pytest.approx(0.25)
    case = fast_product("y", weights(Format.MXFP4, 1 << 14, 64), 3)
    assert kernels._row(case, 1.0, PEAK)["of register peak"] == pytest.approx(case.operations / 1e12)


def test_every_claim_of_the_issue_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: Callable[[], None], runs: int = 1) -> float:
        run()
        return 1e-3

    monkeypatch.setattr(kernels, "QUICK", SMALL)
    monkeypatch.setattr(kernels, "median_s", once)
    monkeypatch.setattr(kernels, "_DOT_TURNS", 10)
    monkeypatch.setattr(kernels, "other_cases", lambda weight_bytes: iter(()))
    report = bench_kernels(quick=True, tell=lambda _: None)
    assert [(claim.name, claim.target) for claim in report.claims] == [
        ("mxfp4_gemv_vs_stream", ">= 0.8"),
        ("q8_gemv_vs_stream", ">= 0.8"),
        ("prefill_vs_int8_peak", ">= 0.5"),
        ("kda_step_vs_copy", ">= 0.95"),
        ("kda_layer_vs_copy", ">= 0.8"),
        ("kda_flat", "<= 1.05"),
        ("mla_decode_vs_bound", ">= 0.6"),
        ("mla_slope_vs_bound", "<= 1.6"),
        ("mla_q8_vs_bfloat16", None),
    ]
    assert all(claim.holds is not None for claim in report.claims if claim.target is not None)


def test_coded_latents_are_the_same_numbers_in_half_the_bytes() -> None:
    plain, coded = Attention(70), Attention(70, coded=True)
    for attention in (plain, coded):
        attention.run()
    assert coded.case("x").nbytes == 70 * (576 + 8)
    gap = np.linalg.norm(coded._out - plain._out) / np.linalg.norm(plain._out)
    assert 0 < gap < 0.03
