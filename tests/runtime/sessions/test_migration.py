"""`Session.migrate`: between runtimes, stores, places and processes, with kills at every step."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import anyio
import anyio.from_thread
import pytest

from serai.checkpoints import Store
from serai.checkpoints.moving.ownership import Ownership, OwnerStatus, ownership
from serai.checkpoints.moving.places import FolderPlace
from serai.runtime import SamplingParams
from serai.runtime.errors import (
    BadParameter,
    NotOwner,
    PlaceUnknown,
    SessionBusy,
    SessionClosed,
    SessionGone,
    StoreBusy,
)
from serai.runtime.sessions import migration
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=12, repetition_penalty=1.3, ignore_eos=True)


async def cancelled(scope: anyio.CancelScope) -> None:
    """Comes back once the caller within the scope has heard of it."""
    scope.cancel()
    for _ in range(5):  # turns of the loop
        await asyncio.sleep(0)


async def test_a_session_moves_to_another_store_and_goes_on_alike(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session(label="traveller")
        await session.append([1, 2, 3, 4, 5])
        await session.generate(SAMPLED).collect()
        before = await session.pause()
        session, other = await rt.resume(before), await rt.resume(before)  # which branch off alike
        expected = (await other.generate(SAMPLED).collect()).tokens
        point = await session.migrate(tmp_path / "there")
        assert point.position == session.position
        with pytest.raises(SessionClosed, match="moved"):
            await session.append([1])
        for name in (session.id, point.id):
            with pytest.raises(NotOwner, match="was moved to"):
                await rt.resume(name)
        await other.append([7])  # a branch is a session of its own, and stays
    async with fake_runtime(store=tmp_path / "there") as rt:
        session = await rt.resume(session.id)
        assert session.label == "traveller"
        assert (await session.generate(SAMPLED).collect()).tokens == expected


async def test_a_session_moves_between_running_runtimes_through_a_place(tmp_path: Path) -> None:
    place = f"file://{tmp_path}/place"
    async with fake_runtime(store=tmp_path / "here") as here, fake_runtime(store=tmp_path / "there") as there:
        session = await here.session()
        await session.append([1, 2, 3, 4, 5])
        tokens = session.tokens().tolist()
        with pytest.raises(SessionGone):
            await there.take(session.id, place)
        await session.migrate(place)
        with pytest.raises(NotOwner, match="was moved to"):
            await here.resume(session.id)
        came = await there.take(session.id, place)
        assert came.id == session.id
        assert came.tokens().tolist() == tokens
        with pytest.raises(NotOwner, match="has taken it"):
            await here.take(session.id, place)
        await came.append([6])
        await came.migrate(place)
        back = await here.take(session.id, place)
        assert back.tokens().tolist() == [*tokens, 6]


async def test_a_running_runtime_fetches_a_point_straight_from_another(tmp_path: Path) -> None:
    """Nothing lies between the two stores, and what the second has is not sent again."""
    async with fake_runtime(store=tmp_path / "here") as here, fake_runtime(store=tmp_path / "there") as there:
        session = await here.session(label="traveller")
        await session.append([number % 16 for number in range(40)])
        await session.generate(SAMPLED).collect()
        point = await session.pause()
        session = await here.resume(point)
        expected = (await session.generate(SAMPLED).collect()).tokens
        first = await there.pull(str(point), tmp_path / "here")
        assert (first.node_id, first.snapshots, first.parts_had) == (point.id, 1, 0)
        came = await there.resume(first.node_id)
        assert (came.label, there.counters.prefilled_tokens) == ("traveller", 0)
        assert (await came.generate(SAMPLED).collect()).tokens == expected
        later = await session.pause()
        second = await there.pull(session.id, tmp_path / "here")
        assert second.node_id == later.id
        assert 0 < second.parts < first.parts
        assert second.parts_had > second.parts
        with pytest.raises(StoreBusy):
            await here.push(later, tmp_path / "there")  # it is for that one to pull
        with pytest.raises(SessionGone):
            await there.pull("nothing", tmp_path / "here")
        with pytest.raises(SessionGone):
            await here.push("nothing", tmp_path / "elsewhere")
    async with fake_runtime(store=tmp_path / "here") as here:
        with Store.open(str(tmp_path / "third")):
            pass
        assert (await here.push(later, tmp_path / "third")).parts > 0
        assert (await here.push(later, tmp_path / "third")).parts == 0
    async with fake_runtime(store=tmp_path / "third") as rt:
        again = await rt.resume(later)
        assert (again.position, rt.counters.prefilled_tokens) == (64, 0)
    async with fake_runtime() as rt:
        with pytest.raises(BadParameter, match="needs a store here too"):
            await rt.pull(later.id, str(tmp_path / "here"))


async def test_what_can_not_be_moved_stays_as_it_was(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt, fake_runtime(store=tmp_path / "there"):
        session = await rt.session()
        await session.append([1, 2, 3])
        with pytest.raises(StoreBusy):
            await session.migrate(tmp_path / "there")  # a running runtime has it open
        with pytest.raises(PlaceUnknown, match="a server takes no sessions in"):
            await session.migrate("http://127.0.0.1:8000")
        with pytest.raises(PlaceUnknown, match="it is the folder of a store"):
            await rt.take(session.id, str(tmp_path / "there"))
        with session.use("test"), pytest.raises(SessionBusy):
            await session.migrate(tmp_path / "elsewhere")
        stream = session.generate(SAMPLED)
        await anext(stream)
        await stream.aclose()
        await session.append([4])
        await session.migrate(tmp_path / "elsewhere")  # between two tokens of what was being generated
    async with fake_runtime(store=tmp_path / "elsewhere") as rt:
        assert (await rt.resume(session.id)).position == 5
    async with fake_runtime() as rt:
        session = await rt.session()
        with pytest.raises(BadParameter, match="needs a store here too"):
            await session.migrate(tmp_path / "elsewhere")


async def test_a_person_takes_back_what_will_not_be_used_elsewhere(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        await session.migrate(f"file://{tmp_path}/place")
        with pytest.raises(NotOwner, match="--take-back"):
            await rt.resume(session.id)
        again = await rt.resume(session.id, take_back=True)
        assert again.id == session.id
        await again.append([4])


async def test_a_cancelled_move_is_done_or_was_never_begun(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        with anyio.move_on_after(0) as scope:
            await session.migrate(tmp_path / "there")
        assert scope.cancelled_caught
        if session.is_open:
            await session.migrate(tmp_path / "there")
    async with fake_runtime(store=tmp_path / "there") as rt:
        assert (await rt.resume(session.id)).position == 3


async def test_a_cancelled_taking_comes_back_after_the_object_that_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, get = f"file://{tmp_path}/place", FolderPlace.get
    fetched: list[str] = []
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([number % 16 for number in range(40)])
        await session.migrate(place)
    async with fake_runtime(store=tmp_path / "there") as rt:
        with anyio.CancelScope() as scope:

            def counted(self: FolderPlace, name: str) -> bytes:
                if name.startswith("parts/"):
                    fetched.append(name)
                    anyio.from_thread.run(cancelled, scope)
                return get(self, name)

            monkeypatch.setattr(FolderPlace, "get", counted)
            await rt.take(session.id, place)
        monkeypatch.undo()
        assert scope.cancelled_caught
        assert len(fetched) == 1
        assert (await rt.take(session.id, place)).position == 40


async def test_a_task_that_is_cancelled_once_all_is_settled_leaves_no_session_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By asyncio's own cancellation, which no shield keeps out, while it is asked who owns the session now."""
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        task = asyncio.ensure_future(session.migrate(tmp_path / "there"))

        def meanwhile(store: Store, session_id: str) -> Ownership:
            anyio.from_thread.run_sync(task.cancel)
            return ownership(store, session_id)

        monkeypatch.setattr(migration, "ownership", meanwhile)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert rt.store is not None
        assert ownership(rt.store, session.id).status is OwnerStatus.MOVED
        assert not session.is_open
        with pytest.raises(SessionClosed, match="moved"):
            await session.append([4])


STEPS = ("receive", "begin_move", "accept", "finish_move")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", ["store", "place"])
async def test_killed_at_any_step_one_of_two_processes_goes_on(tmp_path: Path, kind: str, step: str, when: str) -> None:
    """A process that migrates is killed; another waits for the session, and a third is the first one restarted."""
    target = str(tmp_path / "there") if kind == "store" else f"file://{tmp_path}/place"
    command = [
        sys.executable,
        "-m",
        "tests.runtime.sessions.migrate_and_die",
        str(tmp_path / "here"),
        target,
        step,
        when,
    ]
    died = await anyio.run_process(command, check=False)
    assert died.returncode == -signal.SIGKILL
    said = json.loads(died.stdout)
    session_id, tokens, expected = said["session"], said["tokens"], said["expected"]

    went_on = []
    async with fake_runtime(store=tmp_path / "there") as there:
        if kind == "place":
            try:
                session = await there.take(session_id, target)
            except (SessionGone, NotOwner):
                pass
            else:
                went_on.append(list((await session.generate(SAMPLED).collect()).tokens))
    if kind == "store":
        with Store.open(str(tmp_path / "there")) as opened:
            arrived = ownership(opened, session_id).epoch == 1
        if arrived:
            async with fake_runtime(store=tmp_path / "there") as there:
                session = await there.resume(session_id)
                went_on.append(list((await session.generate(SAMPLED).collect()).tokens))
    async with fake_runtime(store=tmp_path / "here") as here:
        try:
            session = await here.resume(session_id)
        except NotOwner as error:
            assert "was moved to" in str(error)  # noqa: PT017 - the other process has it then
        else:
            assert session.tokens().tolist() == tokens
            went_on.append(list((await session.generate(SAMPLED).collect()).tokens))
    assert went_on == [expected]
    with Store.open(str(tmp_path / "here")) as opened:
        assert ownership(opened, session_id).status in (OwnerStatus.OWNED, OwnerStatus.MOVED)


@pytest.mark.parametrize("after", range(12))
async def test_a_cancelled_copy_comes_back_soon_and_is_there_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Cancelled at each of its objects; the next call sends what is missing."""
    place, put = f"file://{tmp_path}/place", FolderPlace.put
    written: list[str] = []
    async with fake_runtime(store=tmp_path / "here") as rt:
        session = await rt.session()
        await session.append([number % 16 for number in range(40)])
        point = await session.pause()
        with anyio.CancelScope() as scope:

            def counted(self: FolderPlace, name: str, data: bytes) -> None:
                if len(written) == after:
                    anyio.from_thread.run(cancelled, scope)
                put(self, name, data)
                written.append(name)

            monkeypatch.setattr(FolderPlace, "put", counted)
            await rt.push(point, place)
        monkeypatch.undo()
        whole = any(name.startswith("points/") for name in written)
        assert scope.cancelled_caught == (len(written) == after + 1)
        assert whole == (not scope.cancelled_caught or written[-1].startswith("points/"))
        async with fake_runtime(store=tmp_path / "there") as there:
            if not whole:
                with pytest.raises(SessionGone):
                    await there.pull(point.id, place)
            sent = await rt.push(point, place)
            assert sent.parts_had == sum(name.startswith("parts/") for name in written)
            await there.pull(point.id, place)
            assert (await there.resume(point)).position == 40
