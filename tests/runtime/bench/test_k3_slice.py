"""`serai bench k3-slice`: the quick form runs, says the same at the floor, and reads what it says it reads."""

from pathlib import Path

import pytest

from serai.runtime.bench.k3 import k3_slices
from serai.runtime.bench.k3_slice import BUDGET_BYTES, QUICK, bench_k3_slice, budgets
from serai.runtime.bench.stream_model import packed_bytes


def test_the_whole_slice_is_20_gb_and_6_gib_hold_a_part_of_it() -> None:
    whole = next(k3_slices())
    assert packed_bytes(whole) / 1e9 == pytest.approx(20, abs=0.5)
    budget, floor = budgets(whole)
    assert floor < budget == BUDGET_BYTES


def test_the_quick_form_measures_every_figure(tmp_path: Path) -> None:
    told: list[str] = []
    report = bench_k3_slice(tmp_path, quick=True, tell=told.append)
    named = {claim.name: claim for claim in report.claims}
    assert list(named) == ["rss_over_budget", "same_tokens", "step_s", "token_read_bytes", "bytes_per_s", "prompt_s"]
    assert named["same_tokens"].holds
    assert all(claim.value is not None and claim.value > 0 for claim in report.claims)
    more, least = report.table
    assert least["slots"] == 16
    assert more["slots"] > least["slots"]  # type: ignore[operator]
    record = 1_097_728
    assert least["token_read_bytes"] * QUICK.answer_tokens % record == 0  # type: ignore[operator]
    assert (tmp_path / next(iter(tmp_path.iterdir())) / "config.json").exists()
