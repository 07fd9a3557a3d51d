"""`serai bench start`: what it claims, and what it says when the measured process fails."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serai.runtime.bench import start
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.tiny import TINY_K3, write_tiny_model


def test_the_claims_are_the_median_of_the_warm_starts_and_the_cold_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: Iterator[float] = iter([60.0, 1.0, 9.0, 2.0, 1.5, 2.5])
    monkeypatch.setattr(start, "first_token_s", lambda model, scratch: next(seconds))
    told: list[str] = []
    report = start.bench_start(tmp_path, quick=False, tell=told.append)
    cold, warm = report.claims
    assert (cold.name, cold.value, cold.target, cold.holds) == ("cold_start_s", 60.0, None, None)
    assert (warm.name, warm.value, warm.target, warm.holds) == ("warm_start_s", 2.0, "< 3", True)
    assert [row["seconds"] for row in report.table] == [60.0, 1.0, 9.0, 2.0, 1.5, 2.5]
    assert len(told) == 6


def test_a_slow_start_breaks_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "first_token_s", lambda model, scratch: 3.0)
    assert start.bench_start(tmp_path, quick=True, tell=lambda _: None).claims[1].holds is False


def test_a_report_has_exactly_the_keys_of_the_contract() -> None:
    report = Report("start", (Claim.below("warm_start_s", 2.0, "s", 3.0, "how"),), ({"start": "warm", "seconds": 2.0},))
    values = report.to_json()
    assert set(values) == {"bench", "machine", "claims", "table"}
    claims = values["claims"]
    assert isinstance(claims, list)
    assert set(claims[0]) == {"name", "value", "unit", "target", "holds", "detail"}


def test_a_measured_process_that_fails_is_one_sentence(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", TINY_K3)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(BenchFailed, match=r"left with exit code 1: serai: .*safetensors"):
        start.first_token_s(tmp_path / "model", tmp_path)


def test_a_process_that_hangs_is_ended() -> None:
    with (
        subprocess.Popen(["sleep", "60"], env=os.environ) as process,
        start._ended_after(process, 0.01),
    ):
        assert process.wait(timeout=10) < 0
