"""Scenarios from the field: what memory is counted, who gets it next, and that all of it comes back."""

import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.runtime import Runtime, Session
from serai.runtime.cli.output import bytes_text
from serai.runtime.errors import (
    BadParameter,
    OutOfBudget,
)
from serai.runtime.memory.residency import Tier
from serai.runtime.monitor.plain_output import snapshot_text
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.state import session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import FIXED, LAYOUT, LOGITS, PAGE, hash_of, logits_of
from tests.shared import ROOT

pytestmark = pytest.mark.anyio


KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)


async def equals_cold(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


async def test_fifty_sessions_ramp_up_within_the_budget(tmp_path: Path) -> None:
    """B116: sessions are moved out before the limit, never over it; the limit itself is read in `memory_limits`."""
    limit = 12 * session_bytes(LAYOUT, 64)
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=KEEPING, limits=Limits(16, 8)) as rt:
        sessions = []
        for number in range(50):
            session = await rt.session()
            await session.append([number % 16, *[number // 16] * 63])
            sessions.append(session)
            budget = rt.status().budget
            assert budget.used_bytes + budget.reserved_bytes <= limit
        assert sum(session.tier is Tier.COLD for session in sessions) >= 38
        for number in (0, 13, 49):
            assert await equals_cold(sessions[number], [number % 16, *[number // 16] * 63])


async def test_snapshots_count_and_everything_returns_to_where_it_began(tmp_path: Path) -> None:
    """B117: live states, kept ones and reserves stay under the budget at each step; closing gives all of it back."""
    limit = 6_000
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=KEEPING, limits=Limits(8, 8)) as rt:
        root = await rt.session()
        await root.append([1] * 40)
        grown = [root]
        for number in range(30):
            fork = await grown[number // 2].fork()
            await fork.append([number % 16] * 7)
            grown.append(fork)
            budget = rt.status().budget
            assert budget.used_bytes + budget.reserved_bytes <= limit
            own = sum(session.own_bytes for session in rt.status().sessions)
            assert own <= budget.live_bytes + budget.kept_bytes
            shown = snapshot_text(rt.status(), "here")
            assert f"{bytes_text(budget.used_bytes)} of {bytes_text(limit)}" in shown, "monitors show that sum"
        await rt.settle()
        rt.check()
        for session in grown:
            await session.close()
        services = rt._services
        services.prefixes.clear()
        budget = rt.status().budget
        assert (budget.live_bytes, budget.kept_bytes, budget.reserved_bytes) == (0, 0, 0)


GROWS = """
from tests.runtime.memory.growing import grow
print(*grow())
"""


def test_what_is_counted_is_what_the_process_takes() -> None:
    """B117: forks and kept states of a model with states of megabytes, in a process of its own: within 5 %."""
    done = subprocess.run([sys.executable, "-c", GROWS], cwd=ROOT, check=True, capture_output=True, text=True)
    grown, counted, left = (int(one) for one in done.stdout.split())
    assert counted > 100 << 20
    assert abs(grown - counted) <= 0.05 * counted
    assert left <= 0.05 * counted, "all of it came back"


async def test_one_over_is_refused_and_two_that_fit_in_turn_take_turns() -> None:
    """B119: with states kept for reuse, which must not stand in the way."""
    rows = 100
    limit = 4 * FIXED + 3 * LOGITS + (rows // 4) * PAGE
    kept = Policy(reuse=True, snapshot_every=1_000)
    async with fake_runtime(limit_bytes=limit, policy=kept, limits=Limits(8, 8)) as rt:
        session = await rt.session()
        with pytest.raises(OutOfBudget) as refused:
            await session.append([1] * 3 * rows)
        assert refused.value.needed_bytes > limit == refused.value.free_bytes
        assert rt.counters.prefilled_tokens == 0
        done: list[int] = []

        async def one(rt: Runtime, token: int) -> None:
            async with await rt.session() as mine:
                await mine.append([token] * 60)
                assert await equals_cold(mine, [token] * 60)
                done.append(token)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, rt, 1)
            tasks.start_soon(one, rt, 2)
        assert sorted(done) == [1, 2]
        assert rt.counters.prefilled_tokens == 120, "each was prefilled once"


@pytest.mark.parametrize("failing", ["budget", "parameters", "cancelled"])
async def test_a_hit_whose_call_then_fails_holds_nothing(failing: str) -> None:
    """B120: a hundred times; after each the ledger is exact and nothing is reserved."""
    shared = [3] * 32
    async with fake_runtime(limit_bytes=2_000, policy=KEEPING) as rt:
        first = await rt.session()
        await first.append(shared)
        for _ in range(100):
            session = await rt.session()
            if failing == "budget":
                with pytest.raises(OutOfBudget):
                    await session.append(shared + [1] * 2_000)
            elif failing == "parameters":
                with pytest.raises(BadParameter):
                    await session.append([*shared, 99])
            else:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await session.append([*shared, 1])
            await session.close()
            assert rt.status().budget.reserved_bytes == 0
            rt.check()
        assert await equals_cold(first, shared)
