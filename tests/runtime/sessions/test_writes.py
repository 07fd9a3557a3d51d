"""What a session is after a write to the store failed, was cancelled, or was overtaken by the end of the runtime."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from serai.checkpoints.errors import StoreFull
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.store import Store
from serai.runtime import SamplingParams, Session
from serai.runtime.errors import EndsUnwritten, SessionClosed, ShuttingDown
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.state import page_view
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import FIXED, LAYOUT, LOGITS, PAGE, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

GREEDY = SamplingParams(temperature=0, max_tokens=6)
TOLD, ADDED = [1, 2, 3, 4], [5, 6, 7]


def intercept(monkeypatch: pytest.MonkeyPatch, before: Callable[[NodeRecord], None]) -> None:
    """Call `before` ahead of every node that is written."""
    record = Store.record

    def intercepted(self: Store, *nodes: NodeRecord) -> None:
        for node in nodes:
            before(node)
        record(self, *nodes)

    monkeypatch.setattr(Store, "record", intercepted)


async def settle() -> None:
    """Let the other tasks run until they wait for something that the test holds up."""
    for _ in range(50):
        await anyio.sleep(0.001)


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


@pytest.mark.parametrize("meanwhile", ["rewind", "generate"])
async def test_a_session_used_while_it_waits_to_be_moved_out_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def wait(node: NodeRecord) -> None:
        if node.tokens.tolist() == [9]:
            writing.set()
            assert go_on.wait(timeout=10)

    intercept(monkeypatch, wait)
    async with fake_runtime(store=tmp_path, policy=Policy(reuse=True, save_after_tokens=10**9)) as rt:
        session, other = await rt.session(), await rt.session()
        await session.append(TOLD)
        await session.append(ADDED)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.append, [9])
            await anyio.to_thread.run_sync(writing.wait)
            demoted: list[bool] = []

            async def demote() -> None:
                demoted.append(await session.demote())

            async def use() -> None:
                if meanwhile == "rewind":
                    await session.rewind(position=len(TOLD))
                else:
                    await session.generate(GREEDY).collect()

            session.record.started(session.timeline, NodeKind.PAUSE)  # so that moving out has something to wait for
            tasks.start_soon(demote)
            await settle()
            tasks.start_soon(use)
            await settle()
            go_on.set()
        assert demoted == [False]
        assert session.position == (len(TOLD) if meanwhile == "rewind" else len(TOLD + ADDED) + 6)
        rt.check()


async def leave_block(session: Session) -> None:
    async with session:
        pass


async def test_a_full_disk_ends_the_block_of_a_session_and_opens_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = False

    def refuse(node: NodeRecord) -> None:
        if full:
            raise StoreFull(path="here", doing="writing")

    intercept(monkeypatch, refuse)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD)
        session.record.started(session.timeline, NodeKind.PAUSE)
        full = True
        with pytest.raises(StoreFull):
            await leave_block(session)
        assert not session.is_open
        with pytest.raises(StoreFull):
            await rt.session()
        assert rt.status().sessions == ()
        full = False


@pytest.mark.parametrize("broken", [["first"], ["first", "third"]], ids=len)
async def test_closing_writes_every_session_that_can_be_and_tells_of_all_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: list[str]
) -> None:
    refused: list[str] = []

    def refuse(node: NodeRecord) -> None:
        if node.label in broken and node.kind is NodeKind.PAUSE:
            refused.append(node.session_id)
            raise StoreFull(path="here", doing="writing")

    intercept(monkeypatch, refuse)
    sessions: list[Session] = []

    async def open_and_leave() -> None:
        async with fake_runtime(store=tmp_path) as rt:
            for label in ("first", "second", "third"):
                session = await rt.session(label=label)
                await session.append(TOLD)
                session.record.started(session.timeline, NodeKind.PAUSE)
                sessions.append(session)

    with pytest.raises(StoreFull if len(broken) == 1 else EndsUnwritten) as raised:
        await open_and_leave()
    assert refused == [session.id for session in sessions if session.label in broken]
    if isinstance(raised.value, EndsUnwritten):
        assert list(raised.value.failures) == refused
        assert all(name in str(raised.value) for name in refused)
    assert not any(session.is_open for session in sessions)
    with Store.open(str(tmp_path)) as store:
        ends = {session.label: store.node(store.session_head(session.id)).kind for session in sessions}
        assert ends == {name: NodeKind.APPEND if name in broken else NodeKind.PAUSE for name in ends}


async def test_a_rewind_that_cannot_be_written_leaves_the_session_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def refuse(node: NodeRecord) -> None:
        if full and node.kind is NodeKind.REWIND:
            raise StoreFull(path="here", doing="writing")

    intercept(monkeypatch, refuse)
    async with fake_runtime(store=tmp_path, policy=Policy()) as rt:
        session = await rt.session()
        await session.append(TOLD, metadata={"kept": 1})
        said = await session.generate(GREEDY).collect()
        await session.append(ADDED, metadata={"kept": 2})
        before = session.tokens().tolist()
        with pytest.raises(StoreFull):
            await session.rewind(position=len(TOLD) + 2)
        assert session.tokens().tolist() == before
        assert (session.turn, dict(session.append_metadata)) == (1, {"kept": 2})
        logits = await session.logits()
        assert logits.tobytes() == logits_of(hash_of(before)).tobytes()
        await session.append([9])
        point = await session.pause()
        assert rt.store is not None
        assert rt.store.tokens(point.id).tolist() == [*before, 9]
        full = False
        again = await rt.resume(point)
        await again.rewind(turn=0)
        assert again.tokens().tolist() == [*TOLD, *said.tokens]


async def test_a_rewind_cancelled_while_it_is_written_has_happened_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of the rewind is in the store when asyncio's cancellation arrives: both have gone back."""
    writing, go_on = threading.Event(), threading.Event()

    def wait(node: NodeRecord) -> None:
        if node.kind is NodeKind.REWIND:
            writing.set()
            assert go_on.wait(timeout=10)

    intercept(monkeypatch, wait)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD)
        task = asyncio.ensure_future(session.rewind(position=1))
        await anyio.to_thread.run_sync(writing.wait)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.tokens().tolist() == TOLD[:1]
        assert (await session.logits()).tobytes() == logits_of(hash_of(TOLD[:1])).tobytes()
        assert rt.store is not None
        assert rt.store.tokens(rt.store.session_head(session.id)).tolist() == TOLD[:1]


@pytest.mark.parametrize("call", ["pause", "migrate", "rewind"])
async def test_a_fork_taken_while_a_session_is_written_has_a_branch_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The next fork of whoever goes on there is the second one, not the first again."""
    writing, go_on = threading.Event(), threading.Event()
    held = Store.record if call == "rewind" else Store.save

    def wait(self: Store, *given: object, **named: object) -> object:
        if call != "rewind" or given[0].kind is NodeKind.REWIND:  # type: ignore[attr-defined]
            writing.set()
            assert go_on.wait(timeout=10)
        return held(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, held.__name__, wait)
    elsewhere = tmp_path / "elsewhere"
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append(TOLD)
        acts: dict[str, Coroutine[Any, Any, object]] = {
            "pause": session.pause(),
            "migrate": session.migrate(elsewhere),
            "rewind": session.rewind(position=2),
        }
        act = asyncio.ensure_future(acts.pop(call))
        for other in acts.values():
            other.close()
        await anyio.to_thread.run_sync(writing.wait)
        forks = [await session.fork(), await session.fork()]
        go_on.set()
        await act
        branches = {fork.timeline.branch for fork in forks}
        if call != "rewind":
            assert session.timeline.forks == 2
        if call == "pause":
            session = await rt.resume(session.id)
            assert rt.counters.prefilled_tokens == len(TOLD), "the state is there without reading anything again"
        if call != "migrate":
            branches.add((await session.fork()).timeline.branch)
    if call == "migrate":
        async with fake_runtime(store=elsewhere) as rt:
            branches.add((await (await rt.resume(session.id)).fork()).timeline.branch)
    assert len(branches) == 3


async def test_a_session_that_ends_while_it_waits_for_memory_writes_into_nobody_elses(tmp_path: Path) -> None:
    model = ScriptedModel()
    limit = (FIXED * 2 + LOGITS * 2 + 12 * PAGE) + (2 * FIXED + LOGITS + 10 * PAGE)
    async with fake_runtime(model, store=tmp_path, limit_bytes=limit, limits=Limits(64, 64)) as rt:
        first, busy, stored = [await rt.session() for _ in range(3)]
        await stored.append([5] * 43)
        point = await stored.pause()
        await first.append([1] * 41)
        generation = first.generate(SamplingParams(temperature=0, max_tokens=8))
        await anext(generation)
        services = rt._services
        gate = Gate(1)
        model.before_layer = gate
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(busy.append, [2] * 40)
            await gate.reached.wait()
            free_bytes = services.admission.free_bytes
            assert free_bytes is not None
            others = services.admission._reserve(free_bytes - PAGE, services.pool.accounts.of(""))

            async def read_on() -> None:
                with suppress(SessionClosed, ShuttingDown):
                    await anext(generation)

            tasks.start_soon(read_on)
            await settle()
            before = first.held
            assert before is not None
            await first.break_off()
            assert before.refs == 1  # the call that waits holds it still
            others.close()
            gate.open()
            resumed = await rt.resume(point)
        held = resumed.held
        assert held is not None
        rows = np.concatenate([page_view(LAYOUT, page).reshape(-1) for page in held.table.pages])[: held.position]
        assert (rows == 5).all()
        rt.check()
