"""`serai bench experts-per-token`: nothing is lost with the model's own number, something is read less with fewer."""

from serai.runtime.bench.fewer_experts import Scale, bench_fewer_experts
from serai.runtime.bench.quality import Asked

SMALL = Scale(Asked(compared={256: 1}, asked={256: 1}), streamed_tokens=40)


def test_the_models_own_number_costs_nothing_and_fewer_read_less() -> None:
    told: list[str] = []
    report = bench_fewer_experts(quick=True, tell=told.append, scale=SMALL)
    assert told == ["2 of 2 experts a token", "1 of 2 experts a token"]
    own, one = report.table
    assert (own["experts_per_token"], own["kl"], own["top_1"]) == (2, 0.0, 1.0)
    assert one["experts_per_token"] == 1
    assert one["kl"] > 0  # type: ignore[operator]
    assert one["cold_token_bytes"] * 2 == own["cold_token_bytes"]  # type: ignore[operator]
    assert 0 < one["read_token_bytes"] < own["read_token_bytes"]  # type: ignore[operator]
    named = {claim.name: claim for claim in report.claims}
    assert named["experts_per_token_1_kl"].value == one["kl"]
    assert 0 < (named["experts_per_token_1_read_share"].value or 0) < 1
    assert "experts_per_token_1_recall_256" in named
