"""Freeing disk while sessions live."""

import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.gc import GcPolicy
from serai.runtime.errors import BadParameter, SessionGone
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import hash_of, logits_of

pytestmark = pytest.mark.anyio

EVERYTHING = GcPolicy(snapshots_per_session=0, snapshot_idle_s=0, max_bytes=0, session_idle_s=0)


async def test_what_live_sessions_and_tags_stand_on_is_kept(tmp_path: Path) -> None:
    """The hardest policy there is: live, moved out, forked from and tagged sessions lose nothing they need."""
    async with fake_runtime(store=tmp_path) as rt:
        assert rt.store is not None
        names = {}
        for number, label in enumerate(["moved out", "forked from", "tagged", "paused"]):
            session = await rt.session(label=label)
            await session.append([number, 2, 3])
            names[label] = session
        assert await names["moved out"].demote()
        fork = await names["forked from"].fork()
        await names["forked from"].pause()
        tagged, paused = await names["tagged"].pause(), await names["paused"].pause()
        rt.store.tag("kept", tagged.id)
        await rt.collect(EVERYTHING)
        for session, ids in ((names["moved out"], [0, 2, 3]), (fork, [1, 2, 3]), (await rt.resume("kept"), [2, 2, 3])):
            before = rt.counters.prefilled_tokens
            assert (await session.logits()).tobytes() == logits_of(hash_of(ids)).tobytes()
            assert rt.counters.prefilled_tokens == before
            await session.append([7])
        with pytest.raises(SessionGone):
            await rt.resume(paused)
        assert [one.label for one in rt.store.sessions()].count("paused") == 0


@pytest.mark.parametrize("by", ["point", "session", "tag"])
@pytest.mark.parametrize("doing", ["load", "nearest_snapshot"], ids=["loading", "looking"])
async def test_what_a_resume_under_way_will_be_is_kept(
    doing: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    act = getattr(Store, doing)

    def wait(self: Store, *given: object, **named: object) -> object:
        reached.set()
        assert go_on.wait(timeout=10)
        return act(self, *given, **named)

    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
        assert rt.store is not None
        if by == "tag":
            rt.store.tag("here", point.id)
        name = {"point": point.id, "session": point.session_id, "tag": "here"}[by]
        monkeypatch.setattr(Store, doing, wait)
        async with anyio.create_task_group() as tasks:

            async def resume() -> None:
                again = await rt.resume(name)
                assert (await again.logits()).tobytes() == logits_of(hash_of([1, 2, 3])).tobytes()
                await again.append([4])

            tasks.start_soon(resume)
            await anyio.to_thread.run_sync(reached.wait)
            if doing == "load" and by == "tag":
                rt.store.untag("here")  # it knows by now what that stood for
            report = await rt.collect(EVERYTHING)
            assert (report.snapshots, report.sessions) == (0, 0)
            go_on.set()
        assert rt.counters.prefilled_tokens == 4


async def test_without_a_store_there_is_nothing_to_collect() -> None:
    async with fake_runtime() as rt:
        with pytest.raises(BadParameter, match="no store"):
            await rt.collect(GcPolicy())
