"""`serai bench sessions`: every claim is there, and those that no machine can change hold at any size."""

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from serai.runtime.bench import sessions
from serai.runtime.bench.fork_cost import fork_cost
from serai.runtime.bench.model import PROMPT_TOKENS
from serai.runtime.bench.resident import forget_peak, peak_resident_bytes, resident_bytes
from serai.runtime.bench.tool_wait import ROWS, mid_shape, mid_tool_wait
from serai.runtime.memory.give_back import give_back_freed


def test_a_small_day_is_complete_and_equal_to_solo_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(
        sessions.QUICK,
        sessions=8,
        hot=3,
        least_tokens=16,
        most_tokens=96,
        working=2,
        sample=3,
        tool_tokens=64,
        forks=5,
        fair_s=0.5,
    )
    monkeypatch.setattr(sessions, "QUICK", small)
    report = sessions.bench_sessions(tmp_path, quick=True, tell=lambda _: None)
    claims = {claim.name: claim for claim in report.claims}
    assert list(claims) == [
        "sessions_equal_solo",
        "rss_over_budget",
        "loop_delay_p99_ms",
        "fairness",
        "fork_ms",
        "fork_bytes",
        "tool_wait_cost",
    ]
    assert claims["sessions_equal_solo"].value == 1.0
    assert claims["fork_bytes"].value == 0.0
    assert "DIFFERENT" not in claims["tool_wait_cost"].detail
    day = report.table[0]
    assert day["completed"] == 8
    assert day["demotions"], "the budget holds only some of them"


def test_a_wait_for_a_tool_of_the_mid_size_models_layout_comes_back_as_it_was(tmp_path: Path) -> None:
    shape = replace(
        mid_shape(4),
        vocab=1_024,
        hidden=128,
        kda_heads=2,
        heads=2,
        q_lora=64,
        kv_lora=64,
        dense_inner=192,
        experts=8,
        experts_per_token=2,
        expert_inner=64,
        expert_latent=64,
    )
    wait = anyio.run(mid_tool_wait, tmp_path, ROWS + 2 * PROMPT_TOKENS, shape, lambda _: None)
    assert wait.same
    assert wait.tokens == ROWS + 2 * PROMPT_TOKENS
    assert wait.state_bytes > 0
    assert min(wait.out_s, wait.back_s, wait.read_s) > 0


def test_a_fork_adds_no_bytes_to_a_k3_shaped_state() -> None:
    cost = anyio.run(fork_cost, 3, 1_000)
    assert cost.added_bytes == 0
    assert cost.state_bytes > 450e6


def test_memory_is_counted_by_the_kernel() -> None:
    give_back_freed()
    forget_peak()
    before = resident_bytes()
    block = bytearray(b"x") * (64 << 20)
    assert resident_bytes() - before > 60 << 20
    del block
    assert peak_resident_bytes() - before > 60 << 20
