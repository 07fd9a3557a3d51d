"""Who reads tokens slowly pauses their own session: not the step, and nobody else; and nothing piles up for them."""

import anyio
import pytest

from serai.runtime import SamplingParams
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.generation import Generation
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import ScriptedModel, greedy_by_hand

pytestmark = pytest.mark.anyio

PLAIN = Policy(reuse=False, guess=False)
"""One token a step, so that steps can be counted."""

LONG = SamplingParams(temperature=0, max_tokens=1_000)


async def take(reading: Generation, count: int) -> list[int]:
    return [(await anext(reading)).id for _ in range(count)]


async def test_a_reader_that_stops_reading_holds_up_its_own_session_only() -> None:
    model = ScriptedModel()
    async with fake_runtime(model, limits=Limits(8, 3), policy=PLAIN) as rt:
        slow, fast = await rt.session(), await rt.session()
        await slow.append([1, 2, 3])
        await fast.append([4, 5])
        reading = slow.generate(LONG)
        taken = await take(reading, 3)
        before = len(model.steps)
        with anyio.fail_after(20):
            said = await fast.generate(SamplingParams(temperature=0, max_tokens=200)).collect()
        assert list(said.tokens) == greedy_by_hand([4, 5], 200)
        assert slow.position == 3 + 3, "nothing was read ahead for the one that waits"
        assert set(model.steps[before:]) <= {0, 1}, "the steps since were the other's alone"
        assert rt.status().budget.reserved_bytes == 0
        taken += await take(reading, 7)
        assert taken == greedy_by_hand([1, 2, 3], 10)


async def test_many_slow_readers_delay_no_step() -> None:
    model = ScriptedModel()
    async with fake_runtime(model, policy=PLAIN) as rt:
        readings = []
        for number in range(100):
            session = await rt.session()
            await session.append([number % 16])
            reading = session.generate(LONG)
            await take(reading, 1)
            readings.append(reading)
        fast = await rt.session()
        await fast.append([4, 5])
        before = len(model.steps)
        with anyio.fail_after(20):
            await fast.generate(SamplingParams(temperature=0, max_tokens=50)).collect()
        assert len(model.steps) - before <= 52
        assert sum(model.steps[before:]) <= 52
        for reading in readings:
            await reading.aclose()


async def test_what_was_guessed_right_waits_for_a_slow_reader_within_one_step() -> None:
    """Several tokens may come of a step; the next step is not taken before they were read."""
    limits = Limits(8, 3)
    async with fake_runtime(ScriptedModel(counting=True), limits=limits, policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append([*range(3, 16), *range(3, 16), 3, 4])
        reading = session.generate(SamplingParams(temperature=0, max_tokens=60))
        taken: list[int] = []
        most_ahead = 0
        while len(taken) < 60:
            taken += await take(reading, 1)
            most_ahead = max(most_ahead, rt.counters.decoded_tokens - len(taken))
            await anyio.wait_all_tasks_blocked()
        assert taken == [3 + (2 + index) % 13 for index in range(60)]
        assert 1 <= most_ahead < limits.step_rows
