"""What a session is after a write to the store failed, was cancelled, or was overtaken by the end of the runtime."""

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.store import Store
from serai.runtime import SamplingParams, Session
from serai.runtime.errors import SessionClosed
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TOLD, ADDED = [1, 2, 3, 4], [5, 6, 7]


def intercept(monkeypatch: pytest.MonkeyPatch, before: Callable[[NodeRecord], None]) -> None:
    """Call `before` ahead of every node that is written."""
    record = Store.record

    def intercepted(self: Store, node: NodeRecord) -> None:
        before(node)
        record(self, node)

    monkeypatch.setattr(Store, "record", intercepted)


async def goes_on_as_if_said_once(session: Session) -> None:
    """The append that did not succeed, said again, is there once: in the tokens, the state and the store."""
    assert session.tokens().tolist() == TOLD
    assert session.position == len(TOLD)
    await session.append(ADDED)
    said = [token.id async for token in session.generate(GREEDY)]
    async with fake_runtime() as other, await other.session() as alone:
        await alone.append(TOLD)
        await alone.append(ADDED)
        assert [token.id async for token in alone.generate(GREEDY)] == said
        assert session.turn == alone.turn
        assert session.tokens().tolist() == alone.tokens().tolist()


async def test_an_append_that_cannot_be_written_leaves_the_session_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    def refuse(node: NodeRecord) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    intercept(monkeypatch, refuse)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD, metadata={"kept": 1})
        full = True
        with pytest.raises(OSError, match="No space left"):
            await session.append(ADDED, metadata={"kept": 2})
        full = False
        assert session.append_metadata == {"kept": 1}
        await goes_on_as_if_said_once(session)
        point = await session.pause()
    async with fake_runtime(store=tmp_path) as rt:
        resumed = await rt.resume(point)
        assert resumed.tokens().tolist()[: len(TOLD + ADDED)] == TOLD + ADDED


@pytest.mark.parametrize("forked", [True, False])
async def test_a_task_cancelled_while_its_append_is_written_leaves_the_session_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: bool
) -> None:
    """asyncio's own cancellation, which anyio's shield does not hold off: the node is in the store when it arrives."""
    writing, go_on = threading.Event(), threading.Event()

    def wait(node: NodeRecord) -> None:
        if node.kind is NodeKind.APPEND and node.tokens.tolist() == ADDED and not go_on.is_set():
            writing.set()
            assert go_on.wait(timeout=10)

    intercept(monkeypatch, wait)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD)
        task = asyncio.ensure_future(session.append(ADDED))
        await anyio.to_thread.run_sync(writing.wait)
        fork = await session.fork() if forked else None
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        if fork is not None:
            assert fork.tokens().tolist() == TOLD + ADDED
            await fork.append([9])
            assert (await fork.pause()).position == 8
        await goes_on_as_if_said_once(session)
        session_id = session.id
    async with fake_runtime(store=tmp_path) as rt:
        resumed = await rt.resume(session_id)
        assert resumed.tokens().tolist()[: len(TOLD + ADDED)] == TOLD + ADDED
        assert resumed.position == len(TOLD + ADDED) + 6


async def test_a_session_that_is_broken_off_while_it_pauses_ends_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, go_on = threading.Event(), threading.Event()
    save = Store.save

    def wait(*given: object, **named: object) -> object:
        saving.set()
        assert go_on.wait(timeout=10)
        return save(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "save", wait)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD)
        pausing = asyncio.ensure_future(session.pause())
        await anyio.to_thread.run_sync(saving.wait)
        await session.break_off()
        go_on.set()
        assert (await pausing).position == len(TOLD)
        with pytest.raises(SessionClosed):
            await session.append(ADDED)
    async with fake_runtime(store=tmp_path) as rt:
        assert (await rt.resume(session.id)).tokens().tolist() == TOLD
