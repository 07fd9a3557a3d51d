"""An append gets all the memory it will need before its first token, or waits for it, holding nothing others want."""

from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.runtime import Runtime, Session
from serai.runtime.errors import OutOfBudget, WaitedTooLong
from serai.runtime.memory.residency import Tier
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import FIXED, LOGITS, PAGE, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

RUNNING = 3 * FIXED + 3 * LOGITS
"""What a running session holds beside its latents: the state before, between two slices, and after."""

NEW = 2 * FIXED + 2 * LOGITS
"""The same for one that was empty before."""

PIECES = Policy(reuse=True, snapshot_every=8, save_after_tokens=1_000)
"""Long appends leave a state every two pages."""

SLICES = Limits(8, 8)


async def is_right(session: Session, ids: list[int]) -> bool:
    return session.tokens().tolist() == ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


def within(rt: Runtime) -> None:
    budget = rt.status().budget
    # What is spare is part of what is promised: it is taken first, or given back first.
    assert budget.live_bytes + budget.kept_bytes + budget.reserved_bytes <= budget.budget_bytes


async def test_of_two_long_appends_at_once_each_is_read_to_its_end_and_once() -> None:
    """They once reserved piece by piece, and one could end half way with `OutOfBudget`."""
    async with fake_runtime(limit_bytes=RUNNING + 25 * PAGE, policy=PIECES, limits=SLICES) as rt:
        done: list[int] = []

        async def one(token: int) -> None:
            async with await rt.session() as session:
                await session.append([token] * 60)
                assert await is_right(session, [token] * 60)
                done.append(token)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for token in (1, 2, 3):
                    tasks.start_soon(one, token)
        assert done == [1, 2, 3], "in order"
        assert rt.counters.prefilled_tokens == 180
        within(rt)


async def test_states_on_the_way_are_left_only_where_there_is_room_for_them() -> None:
    for spare, kept in ((0, 0), (2, 2), (100, 7)):
        limit = NEW + 16 * PAGE + spare * (FIXED + LOGITS)
        async with fake_runtime(limit_bytes=limit, policy=PIECES, limits=SLICES) as rt:
            session = await rt.session()
            await session.append(list(range(16)) * 4)
            on_the_way = session.kept_positions() - {64}
            assert len(on_the_way) <= kept
            assert bool(on_the_way) == bool(kept)
            within(rt)
            rt.check()


async def test_two_cold_sessions_that_want_more_than_fits_at_once_take_turns(tmp_path: Path) -> None:
    """Each once came back into memory and then waited for what the other held."""
    limit = RUNNING + 22 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=Policy(reuse=False), limits=SLICES) as rt:
        sessions = [await rt.session() for _ in range(2)]
        for token, session in enumerate(sessions):
            await session.append([token] * 36)
            assert await session.demote()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for session in sessions:
                    tasks.start_soon(session.append, [5] * 40)
        for token, session in enumerate(sessions):
            assert await is_right(session, [token] * 36 + [5] * 40)
        assert [session.tier for session in sessions].count(Tier.COLD) >= 1
        within(rt)


@pytest.mark.parametrize("policy", [Policy(reuse=False), PIECES], ids=["alone", "shared"])
async def test_hot_sessions_whose_appends_wait_for_each_other_take_turns(tmp_path: Path, policy: Policy) -> None:
    """Each once kept its state in memory while it waited for what the others held, until all were refused."""
    limit = RUNNING + FIXED + LOGITS + 29 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=policy, limits=SLICES) as rt:
        sessions = [await rt.session() for _ in range(3)]
        for token, session in enumerate(sessions):
            await session.append([token] * 36)
        rt._services.prefixes.clear()
        # While a step's states are being given back, one may have had to leave; there is room for all of them.
        with anyio.fail_after(20):
            while [session.tier for session in sessions] != [Tier.HOT] * 3:
                assert all([await session.logits() is not None for session in sessions])

        order: list[int] = []

        async def more(number: int) -> None:
            await sessions[number].append([5] * 40)
            order.append(number)

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(more, number)
        assert order == [0, 1, 2], "who came first is not moved out for who came later"
        for token, session in enumerate(sessions):
            assert await is_right(session, [token] * 36 + [5] * 40)
        within(rt)
        rt.check()


async def test_who_waits_holds_no_beginning_that_another_has_left() -> None:
    """One who came later once kept it in memory, and who came first waited for that."""
    ends_only = Policy(snapshot_every=1_000)
    async with fake_runtime(limit_bytes=NEW + 22 * PAGE, policy=ends_only, limits=SLICES) as rt:
        leaves, first, later = [await rt.session() for _ in range(3)]
        await leaves.append([1] * 36)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first.append, [2] * 76)
            await anyio.wait_all_tasks_blocked()
            assert leaves.held is not None
            rt._services.prefixes.keep("", leaves.timeline.digest(), leaves.held)  # as at the end of a turn
            tasks.start_soon(later.append, [1] * 40)
            await anyio.wait_all_tasks_blocked()
            assert (rt.status().work.waiting_for_memory, leaves.held.refs) == (2, 3)
            with anyio.fail_after(20):
                await leaves.close()
                while not first.position:
                    await anyio.lowlevel.checkpoint()
            await first.close()
        assert await is_right(later, [1] * 40)
        rt.check()


async def test_an_append_lets_its_session_come_back_first_that_is_on_its_way(tmp_path: Path) -> None:
    """The append once had all the memory and waited for the move, which waited for memory."""
    limit = RUNNING + 22 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=Policy(reuse=False), limits=SLICES) as rt:
        session = await rt.session()
        await session.append([1] * 36)
        assert await session.demote()
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.come_back)
                tasks.start_soon(session.append, [5] * 40)
        assert await is_right(session, [1] * 36 + [5] * 40)
        assert rt.status().work.promotions == 1
        within(rt)


async def test_what_is_promised_is_had_though_others_say_more_meanwhile() -> None:
    """Token ids of what is generated count in the budget, and were promised to nobody."""
    gate = Gate(step=2)
    model = ScriptedModel(before_layer=gate)
    async with fake_runtime(model, limit_bytes=NEW + 10 * PAGE, policy=PIECES, limits=SLICES) as rt:
        session = await rt.session()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.append, [1] * 40)
            await gate.reached.wait()
            rt.pool.beside_bytes += 4_096
            gate.open()
        rt.pool.beside_bytes -= 4_096
        assert await is_right(session, [1] * 40)
        rt.check()


async def test_a_cold_session_whose_snapshot_is_lost_is_replayed_within_what_was_reserved(tmp_path: Path) -> None:
    limit = RUNNING + FIXED + LOGITS + 21 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=PIECES, limits=SLICES) as rt:
        session = await rt.session()
        await session.append([1] * 36)
        assert await session.demote()
        assert rt.store is not None
        rt.store.set_aside(session.head, "a test takes it away")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.append, [2] * 40)
            while session.position < 76:
                within(rt)
                await anyio.lowlevel.checkpoint()
        assert await is_right(session, [1] * 36 + [2] * 40)


async def test_a_stored_state_of_all_the_tokens_that_is_lost_is_read_anew(tmp_path: Path) -> None:
    policy = Policy(snapshot_every=8, save_after_tokens=4)
    async with fake_runtime(store=tmp_path, policy=policy) as rt:
        await (await rt.session()).append([1] * 40)
        await rt.settle()
    async with fake_runtime(store=tmp_path, policy=policy, limits=SLICES) as rt:
        assert rt.store is not None
        snapshots = rt.store.snapshots()
        assert 40 in [one.position for one in snapshots]
        for one in snapshots:
            rt.store.drop_snapshot(one.node_id)
        session = await rt.session()
        with anyio.fail_after(20):
            assert (await session.append([1] * 40)).reused == 0
        assert await is_right(session, [1] * 40)
        await rt.settle()  # what is being written is held by nobody who can be named
        rt.check()


async def test_what_could_not_fit_with_its_cold_state_is_refused_before_that_comes_back(tmp_path: Path) -> None:
    limit = RUNNING + 22 * PAGE
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=PIECES, limits=SLICES) as rt:
        session = await rt.session()
        await session.append([1] * 36)
        assert await session.demote()
        with pytest.raises(OutOfBudget) as refused:
            await session.append([2] * 400)
        assert refused.value.needed_bytes > limit
        assert (session.tier, rt.status().work.promotions) == (Tier.COLD, 0)


async def test_an_aborted_step_gives_back_what_was_promised_for_it() -> None:
    """Its survivors run again, and need the same once more."""
    gate = Gate(step=2)
    model = ScriptedModel(before_layer=gate)
    async with fake_runtime(model, limit_bytes=10_000, policy=PIECES, limits=SLICES) as rt:
        session = await rt.session()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(session.append, [1] * 40)
                await gate.reached.wait()
                scope.cancel()
        gate.open()
        await session.append([2] * 40)
        assert await is_right(session, [2] * 40)
        assert rt.status().budget.reserved_bytes == 0
        within(rt)


async def test_many_who_begin_alike_wait_once_for_memory_not_one_after_the_other() -> None:
    """Five once waited the bound five times over, each for the one before it."""
    async with fake_runtime(limit_bytes=RUNNING + 14 * PAGE, policy=PIECES, limits=SLICES) as rt:
        wait_s = 0.3
        rt._services.admission._max_wait_s = wait_s
        holder = await rt.session(namespace="another")
        await holder.append([9] * 40)
        rt._services.prefixes.clear()
        refused: list[int] = []

        async def one(number: int) -> None:
            session = await rt.session()
            with pytest.raises(WaitedTooLong):
                await session.append([1] * 32)
            refused.append(number)

        with anyio.fail_after(3 * wait_s):
            async with anyio.create_task_group() as tasks:
                for number in range(5):
                    tasks.start_soon(one, number)
        assert sorted(refused) == list(range(5))


async def test_many_who_begin_alike_are_read_once_though_they_had_to_wait() -> None:
    async with fake_runtime(limit_bytes=RUNNING + 24 * PAGE, policy=PIECES, limits=SLICES) as rt:
        holder = await rt.session(namespace="another")
        await holder.append([9] * 76)
        before = rt.counters.prefilled_tokens
        sessions = [await rt.session() for _ in range(3)]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for session in sessions:
                    tasks.start_soon(session.append, [1] * 40)
                while rt.status().work.waiting_for_memory < 3:
                    await anyio.lowlevel.checkpoint()
                await holder.close()
                rt._services.prefixes.clear()
        assert rt.counters.prefilled_tokens - before == 40
        for session in sessions:
            assert await is_right(session, [1] * 40)


@pytest.mark.parametrize("at_once", [False, True])
async def test_who_begins_like_another_needs_room_for_the_rest_only(at_once: bool) -> None:
    """A document that fits once is read once and shared; nobody is asked for room for a second one."""
    document = [number % 16 for number in range(96)]
    limit = NEW + 24 * PAGE + 4 * (3 * FIXED + 3 * LOGITS + 3 * PAGE)
    async with fake_runtime(limit_bytes=limit, policy=PIECES, limits=SLICES) as rt:
        sessions = [await rt.session() for _ in range(4)]

        async def read(number: int) -> None:
            await sessions[number].append([*document, number, number])

        with anyio.fail_after(20):
            if at_once:
                async with anyio.create_task_group() as tasks:
                    for number in range(4):
                        tasks.start_soon(read, number)
            else:
                for number in range(4):
                    await read(number)
        assert rt.counters.prefilled_tokens == 96 + 4 * 2
        for number, session in enumerate(sessions):
            assert await is_right(session, [*document, number, number])
        within(rt)
        rt.check()
