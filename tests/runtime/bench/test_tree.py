"""`serai bench tree`: every claim is there, and those that no machine can change hold at any size."""

from dataclasses import replace
from pathlib import Path

import pytest

from serai.runtime.bench import tree
from serai.runtime.services import Policy


def test_beginnings_are_read_once_and_bits_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        tree.QUICK,
        prefix_tokens=300,
        session_tokens=512,
        fork_position=300,
        fork_policy=Policy(snapshot_every=64),
        answer_tokens=64,
        rounds=1,
    )
    monkeypatch.setattr(tree, "QUICK", small)
    report = tree.bench_tree(tmp_path, quick=True, tell=lambda _: None)
    claims = {claim.name: claim for claim in report.claims}
    assert list(claims) == [
        "shared_prefix_prefills",
        "reuse_bits_equal",
        "fork_at_64k_ms",
        "fork_at_vs_prefill",
        "speculation_gain_copying",
        "speculation_gain_other",
    ]
    assert claims["shared_prefix_prefills"].holds
    assert claims["reuse_bits_equal"].value == 1.0
    assert claims["fork_at_64k_ms"].holds is None
    assert report.table[0]["replayed_tokens"] == 300 - 256
