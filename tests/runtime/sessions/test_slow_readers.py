"""Who reads tokens slowly pauses their own session: not the step, and nobody else; and nothing piles up for them."""

import random
from pathlib import Path

import anyio
import pytest

from serai.runtime import SamplingParams
from serai.runtime.errors import SessionBusy
from serai.runtime.memory import admission
from serai.runtime.memory.residency import Tier
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions import live
from serai.runtime.sessions.generation import Generation
from serai.runtime.sessions.prefixes import digest_of
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import FIXED, LOGITS, PAGE, ScriptedModel, greedy_by_hand

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


async def test_a_reader_that_rests_keeps_no_memory_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session may be moved out, and is back when the next token is asked for."""
    monkeypatch.setattr(live, "SLOW_READER_S", 0.05)
    monkeypatch.setattr(admission, "LOOK_AGAIN_S", 0.01)
    limit = 3 * (FIXED + LOGITS) + 20 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=PLAIN) as rt:
        slow, other = await rt.session(), await rt.session()
        await slow.append([1] * 40)
        reading = slow.generate(LONG)
        taken = await take(reading, 3)
        with anyio.fail_after(20):
            await other.append([2] * 60)
        assert (slow.tier, slow.doing) == (Tier.COLD, "generate")
        with pytest.raises(SessionBusy):
            await slow.append([1])
        await other.close()
        taken += await take(reading, 7)
        assert taken == greedy_by_hand([1] * 40, 10)
        assert slow.position == 40 + 10
        await reading.aclose()
        assert await slow.demote()


COUNTS = [*range(3, 16), *range(3, 16), 3, 4]
"""A prompt that a counting model goes on with as it began, so that guesses are right."""


async def within_a_batch(reading: Generation) -> list[int]:
    """Take tokens until more were read back than were handed out."""
    taken: list[int] = []
    while reading.ahead is None:
        taken += await take(reading, 1)
    return taken


async def test_a_reader_that_rests_within_guessed_tokens_keeps_no_memory_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state is behind, and another one ahead of what it was given: both go, and its tokens are the same."""
    monkeypatch.setattr(live, "SLOW_READER_S", 0.05)
    monkeypatch.setattr(admission, "LOOK_AGAIN_S", 0.01)
    limit = 3 * (FIXED + LOGITS) + 24 * PAGE
    model = ScriptedModel(counting=True)
    async with fake_runtime(model, store=tmp_path, limit_bytes=limit, policy=Policy(reuse=False)) as rt:
        slow, other = await rt.session(), await rt.session()
        await slow.append(COUNTS)
        reading = slow.generate(SamplingParams(temperature=0, max_tokens=60))
        taken = await within_a_batch(reading)
        with anyio.fail_after(20):
            await other.append([2] * 70)
        assert (slow.tier, slow.doing) == (Tier.COLD, "generate")
        assert reading.ahead is None
        await other.close()
        taken += await take(reading, 60 - len(taken))
        assert taken == [3 + (2 + index) % 13 for index in range(60)]
        await reading.aclose()
        assert slow.tokens().tolist() == COUNTS + taken
        rt.check()


async def test_whenever_a_reader_is_moved_out_its_tokens_are_the_same(tmp_path: Path) -> None:
    """Between two tokens, within guessed ones, twice at one place, and with a fork that goes on from there."""
    chance = random.Random(1)
    within = 0
    async with fake_runtime(ScriptedModel(counting=True), store=tmp_path, policy=Policy(reuse=False)) as rt:
        for _ in range(8):
            session = await rt.session()
            await session.append(COUNTS[: chance.randint(17, len(COUNTS))])
            first = session.tokens().tolist()[-1]
            expected = [3 + (first - 2 + index) % 13 for index in range(60)]
            reading = session.generate(SamplingParams(temperature=0, max_tokens=40))
            taken: list[int] = []
            while len(taken) < 40:
                taken += await take(reading, min(chance.randint(1, 9), 40 - len(taken)))
                if reading.finish_reason is None:
                    within += reading.ahead is not None
                    assert await session.demote()
                    assert not await session.demote()
            assert taken == expected[:40]
            fork = await session.fork()
            more = (await fork.generate(SamplingParams(temperature=0, max_tokens=20)).collect()).tokens
            assert [*taken, *more] == expected
            await session.close()
            await fork.close()
        rt.check()
    assert within > 5


async def test_a_session_that_was_left_within_guessed_tokens_can_be_moved_out(tmp_path: Path) -> None:
    async with fake_runtime(ScriptedModel(counting=True), store=tmp_path, policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append(COUNTS)
        reading = session.generate(SamplingParams(temperature=0, max_tokens=60))
        taken = await within_a_batch(reading)
        await reading.aclose()
        assert await session.demote()
        assert session.tier is Tier.COLD
        assert session.tokens().tolist() == COUNTS + taken
        more = (await session.generate(SamplingParams(temperature=0, max_tokens=20)).collect()).tokens
        assert [*taken, *more] == [3 + (2 + index) % 13 for index in range(len(taken) + 20)]


@pytest.mark.parametrize("written", ["flush", "fork"])
async def test_what_is_written_within_guessed_tokens_keeps_nobody_in_memory(tmp_path: Path, written: str) -> None:
    """One node for all that was generated left none where the state was."""
    async with fake_runtime(ScriptedModel(counting=True), store=tmp_path, policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append(COUNTS)
        reading = session.generate(SamplingParams(temperature=0, max_tokens=60))
        taken = await within_a_batch(reading)
        other = None
        if written == "flush":
            await session.flush()
        else:
            other = await session.fork()
            assert await other.demote()
        assert await session.demote()
        taken += await take(reading, 60 - len(taken))
        expected = [3 + (2 + index) % 13 for index in range(80)]
        assert taken == expected[:60]
        if other is not None:
            before = other.tokens().tolist()[len(COUNTS) :]
            more = (await other.generate(SamplingParams(temperature=0, max_tokens=20)).collect()).tokens
            assert [*before, *more] == expected[: len(before) + 20]
        rt.check()


async def test_where_a_state_stayed_is_no_place_of_what_is_said_there_after_going_back(tmp_path: Path) -> None:
    """A node kept the digest of the ids that had been there before, and its state could be taken for theirs."""
    async with fake_runtime(ScriptedModel(counting=True), store=tmp_path, policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append(COUNTS)
        reading = session.generate(SamplingParams(temperature=0, max_tokens=60))
        taken = await within_a_batch(reading)
        await reading.aclose()
        await session.rewind(position=len(COUNTS) - 3)
        await session.append([9])
        await session.generate(SamplingParams(temperature=0, max_tokens=len(taken) + 9), guess=False).collect()
        await session.flush()
        ids = session.tokens()
        nodes = session.record.nodes()
        assert nodes[-1].position == len(ids)
        for node in nodes:
            assert (node.sampler or {})["prefix"] == digest_of(ids[: node.position]).hex()


async def test_a_reader_that_reads_is_not_moved_out_between_two_tokens(tmp_path: Path) -> None:
    limit = 3 * (FIXED + LOGITS) + 20 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=PLAIN) as rt:
        reader, other = await rt.session(), await rt.session()
        await reader.append([1] * 40)
        reading = reader.generate(LONG)
        taken = await take(reading, 1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.append, [2] * 60)
            await anyio.wait_all_tasks_blocked()
            taken += await take(reading, 20)
            assert (other.position, rt.status().work.demotions) == (0, 0)
            await reading.aclose()
        assert taken == greedy_by_hand([1] * 40, 21)
        assert (other.position, reader.tier) == (60, Tier.COLD)
