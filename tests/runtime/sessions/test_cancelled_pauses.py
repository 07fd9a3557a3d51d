"""Pauses whose callers were cancelled while threads were writing for them."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from serai.checkpoints.reports import SaveReport
from serai.checkpoints.store import Store
from serai.runtime.errors import SessionGone
from serai.runtime.sessions.session import Session
from serai.runtime.state import session_bytes
from tests.checkpoints.disks import WaitingDisk
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import GREEDY, LAYOUT, greedy_by_hand

pytestmark = pytest.mark.anyio

COUNT = 100
THREADS = 40
"""Worker threads that anyio has unless told otherwise: so many pauses write, the others wait for a thread."""


@pytest.mark.parametrize("how", ["scope", "task"])
async def test_a_hundred_pauses_cancelled_while_they_write_leave_nothing_behind(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B104: sessions deleted meanwhile stay deleted, memory is given back once, and the threads serve on."""
    disk = WaitingDisk()
    async with fake_runtime(store=tmp_path / "s", disk=disk) as rt:
        store = rt.store
        assert store is not None
        sessions = [await rt.session() for _ in range(COUNT)]
        for number, session in enumerate(sessions):
            await session.append([1 + number % 7, number % 5])
        one_bytes = session_bytes(LAYOUT, 2)
        save, saving = store.save, 0

        def counted(*arguments: Any, **named: Any) -> SaveReport:
            nonlocal saving
            saving += 1
            return save(*arguments, **named)

        monkeypatch.setattr(store, "save", counted)
        disk.armed = True
        scopes: list[anyio.CancelScope] = []

        async def pause(session: Session) -> None:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await session.pause()

        pauses = [asyncio.ensure_future(pause(session)) for session in sessions]
        with anyio.fail_after(30):
            while saving < THREADS:
                await anyio.lowlevel.checkpoint()
            if how == "task":
                for task in pauses:
                    task.cancel()
            else:
                for scope in scopes:
                    scope.cancel()
            own_thread = anyio.CapacityLimiter(1)  # the pauses hold all the others
            for session in sessions[::2]:
                await anyio.to_thread.run_sync(store.delete_session, session.id, limiter=own_thread)
            ended = sum(one.done() for one in pauses)
            assert ended <= COUNT - THREADS, "threads read states, which must not be freed under them"
            disk.go.set()
            ends = await asyncio.gather(*pauses, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError | SessionGone | None) for one in ends)
        still_open = [session for session in sessions if session.is_open]
        assert set(sessions[::2]) <= set(still_open), "who can't be paused stays"
        assert rt.status().budget.live_bytes == len(still_open) * one_bytes
        rt.check()
        for session in sessions[::2]:
            with pytest.raises(SessionGone):
                store.session_head(session.id)
            session.abandon()
        rest = dict(zip(range(1, COUNT, 2), sessions[1::2], strict=True))
        with anyio.fail_after(30):
            for number, session in rest.items():
                assert session.doing is None
                if session.is_open:
                    await session.pause()
                again = await rt.resume(session.id)
                assert list((await again.generate(GREEDY).collect()).tokens) == greedy_by_hand(
                    [1 + number % 7, number % 5], 8
                )
                await again.close()
        assert rt.status().budget.live_bytes == 0
        assert store.sizes().snapshots == len(rest)


async def test_a_runtime_ends_though_a_pause_is_being_cancelled(tmp_path: Path) -> None:
    """B104: the end waits for the thread, and for no longer."""
    disk = WaitingDisk()
    with anyio.fail_after(30):
        async with fake_runtime(store=tmp_path / "s", disk=disk) as rt, anyio.create_task_group() as tasks:
            session = await rt.session()
            await session.append([1, 2, 3])
            disk.armed = True
            tasks.start_soon(session.pause)
            while not disk.reached.is_set():
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
            disk.go.set()
    with Store.open(str(tmp_path / "s")) as store:
        assert store.session_head(session.id)
