"""Whoever waits is woken, refused or served when what it waits for ends meanwhile; and nothing stays behind."""

import gc
import threading
from pathlib import Path

import anyio
import pytest

from serai.checkpoints.errors import NotOwner, SeraiError
from serai.runtime import Runtime, SamplingParams, Session
from serai.runtime.errors import EngineFailed, SessionClosed
from serai.runtime.memory.residency import Tier
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import FIXED, LOGITS, PAGE, ScriptedModel

pytestmark = pytest.mark.anyio

RUNNING = 3 * FIXED + 2 * LOGITS
"""Bytes of one running session beside its pages: before, after and kept."""
PATIENCE_S = 10


async def waiting_for_memory(rt: Runtime) -> None:
    while not rt.status().work.waiting_for_memory:  # noqa: ASYNC110  # nothing tells of it
        await anyio.sleep(0.001)


async def test_who_waits_for_memory_hears_that_the_engine_has_failed() -> None:
    began, go_on = threading.Event(), threading.Event()

    def fail(_batch: object, _layer: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE_S)
        raise RuntimeError("boom")

    heard: list[SeraiError] = []

    async def append(session: Session) -> None:
        with pytest.raises(EngineFailed) as error:
            await session.append([1] * 8)
        heard.append(error.value)

    async with fake_runtime(ScriptedModel(before_layer=fail), limit_bytes=RUNNING + 3 * PAGE) as rt:
        sessions = [await rt.session() for _ in range(2)]
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(append, sessions[0])
                await anyio.to_thread.run_sync(began.wait)
                tasks.start_soon(append, sessions[1])
                await waiting_for_memory(rt)
                go_on.set()
        assert len(heard) == 2


async def test_forgetting_a_kept_state_twice_leaves_the_next_one_of_its_key() -> None:
    async with fake_runtime(limit_bytes=100_000, policy=Policy(reuse=True)) as rt:
        prefixes = rt._services.prefixes
        first, second = [await rt.session() for _ in range(2)]
        await first.append([1] * 8)
        prefixes.reclaim(1)
        await second.append([1] * 8)  # kept anew, under the same key
        await first.rewind(position=0)  # leaves what it still knows of the old one
        await first.close()
        await second.close()
        prefixes.reclaim(10**9)
        assert rt.pool.live_bytes == 0
        rt.check()


async def test_an_append_whose_session_ends_is_refused_and_leaves_no_state() -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait(_batch: object, _layer: int) -> None:
        began.set()
        assert go_on.wait(PATIENCE_S)

    async with fake_runtime(ScriptedModel(before_layer=wait), policy=Policy(reuse=False)) as rt:
        session = await rt.session()

        async def append() -> None:
            with pytest.raises(SessionClosed):
                await session.append([1] * 8)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(append)
            await anyio.to_thread.run_sync(began.wait)
            await session.break_off()
            go_on.set()
        assert rt.pool.live_bytes == 0


async def test_a_session_that_moves_away_while_it_is_resumed_does_not_live_here_as_well(tmp_path: Path) -> None:
    began, go_on, slow = threading.Event(), threading.Event(), threading.Event()

    def wait(_batch: object, _layer: int) -> None:
        if slow.is_set():
            began.set()
            assert go_on.wait(PATIENCE_S)

    async with fake_runtime(ScriptedModel(before_layer=wait), store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([1] * 8)
        resumed: list[Session] = []

        async def resume() -> None:
            try:
                resumed.append(await rt.resume(session.id))
            except NotOwner:
                assert session.id not in [one.id for one in resumed]

        slow.set()  # its state is rebuilt from its tokens meanwhile
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(resume)
            await anyio.to_thread.run_sync(began.wait)
            await session.migrate(str(tmp_path / "there"))
            go_on.set()
        assert session.id not in [one.id for one in resumed]


async def test_moving_out_does_not_wait_for_a_session_that_waits_for_memory(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, limit_bytes=RUNNING + 27 * PAGE) as rt:
        cold, hot = [await rt.session() for _ in range(2)]
        await cold.append([1] * 100)
        await cold.demote()
        assert cold.tier is Tier.COLD
        await hot.append([2] * 100)
        hot.claim("test")
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cold.logits)
                await waiting_for_memory(rt)
                await cold.demote()
                hot.unclaim()


async def test_a_reader_who_vanishes_frees_its_session_for_who_waits(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, limit_bytes=RUNNING + 4 * PAGE) as rt:
        read, other = [await rt.session() for _ in range(2)]
        await read.append([1] * 12)
        stream = read.generate(SamplingParams(max_tokens=4, temperature=0, seed=1))
        await stream.__anext__()
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.append, [2] * 8)
                await waiting_for_memory(rt)
                del stream
                gc.collect()


async def test_a_reader_who_is_broken_off_holds_no_state_of_tokens_still_to_come() -> None:
    async with fake_runtime(ScriptedModel(counting=True), policy=Policy(reuse=True, guess=True)) as rt:
        session = await rt.session()
        await session.append([3, 4, 5, 6, 7, 3, 4, 5])
        reader = session.generate(SamplingParams(temperature=0, max_tokens=20))
        for _ in range(20):
            await anext(reader)
            if reader.ahead is not None:  # guesses were right
                break
        assert reader.ahead is not None
        await rt.close()  # `fake_runtime` asks whether every buffer came back, with `reader` still there
        with pytest.raises(SessionClosed):
            await anext(reader)
        assert session.position == len(session.tokens())
