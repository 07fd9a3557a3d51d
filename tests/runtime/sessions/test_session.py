"""What a user of sessions may rely on, over a scripted model: every timeline equals the one run alone."""

import threading
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import numpy as np
import pytest

from serai.runtime import FinishReason, Runtime, SamplingParams
from serai.runtime.scheduler import Limits
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import GREEDY, SAMPLED, ScriptedModel, greedy_by_hand, hash_of, logits_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rt() -> AsyncIterator[Runtime]:
    async with fake_runtime(limits=Limits(step_rows=8, prefill_rows_beside_decode=3)) as runtime:
        yield runtime


async def test_greedy_tokens_are_those_of_the_definition(rt: Runtime) -> None:
    session = await rt.session()
    used = await session.append([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
    assert (used.tokens, used.prefilled, used.reused, used.position) == (11, 11, 0, 11)
    done = await session.generate(GREEDY).collect()
    assert list(done.tokens) == greedy_by_hand(list(range(1, 12)), 8)
    assert done.finish_reason is FinishReason.LENGTH
    assert session.tokens().tolist() == [*range(1, 12), *done.tokens]
    np.testing.assert_array_equal(await session.logits(), logits_of(hash_of(session.tokens().tolist())))


async def test_two_generates_of_ten_are_one_of_twenty(rt: Runtime) -> None:
    """Contract, g: penalties and random numbers follow the token ids, not the calls."""
    whole = await rt.session()
    await whole.append([3, 1, 4])
    expected = (await whole.generate(SAMPLED).collect()).tokens
    split = await rt.session()
    await split.append([3, 1, 4])
    ten = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.1, presence_penalty=0.3, max_tokens=10)
    first = (await split.generate(ten).collect()).tokens
    second = (await split.generate(ten).collect()).tokens
    assert first + second == expected


async def test_ten_tokens_and_ten_of_a_fork_are_twenty(rt: Runtime) -> None:
    """Contract, g: a fork goes on with the counts that penalties are reckoned from."""
    greedy = SamplingParams(temperature=0, frequency_penalty=0.7, presence_penalty=0.3, max_tokens=20)
    whole = await rt.session()
    await whole.append([3, 1, 4])
    expected = (await whole.generate(greedy).collect()).tokens
    ten = SamplingParams.from_record({**greedy.to_record(), "max_tokens": 10})
    split = await rt.session()
    await split.append([3, 1, 4])
    first = (await split.generate(ten).collect()).tokens
    child = await split.fork()
    assert first + (await child.generate(ten).collect()).tokens == expected


async def test_sessions_stepped_together_equal_their_solo_runs(rt: Runtime) -> None:
    """B14: lengths 3, 17 and 50 interleaved, with joins and leaves."""
    prompts = {1: [1] * 3, 2: [2] * 17, 3: [3] * 50, 4: [4] * 5}
    results: dict[int, tuple[int, ...]] = {}

    async def one(key: int) -> None:
        async with await rt.session() as session:
            await session.append(prompts[key])
            results[key] = (await session.generate(SamplingParams(temperature=0, max_tokens=50)).collect()).tokens

    async with anyio.create_task_group() as tasks:
        for key in prompts:
            tasks.start_soon(one, key)
    for key, prompt in prompts.items():
        assert list(results[key]) == greedy_by_hand(prompt, 50)


async def test_forks_diverge_without_touching_each_other(rt: Runtime) -> None:
    parent = await rt.session()
    await parent.append([1, 2, 3, 4, 5])
    left, right = await parent.fork_many(2)
    await left.append([6])
    await right.append([7, 8])
    await parent.append([9])
    for session, tail in ((left, [6]), (right, [7, 8]), (parent, [9])):
        expected = greedy_by_hand([1, 2, 3, 4, 5, *tail], 8)
        assert list((await session.generate(GREEDY).collect()).tokens) == expected


async def test_forks_draw_from_branches_of_their_own(rt: Runtime) -> None:
    parent = await rt.session()
    await parent.append([1, 2, 3])
    params = SamplingParams(temperature=2.0, seed=11, max_tokens=12)
    drawn = [(await child.generate(params).collect()).tokens for child in await parent.fork_many(3)]
    assert len(set(drawn)) == 3
    again = await rt.session()
    await again.append([1, 2, 3])
    assert [(await child.generate(params).collect()).tokens for child in await again.fork_many(3)] == drawn


async def test_leaving_the_iteration_keeps_exactly_what_was_handed_out(rt: Runtime) -> None:
    session = await rt.session()
    await session.append([5, 6])
    seen = []
    async for token in session.generate(GREEDY):
        seen.append(token.id)
        if len(seen) == 3:
            break
    assert session.tokens().tolist() == [5, 6, *seen]
    await session.append([1])  # not busy any more
    assert session.tokens().tolist() == [5, 6, *seen, 1]


async def test_cancelled_inside_its_block_a_session_closes_and_the_cancellation_comes_through(rt: Runtime) -> None:
    reached = False
    with anyio.move_on_after(0):
        async with await rt.session() as session:
            with anyio.CancelScope(shield=True):
                await session.append([5, 6])
            async for _ in session.generate(SamplingParams(temperature=0, max_tokens=1_000)):
                reached = True
                await anyio.lowlevel.checkpoint()
    assert not session.is_open or not reached
    rt.check()


async def test_a_reader_that_vanishes_outside_the_event_loop_frees_its_session(rt: Runtime) -> None:
    session = await rt.session()
    await session.append([5, 6])
    stream = session.generate(GREEDY)
    await anext(stream)
    ended = threading.Thread(target=stream.__del__)  # as when Python collects it on another thread
    ended.start()
    ended.join()
    await session.append([1])
    assert session.position == 4


async def test_a_cancelled_append_leaves_the_session_as_it_was() -> None:
    gate = Gate(step=3)
    async with fake_runtime(ScriptedModel(before_layer=gate), limits=Limits(4, 4)) as rt:
        session = await rt.session()
        await session.append([1, 2])
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.append, list(range(10)) * 4)
                await gate.reached.wait()
                scope.cancel()
        gate.open()
        assert session.tokens().tolist() == [1, 2]
        assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([1, 2], 8)
        assert rt.counters.aborted_steps == 1, "nobody else was in the step, so it was dropped between layers"


async def test_a_cancelled_call_does_not_hold_up_the_others_in_its_step() -> None:
    gate = Gate(step=3)
    async with fake_runtime(ScriptedModel(before_layer=gate)) as rt:
        a, b = await rt.session(), await rt.session()
        await a.append([1])
        await b.append([2])
        got: list[tuple[int, ...]] = []

        async def keep() -> None:
            got.append((await b.generate(GREEDY).collect()).tokens)

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(keep)
                async with anyio.create_task_group() as inner:
                    inner.start_soon(a.generate(GREEDY).collect)
                    await gate.reached.wait()
                    scope.cancel()
            gate.open()
        assert list(got[0]) == greedy_by_hand([2], 8)
        kept = a.tokens().tolist()[1:]
        rest = SamplingParams(temperature=0, max_tokens=8 - len(kept))
        assert kept + list((await a.generate(rest).collect()).tokens) == greedy_by_hand([1], 8)


async def test_a_parent_that_closes_takes_nothing_from_its_working_forks() -> None:
    gate = Gate(step=2)
    async with fake_runtime(ScriptedModel(before_layer=gate), limits=Limits(4, 4)) as rt:
        parent = await rt.session()
        await parent.append([1, 2])
        child = await parent.fork()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child.append, [3] * 12)
            await gate.reached.wait()
            await parent.close()
            gate.open()
        assert child.tokens().tolist() == [1, 2] + [3] * 12


async def test_stop_tokens_are_read_back_and_end_the_turn() -> None:
    ids = greedy_by_hand([1], 8)
    stop = ids[3]
    until = ids.index(stop) + 1
    async with fake_runtime(stop_ids=frozenset({stop})) as rt:
        session = await rt.session()
        await session.append([1])
        done = await session.generate(GREEDY).collect()
        assert list(done.tokens) == ids[:until]
        assert done.finish_reason is FinishReason.STOP
        assert session.tokens().tolist() == [1, *ids[:until]]
        other = await rt.session()
        await other.append([1])
        ignoring = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert list((await other.generate(ignoring).collect()).tokens) == ids
