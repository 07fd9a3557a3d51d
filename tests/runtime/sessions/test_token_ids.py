"""What a session's token ids take in memory: counted in the budget, and held once."""

from pathlib import Path

import pytest

from serai.runtime.errors import OutOfBudget
from serai.runtime.monitor.detail import look
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY

pytestmark = pytest.mark.anyio


async def test_token_ids_count_in_the_budget_while_their_session_is_open(tmp_path: Path) -> None:
    """Hot or cold; a fork has its own."""
    async with fake_runtime(store=tmp_path, limit_bytes=1 << 20, max_positions=1 << 20) as rt:
        session = await rt.session()
        await session.append([1] * 4_096)
        assert rt.pool.beside_bytes == 4 * 4_096
        assert rt.status().budget.ids_bytes == 4 * 4_096
        assert await session.demote()
        budget = rt.status().budget
        assert (budget.live_bytes, budget.used_bytes - budget.spare_bytes) == (0, 4 * 4_096)
        fork = await session.fork()
        assert rt.pool.beside_bytes == 8 * 4_096
        await session.rewind(position=1_024)
        assert rt.pool.beside_bytes == 5 * 4_096
        with pytest.raises(OutOfBudget, match="this call needs"):
            await session.append([1] * (1 << 17))
        await fork.close()
        assert rt.pool.beside_bytes == 4_096


async def test_nodes_that_are_written_keep_no_ids_of_their_own(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        await session.generate(GREEDY).collect()
        point = await session.pause()
        again = await rt.resume(point)
        for one in (session, again):
            assert [len(node.tokens) for node in one.record.nodes()] == [0] * len(one.record.nodes())
        detail = await look(rt, again, store=rt.store)
        assert [node.tokens for node in detail.nodes if node.tokens] == [3, 8]
        child = await again.fork(position=2)
        assert (await rt.resume(await child.pause())).tokens().tolist() == [1, 2]
