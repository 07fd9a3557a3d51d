"""`serai bench monitor`: what it claims, and that it measures the real program."""

import pytest

from serai.runtime.bench import monitor


def test_the_claim_is_the_larger_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.02, 0.06])
    monkeypatch.setattr(monitor, "core_share", lambda address, width, height, seconds: (next(shares), 100.0))
    told: list[str] = []
    report = monitor.bench_monitor(quick=True, tell=told.append)
    (claim,) = report.claims
    assert (claim.name, claim.value, claim.target, claim.holds) == ("monitor_core_share", 0.06, "< 0.05", False)
    assert [(row["width"], row["core_share"]) for row in report.table] == [(80, 0.02), (160, 0.06)]
    assert len(told) == 2


def test_the_real_program_is_measured_while_it_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "QUICK_SECONDS", 0.5)
    monkeypatch.setattr(monitor, "SIZES", ((80, 24),))
    (row,) = monitor.bench_monitor(quick=True, tell=lambda _: None).table
    share, drawn = row["core_share"], row["drawn_bytes_s"]
    assert isinstance(share, float)
    assert isinstance(drawn, float)
    assert 0.0 <= share < 2.0
    assert drawn > 0.0
