"""Priorities share the engine out; nobody waits for ever, whatever the others' are."""

from collections import Counter

import anyio
import pytest

from serai.runtime import SamplingParams, Session
from serai.runtime.errors import BadParameter
from serai.runtime.scheduler import Limits
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import greedy_by_hand

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("by_call", [False, True])
async def test_two_priorities_up_is_four_times_the_tokens(by_call: bool) -> None:
    async with fake_runtime(limits=Limits(step_rows=1, prefill_rows_beside_decode=1)) as rt:
        priorities = (0, 2)
        sessions = [await rt.session(priority=0 if by_call else priority) for priority in priorities]
        for session in sessions:
            await session.append([1])
        got: Counter[int] = Counter()

        async def write(session: Session, priority: int, scope: anyio.CancelScope) -> None:
            async for _ in session.generate(
                SamplingParams(temperature=0, max_tokens=400), priority=priority if by_call else None
            ):
                got[priority] += 1
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            for session, priority in zip(sessions, priorities, strict=True):
                tasks.start_soon(write, session, priority, tasks.cancel_scope)
        assert 3.5 <= got[2] / got[0] <= 4.5
        for session in sessions:
            ids = session.tokens().tolist()
            assert ids == [1, *greedy_by_hand([1], len(ids) - 1)], "priority changes when, never what"


async def test_a_fork_has_its_parents_priority_and_nonsense_is_refused_before_any_work() -> None:
    async with fake_runtime() as rt:
        parent = await rt.session(priority=3)
        await parent.append([1])
        assert (await parent.fork()).priority == 3
        for wrong in (5, -5):
            with pytest.raises(BadParameter, match=f"priority is {wrong}, but must be from -4 to 4"):
                await rt.session(priority=wrong)
            with pytest.raises(BadParameter, match="priority is"):
                await parent.append([2], priority=wrong)
            with pytest.raises(BadParameter, match="priority is"):
                parent.generate(priority=wrong)
        assert parent.position == 1
