"""Memory is given in order, within the limit, and idle sessions make room: B117, B119, B120."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from serai.checkpoints.store import Store
from serai.runtime import FinishReason, Runtime, SamplingParams, Session
from serai.runtime.errors import OutOfBudget, WaitedTooLong
from serai.runtime.memory import admission
from serai.runtime.memory.residency import Idle, Tier, value_of_moving, victims
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.state import session_bytes
from tests.checkpoints.disks import FailingDisk
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import FIXED, GREEDY, LAYOUT, LOGITS, PAGE, ScriptedModel, greedy_by_hand

pytestmark = pytest.mark.anyio

RUNNING = 3 * FIXED + 2 * LOGITS
"""What a running session holds beside its latents: the state before, between two slices, and after."""


def within(rt: Runtime) -> None:
    budget = rt.status().budget
    assert budget.used_bytes + budget.reserved_bytes <= budget.budget_bytes


async def test_a_call_that_can_never_fit_is_refused_with_the_numbers() -> None:
    limit = RUNNING + 10 * PAGE
    async with fake_runtime(limit_bytes=limit) as rt:
        session = await rt.session()
        with pytest.raises(OutOfBudget) as refused:
            await session.append([1] * 100)
        assert refused.value.free_bytes == limit
        assert refused.value.needed_bytes > limit
        assert rt.counters.steps == 0


async def test_a_long_append_that_can_never_fit_is_refused_before_its_first_token() -> None:
    """B119: not after all the pieces that do fit were computed."""
    kept = Policy(reuse=True, snapshot_every=8)
    async with fake_runtime(limit_bytes=RUNNING + 10 * PAGE, policy=kept, limits=Limits(8, 8)) as rt:
        session = await rt.session()
        with pytest.raises(OutOfBudget, match="this call needs"):
            await session.append([1] * 100)
        assert (rt.counters.steps, session.position) == (0, 0)
        await session.append([1] * 30)
        assert rt.counters.prefilled_tokens == 30


async def test_what_is_promised_and_what_is_live_never_pass_the_budget_between_steps() -> None:
    async with fake_runtime(limit_bytes=RUNNING + 30 * PAGE, limits=Limits(4, 4)) as rt:
        session = await rt.session()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.append, [1] * 100)
            while session.position == 0:
                within(rt)
                await anyio.lowlevel.checkpoint()


async def test_two_that_fit_only_one_after_the_other_are_each_prefilled_once() -> None:
    """B119: no request is admitted, prefilled and thrown out again."""
    limit = RUNNING + 25 * PAGE
    done: list[str] = []
    async with fake_runtime(limit_bytes=limit, limits=Limits(8, 8)) as rt:

        async def one(name: str) -> None:
            async with await rt.session(label=name) as session:
                await session.append([1] * 60)
                assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([1] * 60, 8)
                done.append(name)

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second", "third"):
                tasks.start_soon(one, name)
        assert done == ["first", "second", "third"]
        assert rt.counters.prefilled_tokens == 3 * 60


async def test_idle_sessions_make_room_and_come_back_as_they_were(tmp_path: Path) -> None:
    limit = RUNNING + 30 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, limits=Limits(8, 8)) as rt:
        sessions = []
        for start in range(6):
            session = await rt.session()
            await session.append([start] * 40)
            sessions.append(session)
            within(rt)
        assert [session.tier for session in sessions].count(Tier.COLD) >= 3
        prefilled = rt.counters.prefilled_tokens
        for start, session in enumerate(sessions):
            assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([start] * 40, 8)
            within(rt)
        assert rt.counters.prefilled_tokens == prefilled, "coming back computes nothing"


async def test_a_session_waiting_for_a_tool_goes_first_and_is_back_in_time(tmp_path: Path) -> None:
    limit = RUNNING + 22 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit) as rt:
        waiter, other = await rt.session(), await rt.session()
        await waiter.append([1] * 32)
        await other.append([2] * 32)
        async with waiter.waiting_for_tool(expected_s=1_000):
            third = await rt.session()
            await third.append([3] * 32)
            assert (waiter.tier, other.tier) == (Tier.COLD, Tier.HOT)
            await third.close()
        assert rt.status().work.promotions == 1
        assert list((await waiter.generate(GREEDY).collect()).tokens) == greedy_by_hand([1] * 32, 8)


async def test_a_session_that_outgrows_the_budget_ends_its_turn_and_stays() -> None:
    limit = RUNNING + 10 * PAGE
    async with fake_runtime(limit_bytes=limit) as rt:
        session = await rt.session()
        await session.append([1] * 20)
        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given = []

        async def read() -> None:
            async for token in stream:
                given.append(token.id)

        with pytest.raises(OutOfBudget):
            await read()
        assert stream.finish_reason is FinishReason.BUDGET
        assert session.tokens().tolist() == [1] * 20 + given
        assert given == greedy_by_hand([1] * 20, len(given))
        assert len(given) >= 4


async def test_a_full_house_where_nobody_is_under_way_is_an_error_before_long() -> None:
    """No store, an idle engine and a budget too small for both: nothing but a session that is closed would help."""
    limit = RUNNING + 14 * PAGE
    async with fake_runtime(limit_bytes=limit) as rt:
        rt._services.admission._nobody_under_way_s = 0.05
        first, *others = [await rt.session() for _ in range(3)]
        await first.append([1] * 32)
        refused: list[WaitedTooLong] = []

        async def too_much(session: Session) -> None:
            with pytest.raises(WaitedTooLong, match=r"did not become free within 0.05 s .* with a store") as error:
                await session.append([2] * 32)
            refused.append(error.value)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for session in others:
                    tasks.start_soon(too_much, session)
        assert [error.free_bytes for error in refused] == [limit - rt.pool.live_bytes] * 2
        assert [session.position for session in (first, *others)] == [32, 0, 0]
        assert rt.status().work.waiting_for_memory == 0
        await first.close()
        await others[0].append([2] * 32)


@pytest.mark.parametrize("stored", [False, True], ids=["no store", "a store that is full"])
async def test_without_a_store_nobody_waits_long_for_what_nothing_can_free(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited as long as where idle sessions can be moved out, for each call that was in line."""
    monkeypatch.setattr(admission, "NOTHING_MOVES_S", 0.05)
    monkeypatch.setattr(admission, "NOBODY_UNDER_WAY_S", 0.4)
    disk = FailingDisk("create")
    disk.broken = False
    limit = RUNNING + 14 * PAGE
    store = tmp_path if stored else None
    async with fake_runtime(store=store, disk=disk, limit_bytes=limit, policy=Policy(reuse=False)) as rt:
        first, other = await rt.session(), await rt.session()
        await first.append([1] * 32)
        disk.broken = True
        with anyio.fail_after(20), pytest.raises(WaitedTooLong, match=f"within {0.4 if stored else 0.05} s"):
            await other.append([2] * 32)
        disk.broken = False


async def test_going_back_that_can_not_fit_beside_the_present_is_refused_at_once() -> None:
    """A session never waits for memory that it holds itself."""
    async with fake_runtime(limit_bytes=2 * FIXED + 2 * LOGITS + 12 * PAGE, policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append([1] * 20)
        with anyio.fail_after(20), pytest.raises(OutOfBudget, match="this call needs"):
            await session.rewind(position=19)
        assert session.position == 20
        assert rt.status().budget.reserved_bytes == 0
        await session.append([1] * 2)


async def test_a_full_house_without_a_store_waits_for_a_session_to_close() -> None:
    limit = RUNNING + 14 * PAGE
    async with fake_runtime(limit_bytes=limit) as rt:
        first, second = await rt.session(), await rt.session()
        await first.append([1] * 32)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.append, [2] * 32)
            await anyio.wait_all_tasks_blocked()
            assert second.position == 0
            await first.close()
        assert second.position == 32


async def test_a_state_that_is_just_being_written_is_moved_out_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue looks again when the write ends, though that frees nothing by itself."""
    kept = Policy(reuse=True, save_after_tokens=4)
    async with fake_runtime(store=tmp_path, limit_bytes=RUNNING + 14 * PAGE, policy=kept) as rt:
        begun, go_on, save = anyio.Event(), threading.Event(), Store.save
        loop = asyncio.get_running_loop()

        def slow(store: Store, *arguments: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(timeout=10), "the test lets it go on"
            return save(store, *arguments, **options)

        monkeypatch.setattr(Store, "save", slow)
        first, second = await rt.session(), await rt.session()
        await first.append([1] * 32)
        await begun.wait()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.append, [2] * 32)
                await anyio.lowlevel.checkpoint()
                while rt.status().work.waiting_for_memory == 0:
                    await anyio.lowlevel.checkpoint()
                go_on.set()
        assert (first.tier, second.position) == (Tier.COLD, 32)


async def test_a_session_that_falls_idle_makes_room_for_who_waits(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, limit_bytes=RUNNING + 14 * PAGE) as rt:
        first, second = await rt.session(), await rt.session()
        await first.append([1] * 32)
        stream = first.generate(GREEDY)
        await anext(stream)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.append, [2] * 32)
                while rt.status().work.waiting_for_memory == 0:
                    await anyio.lowlevel.checkpoint()
                await stream.aclose()
        assert (first.tier, second.position) == (Tier.COLD, 32)


async def test_leaving_the_queue_leaves_nothing_behind() -> None:
    """B120: a hundred waiters that are cancelled hold neither a place nor a byte."""
    limit = RUNNING + 14 * PAGE
    async with fake_runtime(limit_bytes=limit) as rt:
        first = await rt.session()
        await first.append([1] * 32)
        live = rt.status().budget.live_bytes
        for _ in range(100):
            session = await rt.session()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(session.append, [2] * 32)
                    await anyio.wait_all_tasks_blocked()
                    scope.cancel()
            await session.close()
        assert rt.status().budget.live_bytes == live
        assert list((await first.generate(GREEDY).collect()).tokens) == greedy_by_hand([1] * 32, 8)


async def test_a_call_on_a_session_that_is_being_moved_waits_for_the_move(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([4, 5])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.demote)
            await anyio.lowlevel.checkpoint()
            tasks.start_soon(session.append, [6])
        assert session.tokens().tolist() == [4, 5, 6]
        fork = await session.fork()
        assert list((await fork.generate(GREEDY).collect()).tokens) == greedy_by_hand([4, 5, 6], 8)


async def test_a_fork_of_a_cold_session_costs_nothing_until_used(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([4, 5])
        assert await session.demote()
        children = await session.fork_many(3)
        assert rt.status().budget.live_bytes == 0
        assert list((await children[2].generate(GREEDY).collect()).tokens) == greedy_by_hand([4, 5], 8)
        assert session.tier is Tier.COLD


async def test_the_step_in_flight_keeps_its_memory_when_its_caller_leaves() -> None:
    gate = Gate(step=1)
    async with fake_runtime(ScriptedModel(before_layer=gate), limit_bytes=RUNNING + 8 * PAGE) as rt:
        session = await rt.session()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.append, [1] * 8)
                await gate.reached.wait()
                scope.cancel()
        assert rt.status().budget.live_bytes >= session_bytes(LAYOUT, 8), "the engine still writes there"
        gate.open()
        await session.append([2] * 8)
        assert session.tokens().tolist() == [2] * 8


def test_the_most_bytes_for_the_longest_time_go_first() -> None:
    idle = [
        Idle("small", 10, idle_s=100),
        Idle("large", 1_000, idle_s=100),
        Idle("fresh", 1_000, idle_s=1),
        Idle("tool", 1_000, idle_s=0, returns_in_s=500),
        Idle("soon", 1_000, idle_s=900, returns_in_s=0.5),
        Idle("shared", 0, idle_s=10_000),
    ]
    assert victims(idle, 1) == ("tool",)
    assert victims(idle, 2_500) == ("tool", "large", "fresh")
    assert victims(idle, 10**9) == ("tool", "large", "fresh", "small", "soon")
    assert value_of_moving(Idle("x", 5, idle_s=-1)) == 0
