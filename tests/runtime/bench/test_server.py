"""`serai bench server`: every claim is there, and restless clients leave nothing behind, however short it is."""

from pathlib import Path

import pytest

from serai.runtime.bench import server


def test_a_short_run_is_complete_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "QUICK", server.Span(calm_s=1.0, restless_s=5.0))
    report = server.bench_server(tmp_path, quick=True, tell=lambda _: None)
    claims = {claim.name: claim for claim in report.claims}
    assert list(claims) == ["leaks", "health_p99_ms", "fairness", "overhead_vs_inprocess"]
    seen = report.table[0]
    assert isinstance(seen["leaked"], list)
    assert set(seen["leaked"]) <= {"memory"}, "a few seconds say nothing of memory: allocators settle for longer"
    assert isinstance(seen["visits"], int)
    assert seen["visits"] > server.CLIENTS // 2
    assert claims["fairness"].value is not None


def test_fairness_is_jains_index() -> None:
    assert server.fairness([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert server.fairness([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert server.fairness([0.0, 0.0]) == 0.0
