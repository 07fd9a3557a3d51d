"""The session tree: forks at any point, rewinding, editing, and starting from what others have computed."""

from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime import Session
from serai.runtime.errors import BadParameter, PositionUnavailable, PromptTooLong
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.prefixes import thinned
from serai.runtime.state import session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY, LAYOUT, SAMPLED, ScriptedModel, greedy_by_hand, hash_of, logits_of

pytestmark = pytest.mark.anyio

KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)


async def is_at(session: Session, ids: list[int]) -> bool:
    """Whether a session is, in every bit, what a cold read of those ids gives."""
    if session.tokens().tolist() != ids or session.position != len(ids):
        return False
    return not ids or bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


@pytest.mark.parametrize("position", [130, 128, 100, 64, 17, 16, 1, 0])
async def test_a_fork_anywhere_equals_a_cold_read_of_that_many_tokens(position: int) -> None:
    """B35, B37: not the state of the last grid point, whatever grid and page size are."""
    ids = [(7 * n) % 13 for n in range(130)]
    async with fake_runtime(policy=KEEPING) as rt:
        session = await rt.session()
        await session.append(ids)
        cost = session.replay_tokens(position=position)
        assert cost <= 16 * 4
        before = rt.counters.prefilled_tokens
        child = await session.fork(position=position)
        assert rt.counters.prefilled_tokens - before == (0 if position == 130 else cost)
        assert await is_at(child, ids[:position])
        assert await is_at(session, ids)


@pytest.mark.parametrize(("page", "every", "below", "replayed"), [(16, 64, 64, 36), (16, 48, 96, 4), (7, 50, 100, 0)])
async def test_a_fork_starts_at_the_kept_state_below_it(page: int, every: int, below: int, replayed: int) -> None:
    """B37: at 100, whatever page and interval are: its number is that of the interval, not of the page."""
    ids = [(7 * n) % 13 for n in range(130)]
    async with fake_runtime(ScriptedModel(page_tokens=page), policy=Policy(snapshot_every=every)) as rt:
        session = await rt.session()
        await session.append(ids)
        assert below in session.kept_positions()
        assert session.replay_tokens(position=100) == replayed
        assert await is_at(await session.fork(position=100), ids[:100])


@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 150), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_for_any_page_and_interval_a_fork_equals_a_cold_read(page: int, every: int, length: int, cut: int) -> None:
    """B37: the index is always in range, and no more is replayed than thinning explains."""
    ids, position = [(7 * n) % 13 for n in range(length)], cut % (length + 1)

    async def check() -> None:
        async with fake_runtime(ScriptedModel(page_tokens=page), policy=Policy(snapshot_every=every)) as rt:
            session = await rt.session()
            await session.append(ids)
            replayed = session.replay_tokens(position=position)
            assert position - replayed in {0, position, *session.kept_positions()}
            assert replayed <= max(every, length - position + every)
            assert await is_at(await session.fork(position=position), ids[:position])

    anyio.run(check)


async def test_a_point_that_is_not_there_is_a_clear_error() -> None:
    async with fake_runtime(policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        for wrong in (4, -1):
            with pytest.raises(PositionUnavailable, match=f"position {wrong} does not exist; .* 0 to 3"):
                await session.fork(position=wrong)
        with pytest.raises(PositionUnavailable, match=r"turn 1 does not exist; .* turns 0 to 0"):
            await session.rewind(turn=1)
        with pytest.raises(BadParameter, match="not both"):
            await session.fork(turn=0, position=1)
        for turn in (-1, 1):
            with pytest.raises(PositionUnavailable, match=f"turn {turn} does not exist"):
                await session.edit(turn, [4])
        for wrong_ids, error in (([4, 99], BadParameter), ([4] * 10_001, PromptTooLong)):
            with pytest.raises(error):
                await session.edit(0, wrong_ids)
        assert await is_at(session, [1, 2, 3]), "nothing was taken back for what can't be said"


async def test_turns_are_appends_with_their_generation() -> None:
    async with fake_runtime(policy=KEEPING) as rt:
        session = await rt.session()
        ids: list[int] = []
        ends = []
        for turn in range(3):
            await session.append([turn, turn + 1])
            await session.append([turn + 2])
            done = await session.generate(GREEDY).collect()
            ids += [turn, turn + 1, turn + 2, *done.tokens]
            ends.append(len(ids))
        assert session.turn == 2
        for turn, end in enumerate(ends):
            assert await is_at(await session.fork(turn=turn), ids[:end])
        await session.rewind(turn=0)
        assert await is_at(session, ids[: ends[0]])
        assert session.turn == 0
        edited = await session.edit(0, [9, 9])
        assert edited.position == 2
        assert await is_at(session, [9, 9])
        assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([9, 9], 8)


async def test_nodes_on_the_way_are_points_to_go_back_to(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5])
        early = session.head
        await session.append([6, 7])
        await session.generate(GREEDY).collect()
        await session.flush()
        late = session.head
        assert session.replay_tokens(node=early) == session.replay_tokens(position=5)
        assert await is_at(await session.fork(node=early), [1, 2, 3, 4, 5])
        whole = [1, 2, 3, 4, 5, 6, 7, *greedy_by_hand([1, 2, 3, 4, 5, 6, 7], 8)]
        assert await is_at(await session.fork(node=late), whole)
        with pytest.raises(BadParameter, match="not several"):
            await session.fork(node=early, turn=0)
        await session.rewind(node=early)
        assert await is_at(session, [1, 2, 3, 4, 5])
        with pytest.raises(PositionUnavailable, match=f"node {late} is not on the way .* `Runtime.resume` branches"):
            await session.rewind(node=late)
        assert await is_at(await rt.resume(late), whole)


async def test_a_node_has_the_state_of_its_own_tokens_after_a_call_for_others_was_broken_off(tmp_path: Path) -> None:
    said, meant = [(7 * n) % 13 for n in range(70)], [(5 * n) % 11 for n in range(70)]
    async with fake_runtime(store=tmp_path, policy=KEEPING, limits=Limits(step_rows=16)) as rt:
        await (await rt.session()).append(meant)
        before = rt.counters.prefilled_tokens
        session = await rt.session()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.append, said)
            with anyio.fail_after(10):
                while rt.counters.prefilled_tokens < before + 48:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert session.position == 0
        assert session.kept_positions(), "what was computed is kept for the next try"
        await session.append(meant)
        nodes = session.record.nodes()
        await session.pause()
        await rt._services.saver.settle()
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        for node in nodes:
            assert await is_at(await rt.resume(node.id), meant[: node.position])


async def test_a_fork_inside_a_generation_draws_the_same_tokens_again() -> None:
    """Contract, g: a generation is continued across forks, from the same seed; only the branch differs."""
    async with fake_runtime(policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([2, 7, 1])
        whole = (await session.generate(SAMPLED).collect()).tokens
        await session.rewind(position=3 + 8)
        rest = (await session.generate(SAMPLED).collect()).tokens
        assert rest[: len(whole) - 8] == whole[8:]


async def test_what_was_rewound_stays_reachable(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5])
        point = session.record.point()
        await session.rewind(position=2)
        await session.append([9])
        assert await is_at(session, [1, 2, 9])
        name = session.id
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        assert await is_at(await rt.resume(name), [1, 2, 9])
        assert await is_at(await rt.resume(point), [1, 2, 3, 4, 5])


async def test_sessions_that_begin_alike_read_the_beginning_once(tmp_path: Path) -> None:
    """B39: sixteen at once with a shared beginning, and again after a restart, from the store."""
    shared = [(3 * n) % 11 for n in range(400)]

    async def one(rt: object, number: int, reused: list[int]) -> None:
        session = await rt.session()  # type: ignore[attr-defined]
        used = await session.append(shared)
        reused.append(used.reused)
        await session.append([number % 16] * 3)
        assert await is_at(session, shared + [number % 16] * 3)

    for round_, computed in ((0, 400 + 16 * 3), (1, 0)):
        async with fake_runtime(store=tmp_path, policy=KEEPING, limits=Limits(64, 64)) as rt:
            reused: list[int] = []
            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(one, rt, number, reused)
            # After the restart the tails are known too, from the store.
            assert rt.counters.prefilled_tokens <= computed + (0 if round_ == 0 else 16 * 3)
            assert sum(reused) == (15 + round_) * 400
            assert rt.status().work.reused_tokens >= sum(reused)
            await rt.settle()


async def test_a_unique_tail_does_not_spoil_the_shared_beginning() -> None:
    """B39: the second request computes its own tail and no more than one grid step of the beginning."""
    shared = [(5 * n) % 13 for n in range(400)]
    async with fake_runtime(policy=KEEPING) as rt:
        for tail in (1, 2):
            session = await rt.session()
            used = await session.append([*shared, *[tail] * 30])
            assert await is_at(session, [*shared, *[tail] * 30])
        assert used.reused == 400
        assert used.prefilled == 30


async def test_a_grid_that_does_not_fit_the_shared_beginning_costs_one_step_of_it_at_most() -> None:
    """B39: grid 64, 400 shared tokens, 30 of one's own; what was saved is told."""
    shared = [(5 * n) % 13 for n in range(400)]
    async with fake_runtime(policy=Policy(snapshot_every=64)) as rt:
        first, second = await rt.session(), await rt.session()
        await first.append([*shared, *[1] * 30])
        used = await second.append([*shared, *[2] * 30])
        assert used.prefilled <= 400 - 384 + 30
        assert used.reused == 384 == second.status(0.0).reused_tokens == rt.status().work.reused_tokens
        assert await is_at(second, [*shared, *[2] * 30])


async def test_a_budget_that_leaves_nothing_to_keep_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """B39: reuse that can't be had is no silent 0 %."""
    for limit, told in ((4 * session_bytes(LAYOUT, 64), True), (40 * session_bytes(LAYOUT, 64), False)):
        caplog.clear()
        async with fake_runtime(policy=Policy(snapshot_every=64), limit_bytes=limit):
            assert ("hardly anything can be reused" in caplog.text) is told


async def test_every_turn_of_two_sessions_reads_its_new_tokens_only() -> None:
    """B41: three turns each, interleaved, read by the engine's own count."""
    async with fake_runtime(policy=KEEPING) as rt:
        sessions = [await rt.session(), await rt.session()]
        ids: list[list[int]] = [[], []]
        for turn in range(3):
            for number, session in enumerate(sessions):
                said = [number + 1, turn, 5, turn]
                before = rt.counters.prefilled_tokens
                used = await session.append(said)
                assert rt.counters.prefilled_tokens - before == used.prefilled == len(said)
                ids[number] += [*said, *(await session.generate(GREEDY).collect()).tokens]
        for number, session in enumerate(sessions):
            assert await is_at(session, ids[number])


async def test_namespaces_share_nothing() -> None:
    async with fake_runtime(policy=KEEPING) as rt:
        for namespace, reused in (("a", 0), ("b", 0), ("a", 50)):
            session = await rt.session(namespace=namespace)
            assert (await session.append([1] * 50)).reused == reused


async def test_kept_states_give_way_before_any_session_does() -> None:
    async with fake_runtime(policy=KEEPING, limit_bytes=4_000) as rt:
        session = await rt.session()
        for number in range(40):
            await session.append([number % 16] * 5)
            budget = rt.status().budget
            assert budget.used_bytes <= budget.budget_bytes
        assert await is_at(session, [number % 16 for number in range(40) for _ in range(5)])


async def test_somebody_who_waits_for_a_computation_that_fails_does_it_himself() -> None:
    async with fake_runtime(policy=KEEPING, limits=Limits(4, 4)) as rt:
        first, second = await rt.session(), await rt.session()
        ids = [1] * 40
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as leaving:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(first.append, ids)
                    await anyio.lowlevel.checkpoint()
                    tasks.start_soon(second.append, ids)
                    await anyio.lowlevel.checkpoint()
                    leaving.cancel()
        assert first.position == 0
        assert await is_at(second, ids)


def test_thinning_is_dense_near_the_end_and_sparse_far_back() -> None:
    kept = list(range(0, 1_001, 10))
    for drop in thinned(kept, 1_000):
        kept.remove(drop)
    assert kept[-1] == 1_000
    assert len(kept) <= 22
    distances = [1_000 - one for one in kept]
    for distance in (10, 50, 100, 500, 900):
        assert any(distance / 2 <= one <= distance * 2 for one in distances)
