"""Workflows get equal shares of the engine: Jain's index over what each got while all of them wanted more."""

from collections import Counter

import anyio
import pytest

from serai.runtime import Runtime, SamplingParams, Session
from serai.runtime.scheduler import Limits
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import greedy_by_hand

pytestmark = pytest.mark.anyio

FORKS = 20
SINGLES = 3
LIMITS = Limits(step_rows=8, prefill_rows_beside_decode=4)


def jain(shares: list[float]) -> float:
    """(sum x)^2 / (n * sum x^2): 1 when all are equal, 1/n when one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


async def family_and_neighbours(rt: Runtime) -> tuple[list[Session], list[Session]]:
    parent = await rt.session()
    await parent.append([1])
    forks = await parent.fork_many(FORKS)
    singles = [await rt.session() for _ in range(SINGLES)]
    for single in singles:
        await single.append([1])
    return forks, singles


async def test_a_parent_with_twenty_forks_reads_no_faster_than_its_neighbours() -> None:
    async with fake_runtime(limits=LIMITS) as rt:
        forks, singles = await family_and_neighbours(rt)
        before = dict(rt._services.driver.served)
        async with anyio.create_task_group() as tasks:
            for fork in forks:
                tasks.start_soon(fork.append, [2] * 200)
            async with anyio.create_task_group() as first:
                for single in singles:
                    first.start_soon(single.append, [3] * 200)
            after = dict(rt._services.driver.served)
            tasks.cancel_scope.cancel()
        got = [after[one.workflow] - before.get(one.workflow, 0.0) for one in (forks[0], *singles)]
        assert jain(got) >= 0.95


async def test_a_parent_with_twenty_forks_writes_no_faster_than_its_neighbours() -> None:
    """Four rows a step for 23 that are decoding: each workflow gets one of them on average."""
    async with fake_runtime(limits=Limits(step_rows=4, prefill_rows_beside_decode=1)) as rt:
        forks, singles = await family_and_neighbours(rt)
        got: Counter[str] = Counter()
        params = SamplingParams(temperature=0, max_tokens=60)

        async def write(session: Session) -> None:
            async for _ in session.generate(params):
                got[session.workflow] += 1

        async with anyio.create_task_group() as tasks:
            for fork in forks:
                tasks.start_soon(write, fork)
            async with anyio.create_task_group() as first:
                for single in singles:
                    first.start_soon(write, single)
            tasks.cancel_scope.cancel()
        assert jain([float(got[one.workflow]) for one in (forks[0], *singles)]) >= 0.95
        for single in singles:
            assert single.tokens().tolist() == [1, *greedy_by_hand([1], 60)]
