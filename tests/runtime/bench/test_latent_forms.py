"""`serai bench latents`: in float32 nothing is lost, and the fewer the bits the smaller and the worse."""

from serai.runtime.bench.latent_forms import bench_latents
from serai.runtime.bench.quality import Asked


def test_fewer_bits_are_smaller_and_worse() -> None:
    told: list[str] = []
    report = bench_latents(quick=True, tell=told.append, asked=Asked(compared={256: 1}, asked={256: 1}))
    assert told == ["float32 latents", "bfloat16 latents", "q8 latents"]
    float32, bfloat16, q8 = report.table
    assert (float32["kl"], float32["top_1"]) == (0.0, 1.0)
    assert 0 < bfloat16["kl"] < q8["kl"] < 1e-4  # type: ignore[operator]
    assert q8["token_bytes"] < bfloat16["token_bytes"] < float32["token_bytes"]  # type: ignore[operator]
    named = {claim.name: claim for claim in report.claims}
    assert named["latents_q8_kl"].value == q8["kl"]
    assert 0 < (named["latents_q8_bytes"].value or 0) < 0.5
    assert "latents_q8_recall_256" in named
