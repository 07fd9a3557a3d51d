"""Actions over a real runtime with a scripted model: what the server's endpoint and the embedded monitor do."""

from pathlib import Path

import anyio
import pytest

from serai.checkpoints.errors import NameInvalid
from serai.checkpoints.store import Store
from serai.runtime.errors import BadParameter, SessionGone
from serai.runtime.monitor.acting import act, export
from serai.runtime.monitor.in_process import InProcess
from serai.runtime.monitor.source import About, Action, ActionKind, ActionRefused, Outcome
from serai.runtime.runtime import Runtime
from serai.runtime.sessions.events import EventKind, SessionEvent
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.monitor.scripted import names_in

pytestmark = pytest.mark.anyio


def store_of(runtime: Runtime) -> Store:
    kept = runtime.store
    assert kept is not None
    return kept


async def test_a_fork_and_a_label_are_live_at_once() -> None:
    async with fake_runtime() as runtime:
        session = await runtime.session(label="reader")
        await session.append([1, 2, 3])
        outcome = await act(runtime, Action(ActionKind.FORK, session.id))
        assert outcome.message == "forked at position 3"
        fork = runtime.find(outcome.session_id or "")
        assert fork is not None
        assert (fork.parent, fork.label, fork.position) == (session.id, "reader", 3)
        earlier = await act(runtime, Action(ActionKind.FORK, session.id, position=2))
        assert earlier.message == "forked at position 2"
        await act(runtime, Action(ActionKind.DELETE, earlier.session_id or ""))
        await act(runtime, Action(ActionKind.LABEL, fork.id, "[b]"))
        assert fork.label == "[b]"
        for kind in (ActionKind.FORK, ActionKind.LABEL):
            with pytest.raises(NameInvalid):
                await act(runtime, Action(kind, fork.id, "two\nlines"))
        assert fork.label == "[b]"
        assert len(runtime.status().sessions) == 2


async def test_a_paused_session_is_resumed_by_its_point(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as runtime:
        session = await runtime.session()
        await session.append([1, 2, 3])
        paused = await act(runtime, Action(ActionKind.PAUSE, session.id))
        assert runtime.find(session.id) is None
        assert paused.session_id is not None
        resumed = await act(runtime, Action(ActionKind.RESUME, paused.session_id))
        assert resumed == Outcome("resumed at position 3", session.id)


async def test_resuming_a_cold_session_brings_it_back_into_memory(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as runtime:
        session = await runtime.session()
        await session.append([1, 2, 3])
        assert await session.demote()
        outcome = await act(runtime, Action(ActionKind.RESUME, session.id))
        assert outcome.message == "in memory at position 3"
        assert session.tier.value == "hot"


async def test_tags_exports_and_erasing_go_to_the_store(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store") as runtime:
        store = store_of(runtime)
        session = await runtime.session()
        await session.append([1, 2, 3])
        tagged = await act(runtime, Action(ActionKind.TAG, session.id, "v1"), store=store)
        assert store.resolve("v1") == tagged.session_id
        file = tmp_path / "reader.serai"
        written = await export(runtime, session.id, file, store=store)
        assert written.message.startswith(f"{file.stat().st_size:,} bytes written")
        with pytest.raises(ActionRefused, match="can't be written: File exists"):
            await export(runtime, session.id, file, store=store)
        assert names_in(tmp_path) == ["reader.serai", "store"]
        erased = await act(runtime, Action(ActionKind.DELETE, session.id), store=store)
        assert erased.message.startswith("erased")
        assert runtime.find(session.id) is None
        with pytest.raises(SessionGone):
            store.resolve(session.id)


async def test_deleting_a_session_takes_nothing_from_a_fork_that_has_written_nothing_yet(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as runtime:
        session = await runtime.session()
        await session.append([1, 2, 3])
        fork = await session.fork()
        await act(runtime, Action(ActionKind.DELETE, session.id), store=store_of(runtime))
        await fork.append([4])
        assert fork.tokens().tolist() == [1, 2, 3, 4]
    async with fake_runtime(store=tmp_path) as runtime:
        assert (await runtime.resume(fork.id)).tokens().tolist() == [1, 2, 3, 4]


async def test_what_a_runtime_lacks_is_refused_with_the_reason() -> None:
    async with fake_runtime() as runtime:
        session = await runtime.session()
        source = InProcess(runtime)
        refusals = {
            ActionKind.TAG: "needs the store",
            ActionKind.CANCEL: "belong to its program",
            ActionKind.PAUSE: "needs a place to keep the state",
        }
        for kind, reason in refusals.items():
            with pytest.raises(ActionRefused, match=reason):
                await source.act(Action(kind, session.id, "x"))
        for kind in (ActionKind.FORK, ActionKind.PAUSE, ActionKind.LABEL):
            with pytest.raises(ActionRefused, match=f"nothing to {kind.value}"):
                await source.act(Action(kind, "nobody"))
        with pytest.raises(ActionRefused, match="needs the store"):
            await source.export(session.id, Path("x"))
        assert (await source.act(Action(ActionKind.DELETE, session.id))).message == "closed; nothing of it was stored"


async def test_cancelling_is_done_by_whoever_owns_the_calls() -> None:
    async with fake_runtime() as runtime:
        session = await runtime.session()
        asked: list[str] = []

        def cancel(session_id: str) -> bool:
            asked.append(session_id)
            return len(asked) == 1

        source = InProcess(runtime, cancel=cancel)
        await source.act(Action(ActionKind.CANCEL, session.id))
        with pytest.raises(ActionRefused, match="no call under way"):
            await source.act(Action(ActionKind.CANCEL, session.id))
        assert asked == [session.id] * 2


async def test_a_runtime_of_this_process_is_watched_without_a_server() -> None:
    async with fake_runtime() as runtime:
        source = InProcess(runtime)
        session = await runtime.session(label="a")
        assert [one.id for one in (await source.status()).sessions] == [session.id]
        assert await source.about() == About()
        events = source.events()
        seen: list[SessionEvent] = []

        async def wait() -> None:
            seen.append(await anext(events))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await session.append([1])
        await events.aclose()
        assert [(one.kind, one.session_id) for one in seen] == [(EventKind.APPENDED, session.id)]
        await source.close()
        assert session.is_open


def test_actions_are_read_strictly() -> None:
    action = Action(ActionKind.TAG, "a", "v1")
    assert Action.from_json(action.to_json()) == action
    wrong: list[object] = [None, [], {}, {"action": "explode", "session": "a"}, {"action": "fork", "session": 3}]
    for body in wrong:
        with pytest.raises(BadParameter):
            Action.from_json(body)
    earlier = Action(ActionKind.FORK, "a", position=9)
    assert Action.from_json(earlier.to_json()) == earlier
    for place in ("turn", "position"):
        for number in (-1, 1.0, True, "1"):
            with pytest.raises(BadParameter, match=f"{place} is"):
                Action.from_json({"action": "fork", "session": "a", place: number})
    with pytest.raises(BadParameter, match="value is 3"):
        Action.from_json({"action": "fork", "session": "a", "value": 3})
