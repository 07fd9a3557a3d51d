"""What a session refuses or fails at, in one clear sentence, and what it is afterwards: what it was before."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest

from serai.runtime import FinishReason, Runtime, SamplingParams
from serai.runtime.errors import (
    BadParameter,
    LogitsInvalid,
    NameInvalid,
    NothingToContinue,
    OutOfBudget,
    PromptTooLong,
    SessionBusy,
    SessionClosed,
    ShuttingDown,
)
from serai.runtime.scheduler import Limits
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY, VOCAB, ScriptedModel, greedy_by_hand, hash_of

pytestmark = pytest.mark.anyio


@pytest.fixture
async def rt() -> AsyncIterator[Runtime]:
    async with fake_runtime(limits=Limits(step_rows=8, prefill_rows_beside_decode=3)) as runtime:
        yield runtime


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
