"""`serai bench trunk`: as stored nothing is lost, and the fewer the bits the smaller and the worse."""

from serai.runtime.bench.quality import Asked
from serai.runtime.bench.smaller_trunks import bench_trunk


def test_fewer_bits_are_smaller_and_worse() -> None:
    told: list[str] = []
    report = bench_trunk(quick=True, tell=told.append, asked=Asked(compared={256: 1}, asked={256: 1}))
    assert told == ["the trunk as stored", "the trunk q8", "the trunk q4"]
    stored, q8, q4 = report.table
    assert (stored["kl"], stored["top_1"]) == (0.0, 1.0)
    assert 0 < q8["kl"] < q4["kl"]  # type: ignore[operator]
    assert q4["trunk_bytes"] < q8["trunk_bytes"] < stored["trunk_bytes"]  # type: ignore[operator]
    named = {claim.name: claim for claim in report.claims}
    assert named["trunk_q4_kl"].value == q4["kl"]
    assert 0 < (named["trunk_q8_bytes"].value or 0) < 1
    assert "trunk_q4_recall_256" in named
