"""A call that passes its deadline, or can be seen to, ends with that reason, and its session goes on from there."""

from pathlib import Path

import anyio
import pytest

from serai.runtime import FinishReason, Runtime, SamplingParams
from serai.runtime.driver import Driver
from serai.runtime.errors import BadParameter, DeadlineMissed
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import GREEDY, ScriptedModel, greedy_by_hand

pytestmark = pytest.mark.anyio
LONG = SamplingParams(temperature=0, max_tokens=50)


async def passes_while_the_engine_stands(rt: Runtime, gate: Gate) -> None:
    """Wait until a step stands, and so long that the deadlines below are over."""
    await gate.reached.wait()
    await anyio.sleep(0.06)
    gate.open()


async def test_a_generation_ends_at_its_deadline_and_holds_what_was_handed_out(tmp_path: Path) -> None:
    gate = Gate(step=5)  # the append and three tokens go before it
    async with fake_runtime(ScriptedModel(before_layer=gate), store=tmp_path) as rt, await rt.session() as session:
        await session.append([3, 4, 5])
        said = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(passes_while_the_engine_stands, rt, gate)
            async with session.generate(LONG, deadline_s=0.05) as stream:
                said = [token.id async for token in stream]
        assert stream.finish_reason is FinishReason.DEADLINE
        assert len(said) < 50
        assert said == greedy_by_hand([3, 4, 5], 50)[: len(said)]
        assert session.tokens().tolist() == [3, 4, 5, *said]
        rest = (await session.generate(LONG).collect()).tokens
        assert [*said, *rest] == greedy_by_hand([3, 4, 5], 50 + len(said))
        async with await rt.resume(await session.pause()) as again:
            assert again.tokens().tolist() == [3, 4, 5, *said, *rest]


async def test_a_deadline_that_is_over_gives_no_token_and_feeds_nothing() -> None:
    async with fake_runtime() as rt, await rt.session() as session:
        await session.append([3])
        steps = rt.counters.steps
        done = await session.generate(LONG, deadline_s=0).collect()
        assert (done.tokens, done.finish_reason, rt.counters.steps) == ((), FinishReason.DEADLINE, steps)
        assert session.doing is None


@pytest.mark.parametrize("policy", [Policy(reuse=False), Policy(reuse=True, snapshot_every=8)])
async def test_an_append_that_passes_its_deadline_leaves_the_session_as_it_was(policy: Policy) -> None:
    gate = Gate(step=2)
    async with fake_runtime(ScriptedModel(before_layer=gate), policy=policy) as rt, await rt.session() as session:
        await session.append([3])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(passes_while_the_engine_stands, rt, gate)
            with pytest.raises(DeadlineMissed, match=r"was not done 0\.05 s after"):
                await session.append([4, 5], deadline_s=0.05)
        assert session.tokens().tolist() == [3]
        assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([3], 8)


async def test_an_append_that_cannot_meet_its_deadline_is_refused_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Driver, "reading_s", lambda self, tokens: 2.0 * tokens)
    async with fake_runtime(policy=Policy(reuse=True)) as rt, await rt.session() as session:
        with pytest.raises(DeadlineMissed, match=r"would take about 20\.0 s at the present speed"):
            await session.append([1] * 10, deadline_s=15)
        assert (rt.counters.steps, session.position) == (0, 0)
        await session.append([1] * 7, deadline_s=15)


async def test_the_speed_of_reading_is_that_of_whole_steps() -> None:
    async with fake_runtime(limits=Limits(step_rows=4, prefill_rows_beside_decode=2)) as rt, await rt.session() as one:
        driver = rt._services.driver
        await one.append([1, 2, 3])
        assert driver.reading_s(100) == 0.0
        await one.append([1] * 9)
        assert driver.reading_s(200) == 2 * driver.reading_s(100) > 0


@pytest.mark.parametrize("deadline_s", [-1.0, float("nan")])
async def test_a_deadline_is_a_number_of_seconds(deadline_s: float) -> None:
    async with fake_runtime() as rt, await rt.session() as session:
        with pytest.raises(BadParameter, match="number of seconds"):
            await session.append([3], deadline_s=deadline_s)
        await session.append([3])
        with pytest.raises(BadParameter, match="number of seconds"):
            session.generate(deadline_s=deadline_s)
