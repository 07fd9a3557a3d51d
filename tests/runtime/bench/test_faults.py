"""`serai bench faults`: what it claims of what the harnesses find, and that it runs the real ones."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.bench import faults
from serai.runtime.bench.killed import Relay
from serai.runtime.bench.report import BenchFailed
from serai.runtime.models.open_model import Precision


def found(
    monkeypatch: pytest.MonkeyPatch, *, lost: int = 0, escapes: int = 0, differs_at: int | None = None
) -> list[tuple[str, ...]]:
    calls: list[tuple[str, ...]] = []

    def relay(_model: Path, _folder: Path, _precision: Precision, boundaries: Sequence[int], **_: Any) -> Relay:
        if differs_at is None:
            return Relay(len(boundaries), len(boundaries), None)
        return Relay(len(boundaries), differs_at, "other logits")

    monkeypatch.setattr(faults, "relay", relay)

    def harness(module: str, *arguments: str) -> dict[str, Any]:
        calls.append((module, *arguments))
        if module == "faults":
            return {"faults_injected": 2_295, "faults_lost": lost, "problems": ["save, killed"] * lost}
        return {"files_fuzzed": 20_000, "fuzz_escapes": escapes, "escapes": ["node: KeyError"] * escapes}

    monkeypatch.setattr(faults, "harness", harness)
    return calls


def test_a_store_that_loses_nothing_keeps_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = found(monkeypatch)
    report = faults.bench_faults(tmp_path, quick=False, tell=lambda _: None)
    assert {claim.name: (claim.value, claim.holds) for claim in report.claims} == {
        "faults_injected": (2_295, True),
        "faults_lost": (0, True),
        "files_fuzzed": (20_000, True),
        "fuzz_escapes": (0, True),
        "kills_survived": (602, True),
    }
    assert [call[:3] for call in calls] == [("faults", "--every", "1"), ("fuzzing", "--files", "20000")]
    assert report.table == ()


def test_one_loss_one_escape_and_one_difference_break_their_claims_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found(monkeypatch, lost=1, escapes=1, differs_at=3)
    report = faults.bench_faults(tmp_path, quick=True, tell=lambda _: None)
    assert [claim.holds for claim in report.claims] == [None, False, None, False, False]
    assert [row["problem"] for row in report.table] == ["save, killed", "node: KeyError", *["other logits"] * 2]


def test_the_real_harness_fuzzes_the_files_it_says(tmp_path: Path) -> None:
    done = faults.harness("fuzzing", "--files", "5", "--dir", str(tmp_path))
    assert (done["files_fuzzed"], done["fuzz_escapes"]) == (5, 0)


def test_a_harness_that_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match=r"the harness fuzzing left with exit code 2: .*--files"):
        faults.harness("fuzzing", "--files", "many")
