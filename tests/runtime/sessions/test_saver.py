"""Snapshots in the background: few, however fast a session goes on, and never instead of its token ids."""

import shutil
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from serai.checkpoints.store import Store
from serai.runtime.errors import StoreFull
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import hash_of, logits_of

pytestmark = pytest.mark.anyio

EVERY_TURN = Policy(save_after_tokens=0)
TURNS = 40
INTERVAL_S = 5.0


async def test_a_session_in_a_hurry_is_written_once_in_a_while_and_its_last_state_in_the_end(tmp_path: Path) -> None:
    """Forty turns at once: the first state, which others may share, and then the newest of those that were due."""
    async with fake_runtime(store=tmp_path / "store", policy=EVERY_TURN) as rt:
        store, saver = rt.store, rt._services.saver
        assert store is not None
        session, began_s = await rt.session(), anyio.current_time()
        for turn in range(TURNS):
            await session.append([turn % 16])
            assert store.tokens(session.head).size == turn + 1, "the token ids are durable when an append returns"
            assert saver.waiting <= 2, "one state waits, besides the first, however many were offered"
        # The first, the one that was offered while that was written, the newest; more only as time went by.
        allowed = 3 + int((anyio.current_time() - began_s) / INTERVAL_S)
        # What a crash would leave now is behind with its states, and with nothing else.
        await anyio.to_thread.run_sync(shutil.copytree, tmp_path / "store", tmp_path / "left")
        await rt.settle()
        assert 2 <= saver.saved <= allowed
        assert store.has_snapshot(session.head), "the newest state was written in the end"
    async with fake_runtime(store=tmp_path / "left") as rt:
        again = await rt.resume(session.id)
        ids = [turn % 16 for turn in range(TURNS)]
        assert again.tokens().tolist() == ids
        assert (await again.logits()).tobytes() == logits_of(hash_of(ids)).tobytes()
        assert rt.counters.prefilled_tokens > 0


async def test_sessions_wait_for_each_other_and_not_for_one_that_was_just_written(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=EVERY_TURN) as rt:
        sessions = [await rt.session() for _ in range(3)]
        for turn in range(4):
            for session in sessions:
                await session.append([turn, sessions.index(session)])
        await rt.settle()
        assert rt.store is not None
        assert [rt.store.has_snapshot(session.head) for session in sessions] == [True] * 3


async def test_a_snapshot_that_cannot_be_written_is_counted_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B55, B61: a save that fails is seen, and the session goes on."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with fake_runtime(store=tmp_path, policy=EVERY_TURN) as rt:
        session = await rt.session()
        monkeypatch.setattr(Store, "_commit", full)
        await session.append([1, 2, 3])
        await rt.settle()
        assert (rt._services.saver.saved, rt._services.saver.failed) == (0, 1)
        with pytest.raises(StoreFull):
            await session.pause()
        assert (rt.status().work.saves, rt.status().work.failed_saves) == (0, 2)
        monkeypatch.undo()
        await session.append([4])
        await rt.settle()
        assert rt._services.saver.saved == 1
        assert (rt.status().work.saves, rt.status().work.failed_saves) == (1, 2)
        rt.check()


async def test_nothing_is_kept_of_sessions_whose_states_were_written_long_ago(tmp_path: Path) -> None:
    """Also not of those that had ended by then, as every request's on a server has."""
    async with fake_runtime(store=tmp_path, policy=EVERY_TURN) as rt:
        saver = rt._services.saver
        saver._min_interval_s = 0.0
        for number in range(20):
            session = await rt.session()
            await session.append([number % 16, 1])
            await session.close()
            await rt.settle()
        assert saver.saved >= 20
        assert len(saver._written_s) <= 1


async def test_what_is_offered_while_it_settles_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A busy runtime offers a state for each one that was written; what was pending is written all the same."""
    async with fake_runtime(store=tmp_path, policy=EVERY_TURN) as rt:
        store, saver = rt.store, rt._services.saver
        assert store is not None
        session, busy = await rt.session(), await rt.session()
        await busy.append([1])
        await rt.settle()
        node, state = busy.record.nodes()[-1], await busy.hot()

        def offer_again() -> None:
            saver.offer(node, state, b"", first=True)

        saver.on_written = offer_again
        try:
            for token in range(3):
                await session.append([token])  # the last two replace each other, or wait for the interval
            with anyio.fail_after(20):
                await rt.settle()
            assert store.has_snapshot(session.head)
        finally:
            saver.on_written = lambda: None
        await rt.settle()
        rt.check()


async def test_whoever_settles_a_runtime_that_closes_is_let_go(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        async with fake_runtime(store=tmp_path, policy=EVERY_TURN) as rt:
            session = await rt.session()
            for token in range(3):
                await session.append([token])
            tasks.start_soon(rt.settle)
        with anyio.fail_after(30):
            await rt.settle()
        tasks.cancel_scope.deadline = anyio.current_time() + 30
    assert not tasks.cancel_scope.cancelled_caught
