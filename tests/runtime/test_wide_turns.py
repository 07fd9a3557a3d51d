"""A wide step takes turns with the answers beside it, and ends with those who wait for it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.runtime import Session
from serai.runtime.driver import Driver
from serai.runtime.engine import Engine
from serai.runtime.errors import EngineFailed, SeraiError, ShuttingDown
from serai.runtime.experts.access import Wait
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.scheduler import Limits
from serai.runtime.state import StatePool
from serai.runtime.step import AbortFlag, Segment, Slice, StepPlan
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import GREEDY, LAYOUT, ScriptedModel, greedy_by_hand, hash_of, logits_of

pytestmark = pytest.mark.anyio


async def test_answers_go_on_beside_a_wide_step() -> None:
    """A prompt of many layers and pauses; between them the other session says everything it has to say."""
    rows: list[int] = []

    def slow_when_wide(batch: Batch, layer: int) -> None:
        rows.append(batch.rows)
        if batch.rows == 50:
            time.sleep(0.002)  # longer than a step of one token, as it would be

    model = ScriptedModel(layers=60, before_layer=slow_when_wide)
    async with fake_runtime(model, limits=Limits(8, 4, wide_rows=64)) as rt:
        talker, reader = await rt.session(), await rt.session()
        await talker.append([1, 2, 3])
        stream = talker.generate(GREEDY)
        first = await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.append, list(range(1, 11)) * 5)
            said = [first.id, *[one.id async for one in stream]]
        assert said == greedy_by_hand([1, 2, 3], 8)
        wide = [place for place, count in enumerate(rows) if count == 50]
        between = [count for count in rows[wide[0] : wide[-1]] if count == 1]
        assert len(wide) == 60
        assert len(between) >= 60, "at least one answer's step was run in the wide step's pauses"
        assert reader.position == 50


LONG = list(range(1, 11)) * 5


async def test_a_reader_that_leaves_ends_its_wide_step() -> None:
    gate = Gate(1)
    model = ScriptedModel(layers=1_000_000, before_layer=gate)
    async with fake_runtime(model, limits=Limits(8, 4, wide_rows=64)) as rt:
        reader = await rt.session()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.append, LONG)
            await gate.reached.wait()
            tasks.cancel_scope.cancel()
            gate.open()
        assert reader.position == 0
        model.layers = 2
        with anyio.fail_after(5):
            await reader.append(LONG)
        assert model.steps == [50, 50]


async def test_a_reader_that_leaves_takes_no_other_out_of_the_wide_step() -> None:
    gate = Gate(1)
    model = ScriptedModel(before_layer=gate)
    async with fake_runtime(model, limits=Limits(8, 4, wide_rows=128)) as rt:
        leaving, staying = await rt.session(), await rt.session()
        async with anyio.create_task_group() as tasks, anyio.create_task_group() as left:
            left.start_soon(leaving.append, LONG)
            tasks.start_soon(staying.append, LONG[::-1])
            await gate.reached.wait()
            left.cancel_scope.cancel()
            gate.open()
        assert model.steps == [100]
        assert (leaving.position, staying.position) == (0, 50)
        assert (await staying.logits()).tobytes() == logits_of(hash_of(LONG[::-1])).tobytes()


async def test_a_runtime_that_closes_ends_a_wide_step() -> None:
    gate = Gate(1)
    model = ScriptedModel(layers=1_000_000, before_layer=gate)
    failed: list[SeraiError] = []

    async def read(session: Session) -> None:
        try:
            await session.append(LONG)
        except SeraiError as error:
            failed.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks, fake_runtime(model, limits=Limits(8, 4, wide_rows=64)) as rt:
            tasks.start_soon(read, await rt.session())
            await gate.reached.wait()
            gate.open()
    assert failed


async def test_an_answers_step_that_breaks_the_engine_blames_no_reader(tmp_path: Path) -> None:
    """The reader's wide step is not gone on with, whose own failure would have its stored state set aside."""
    wide_began = broken = False

    def break_down(batch: Batch, layer: int) -> None:
        nonlocal wide_began, broken
        if broken:
            raise RuntimeError("and so did the prompt's")
        if batch.rows == 50:
            wide_began = True
            time.sleep(0.002)
        elif wide_began:
            broken = True
            raise RuntimeError("the answer's step broke")

    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([7, 8])
        point = await session.pause()
    failed: list[SeraiError] = []
    model = ScriptedModel(layers=60, before_layer=break_down)
    async with fake_runtime(model, store=tmp_path, limits=Limits(8, 4, wide_rows=64)) as rt:
        talker, reader = await rt.session(), await rt.resume(point)
        await talker.append([1, 2, 3])
        stream = talker.generate(GREEDY)
        await anext(stream)

        async def until_it_fails(call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(EngineFailed) as caught:
                await call()
            failed.append(caught.value)

        async def talk() -> None:
            async for _ in stream:
                pass

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(until_it_fails, lambda: reader.append(LONG))
                tasks.start_soon(until_it_fails, talk)
        assert rt.store is not None
        assert rt.store.has_snapshot(point.id)
    assert len(failed) == 2
    assert all("the answer's step broke" in str(error) for error in failed)


async def test_a_driver_cancelled_in_a_step_gives_back_what_the_step_wrote() -> None:
    gate = Gate(1)
    async with fake_runtime(ScriptedModel(before_layer=gate)) as rt:
        services = rt._services
        driver = Driver(services.driver.engine, services.driver._thread, services.pool, services.admission, Limits())
        state = services.pool.empty()

        async def ask() -> None:
            with pytest.raises(ShuttingDown):
                await driver.advance("workflow", state, np.array([1, 2], np.int32), prefill=True)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                running = asyncio.ensure_future(driver.run())
                await gate.reached.wait()
                running.cancel()  # as asyncio does it, which no shield keeps out
                gate.open()
                with pytest.raises(asyncio.CancelledError):
                    await running
        state.release()
        assert services.pool.live_bytes == 0


async def test_the_speed_of_reading_is_that_of_whole_wide_steps_without_their_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock on which a layer of a wide step takes a second, and an answer's step ten."""

    class Clock:
        now_s = 0.0

        @classmethod
        def monotonic(cls) -> float:
            return cls.now_s

    rows: list[int] = []

    def takes_its_time(batch: Batch, layer: int) -> None:
        rows.append(batch.rows)
        Clock.now_s += 1.0 if batch.rows > 8 else 10.0 * (layer == 0)

    monkeypatch.setattr("serai.runtime.driver.time", Clock)
    monkeypatch.setattr("serai.runtime.step.time", Clock)
    model = ScriptedModel(layers=60, before_layer=takes_its_time)
    async with fake_runtime(model, limits=Limits(8, 4, wide_rows=64)) as rt:
        talker, reader = await rt.session(), await rt.session()
        await reader.append(LONG)
        assert rt._services.driver.reading_s(64) == 0.0, "less than a whole wide step says too little"
        await talker.append([1, 2, 3])
        stream = talker.generate(replace(GREEDY, max_tokens=20))
        await anext(stream)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader.append, list(range(1, 9)) * 8)
            async for _ in stream:
                pass
        wide = [place for place, count in enumerate(rows) if count == 64]
        assert 1 in rows[wide[0] : wide[-1]]
        assert rt._services.driver.reading_s(64) == 60.0


async def test_a_short_prompt_does_not_wait_for_a_wide_step() -> None:
    model = ScriptedModel(layers=60)
    async with fake_runtime(model, limits=Limits(8, 4, wide_rows=64)) as rt:
        short, long = await rt.session(), await rt.session()
        ended: list[str] = []

        async def read(session: Session, tokens: list[int], name: str) -> None:
            await session.append(tokens)
            ended.append(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, long, LONG, "long")
            tasks.start_soon(read, short, [1, 2, 3, 4], "short")
        assert ended == ["short", "long"]
        assert sorted(model.steps) == [4, 50]


def test_a_wide_step_does_not_wait_for_the_disk_while_answers_are_ready() -> None:
    waits: list[float] = []

    class Reading:
        def forward(self, batch: Batch) -> Generator[Wait | None, None, Outputs]:
            yield waits.append
            return (yield from ScriptedModel().forward(batch))

    engine, pool = Engine(Reading(), LAYOUT), StatePool(LAYOUT)
    state = pool.empty()
    draft = pool.draft(state, 2, with_logits=True)
    plan = StepPlan((Segment(state, np.array([1, 2], np.int32), draft),), AbortFlag())
    assert engine.go_on(plan, Slice(until_s=time.monotonic() + 60)) is None
    assert waits == []
    assert engine.go_on(plan, Slice()) is not None
    draft.abandon()
    draft = pool.draft(state, 2, with_logits=True)
    plan = StepPlan((Segment(state, np.array([1, 2], np.int32), draft),), AbortFlag())
    assert engine.go_on(plan, Slice()) is not None
    assert len(waits) == 1, "alone it may wait"
    draft.abandon()
    state.release()
