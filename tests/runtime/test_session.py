"""What a user of sessions may rely on, over a scripted model: every timeline equals the one run alone."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from serai.runtime import FinishReason, Runtime, SamplingParams
from serai.runtime.errors import (
    BadParameter,
    LogitsInvalid,
    ModelMismatch,
    NameInvalid,
    NothingToContinue,
    OutOfBudget,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
    SessionGone,
    ShuttingDown,
)
from serai.runtime.scheduler import Limits
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.scripted import VOCAB, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio


class Gate:
    """Stops the engine between layers of its n-th step until opened; `reached` tells the event loop that it stands."""

    def __init__(self, step: int) -> None:
        self.reached = anyio.Event()
        self._loop = asyncio.get_running_loop()
        self._opened = threading.Event()
        self._steps_left = step

    def open(self) -> None:
        self._opened.set()

    def __call__(self, batch: object, layer: int) -> None:
        self._steps_left -= layer == 0
        if self._steps_left == 0 and layer == 0:
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._opened.wait(timeout=10), "the test opens the gate"


GREEDY = SamplingParams(temperature=0, max_tokens=8)
SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.1, presence_penalty=0.3, max_tokens=20)


def greedy_by_hand(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(logits_of(hash_of(ids)))))
    return ids[len(prompt) :]


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
    """DESIGN §6g: penalties and random numbers follow the token ids, not the calls."""
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
    """DESIGN §6g: a fork goes on with the counts that penalties are reckoned from."""
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


async def test_a_seed_that_was_drawn_is_durable_before_the_first_token_is_shown(tmp_path: Path) -> None:
    """DESIGN §6g: whoever crashes after one token draws the same ones again, on the same branch."""
    unseeded = SamplingParams(temperature=0.8, max_tokens=12)
    async with fake_runtime(store=tmp_path / "store") as runtime:
        root = await runtime.session()
        await root.append([3, 1, 4])
        fork = await root.fork()
        generation = fork.generate(unseeded)
        shown = [(await anext(generation)).id]
        # What a crash would leave now.
        await anyio.to_thread.run_sync(shutil.copytree, tmp_path / "store", tmp_path / "left")
        shown += [token.id async for token in generation]
        seed, branch, fork_id = fork.timeline.turn.seed, fork.timeline.branch, fork.id
    assert seed is not None
    async with fake_runtime(store=tmp_path / "left") as runtime:
        again = await runtime.resume(fork_id)
        assert (again.timeline.turn.seed, again.timeline.branch) == (seed, branch)
        params = SamplingParams.from_record({**unseeded.to_record(), "seed": seed})
        assert list((await again.generate(params).collect()).tokens) == shown


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


async def test_a_second_call_meanwhile_is_refused_not_interleaved(rt: Runtime) -> None:
    session = await rt.session()
    await session.append([1])
    stream = session.generate(GREEDY)
    await anext(stream)
    with pytest.raises(SessionBusy, match="busy with generate"):
        await session.append([2])
    child = await session.fork()  # forking is allowed at the token boundary
    assert child.position == 2
    await stream.aclose()
    await session.append([2])


async def test_nothing_to_continue_at_position_zero(rt: Runtime) -> None:
    session = await rt.session()
    with pytest.raises(NothingToContinue, match="empty"):
        session.generate()


async def test_wrong_ids_are_refused_before_any_work(rt: Runtime) -> None:
    session = await rt.session()
    with pytest.raises(BadParameter, match=f"token id {VOCAB} is outside"):
        await session.append([0, VOCAB])
    with pytest.raises(BadParameter, match="integer token ids"):
        await session.append(np.array([0.5]))
    with pytest.raises(BadParameter, match="no tokenizer"):
        await session.append("text")
    assert session.position == 0
    assert rt.counters.steps == 0


async def test_a_prompt_over_the_context_is_refused_with_the_numbers() -> None:
    async with fake_runtime(max_positions=10) as rt:
        session = await rt.session()
        await session.append([1] * 6)
        with pytest.raises(PromptTooLong, match=r"5 tokens after position 6 .* 10 tokens; 4 still fit"):
            await session.append([1] * 5)
        done = await session.generate(SamplingParams(temperature=0, max_tokens=50)).collect()
        assert len(done.tokens) == 4
        assert done.finish_reason is FinishReason.LENGTH


async def test_nan_logits_end_one_session_and_no_other() -> None:
    """B10: A's third token would come from NaN logits, so A ends at its second; B equals its solo run."""
    a_ids = greedy_by_hand([1, 2], 3)
    bad = hash_of([1, 2, *a_ids])
    async with fake_runtime(ScriptedModel(spoil=lambda value: value == bad)) as rt:
        a, b = await rt.session(), await rt.session()
        await a.append([1, 2])
        await b.append([3, 4])
        given: list[int] = []
        results: list[tuple[int, ...]] = []

        async def run_a() -> None:
            stream = a.generate(GREEDY)
            given.extend([(await anext(stream)).id, (await anext(stream)).id])
            with pytest.raises(LogitsInvalid, match="position 5"):
                await anext(stream)

        async def run_b() -> None:
            results.append((await b.generate(GREEDY).collect()).tokens)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_a)
            tasks.start_soon(run_b)
        assert given == a_ids[:2]
        assert a.tokens().tolist() == [1, 2, *a_ids[:2]]
        fork = await a.fork()
        assert fork.position == 4
        assert list(results[0]) == greedy_by_hand([3, 4], 8)


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


async def test_a_budget_that_is_full_refuses_the_step_and_keeps_the_session() -> None:
    async with fake_runtime(limit_bytes=600) as rt:
        session = await rt.session()
        await session.append([1, 2])
        with pytest.raises(OutOfBudget, match="bytes"):
            await session.append([1] * 200)
        assert session.tokens().tolist() == [1, 2]


async def test_after_close_every_call_says_so(rt: Runtime) -> None:
    session = await rt.session()
    await session.append([1])
    await session.close()
    await session.close()
    with pytest.raises(SessionClosed, match="was closed"):
        await session.append([1])
    with pytest.raises(SessionClosed):
        session.generate()
    with pytest.raises(SessionClosed):
        await session.fork()


async def test_a_closing_runtime_takes_no_new_work() -> None:
    async with fake_runtime() as rt:
        session = await rt.session()
        await session.append([1])
    with pytest.raises(SessionClosed):
        await session.append([1])
    with pytest.raises(ShuttingDown):
        await rt.session()


async def test_pause_and_resume_at_every_boundary_of_a_sampled_run(tmp_path: Path) -> None:
    """B42, B43: resuming feeds nothing, draws the same token, and penalties and random numbers go on."""
    async with fake_runtime(store=tmp_path / "a") as rt:
        session = await rt.session()
        await session.append([2, 7, 1])
        expected = (await session.generate(SAMPLED).collect()).tokens
    for cut in range(len(expected)):
        store = tmp_path / f"cut{cut}"
        async with fake_runtime(store=store) as rt:
            session = await rt.session()
            await session.append([2, 7, 1])
            if cut:
                first = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": cut})
                assert (await session.generate(first).collect()).tokens == expected[:cut]
            point = await session.pause()
            with pytest.raises(SessionClosed, match="was paused"):
                session.generate()
        async with fake_runtime(store=store) as rt:
            session = await rt.resume(str(point))
            assert session.position == 3 + cut
            rest = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": len(expected) - cut})
            assert (await session.generate(rest).collect()).tokens == expected[cut:]
            assert rt.counters.prefilled_tokens == 0


async def test_what_was_said_survives_a_crash_and_is_replayed(tmp_path: Path) -> None:
    """DESIGN §8: ids are durable when an append or a generation returns; a missing snapshot is replayed."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        name = session.id
        await session.append([1, 2, 3])
        done = await session.generate(GREEDY).collect()
        expected = [1, 2, 3, *done.tokens]
    async with fake_runtime(store=tmp_path) as rt:
        again = await rt.resume(name)
        assert again.id == name
        assert again.tokens().tolist() == expected
        assert rt.counters.prefilled_tokens == len(expected)
        np.testing.assert_array_equal(await again.logits(), logits_of(hash_of(expected)))


async def test_another_build_replays_unless_told_otherwise(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
    async with fake_runtime(store=tmp_path, fingerprint=replace(FINGERPRINT, build="newer")) as rt:
        replayed = await rt.resume(point)
        assert rt.counters.prefilled_tokens == 3
        assert not replayed.inexact
        as_is = await rt.resume(point, as_is=True)
        assert rt.counters.prefilled_tokens == 3
        assert as_is.inexact
        assert (await as_is.fork()).inexact
    async with fake_runtime(store=tmp_path, fingerprint=replace(FINGERPRINT, weights="others")) as rt:
        with pytest.raises(ModelMismatch, match="weights"):
            await rt.resume(point)


async def test_resuming_twice_branches_off(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
        first = await rt.resume(point)
        second = await rt.resume(point)
        assert first.id == session.id
        assert second.id != first.id
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=6)
        same = (await first.generate(params).collect()).tokens
        assert (await second.generate(params).collect()).tokens == same, "continuing a node keeps its random branch"


async def test_resuming_what_was_never_stored_says_so(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        with pytest.raises(SessionGone):
            await rt.resume("nothing")
    async with fake_runtime() as rt:
        with pytest.raises(BadParameter, match="store"):
            await rt.resume("nothing")
        session = await rt.session()
        await session.append([1])
        with pytest.raises(BadParameter, match="store"):
            await session.pause()
        assert session.is_open


async def test_what_a_block_raises_comes_out_as_it_is(tmp_path: Path) -> None:

    async def block() -> None:
        async with fake_runtime(store=tmp_path) as rt:
            session = await rt.session()
            async with session.waiting_for_tool(expected_s=1):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await block()
    with anyio.CancelScope() as scope:
        async with fake_runtime() as rt:
            await rt.session()
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_label_that_cannot_be_is_refused_before_anything_is_made(rt: Runtime) -> None:
    session = await rt.session(label="good")
    await session.append([1])
    with pytest.raises(NameInvalid, match="label"):
        await session.fork(label="a\nb")
    with pytest.raises(NameInvalid, match="label"):
        await rt.session(label="a\nb")
    with pytest.raises(NameInvalid, match="label"):
        session.rename("a\nb")
    assert [one.label for one in rt.status().sessions] == ["good"]
    session.rename("better")
    assert rt.status().sessions[0].label == "better"
