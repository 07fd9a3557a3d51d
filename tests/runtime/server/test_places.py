"""Places that clients go on from: each is brought back once and freed once, whoever comes and goes meanwhile."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from serai.checkpoints.names import new_id
from serai.checkpoints.store import Store
from serai.runtime import Runtime, Session
from serai.runtime.chat import Cursor
from serai.runtime.errors import SeraiError
from serai.runtime.server.ask import Setting
from serai.runtime.server.places import KEPT_KEY, Ending, Place
from serai.runtime.server.sessions import Sessions
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import ScriptedModel

pytestmark = pytest.mark.anyio


async def test_a_waiting_client_who_leaves_does_not_let_a_place_be_resumed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1] * 20)
        point = await session.pause()
        monkeypatch.setattr(rt, "chat_format", lambda: None)  # nothing is rendered here
        sessions = Sessions(rt, keep_hot=8, unstored_ttl_s=60)
        place = Place(point.id, "", 20, Cursor(), Setting(), chain="", previous=None)
        sessions.catalogue.add(place.known())
        resume, resumed = rt.resume, 0

        async def slowly(*given: Any, **named: Any) -> Session:
            nonlocal resumed
            await anyio.sleep(0.1)
            resumed += 1
            return await resume(*given, **named)

        monkeypatch.setattr(rt, "resume", slowly)

        async def go_on() -> None:
            fork, _ = await sessions.go_on(place)
            await fork.close()

        async with anyio.create_task_group() as tasks:
            leaves = anyio.CancelScope()

            async def come_and_go() -> None:
                with leaves:
                    await go_on()

            tasks.start_soon(come_and_go)
            await anyio.sleep(0.02)
            tasks.start_soon(go_on)
            await anyio.sleep(0.02)
            leaves.cancel()
            await anyio.sleep(0.02)
            tasks.start_soon(go_on)
        assert (resumed, sessions.parked) == (1, 1)
        await sessions.close()
        assert rt.status().sessions == ()


def sessions_of(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr(rt, "chat_format", lambda: None)  # nothing is rendered here
    return Sessions(rt, keep_hot=8, unstored_ttl_s=60)


def place_at(place_id: str) -> Callable[[int], Place]:
    return lambda position: Place(place_id, "", position, Cursor(), Setting(), chain="", previous=None)


def ids(*given: int) -> NDArray[np.int32]:
    return np.array(given, np.int32)


async def test_a_place_that_is_forgotten_while_its_ending_is_read_leaves_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(2)
    async with fake_runtime(ScriptedModel(before_layer=gate), store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        ending = Ending(ids(2, 3), ids(4, 5))
        place = await sessions.keep(place_at(new_id()), session, ending=ending, store=True)
        async with anyio.create_task_group() as tasks:

            async def go_on() -> None:
                fork, _ = await sessions.go_on(place)
                await fork.close()

            tasks.start_soon(go_on)
            await gate.reached.wait()
            await sessions.forget(place.id)
            gate.open()
        assert sessions.parked == 0
        assert rt.status().sessions == ()


async def test_a_client_who_leaves_as_a_deleted_place_comes_back_leaves_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        place = await sessions.keep(place_at(new_id()), session, ending=None, store=True, parked=False)
        resume = rt.resume
        with anyio.CancelScope() as client:

            async def meanwhile(*given: Any, **named: Any) -> Session:
                resumed = await resume(*given, **named)
                await sessions.forget(place.id)
                client.cancel()
                return resumed

            monkeypatch.setattr(rt, "resume", meanwhile)
            await sessions.go_on(place)
        assert client.cancelled_caught
        assert (sessions.parked, rt.status().sessions) == (0, ())


async def test_a_place_that_could_not_be_deleted_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        place = await sessions.keep(place_at(new_id()), session, ending=None, store=True)
        assert [sessions.catalogue.next_fork(place.id) for _ in range(2)] == [1, 2]

        def fails(self: Store, *given: Any) -> None:
            raise SeraiError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(Store, "delete", fails)
            with pytest.raises(SeraiError, match="disk is full"):
                await sessions.forget(place.id)
        assert (await sessions.place(place.id, "")).id == place.id
        assert sessions.catalogue.next_fork(place.id) == 3, "not that of a fork made before"
        await sessions.forget(place.id)
        with pytest.raises(Exception, match=place.id):
            await sessions.place(place.id, "")


async def test_a_place_of_before_forks_had_numbers_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        before = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        metadata = Place.metadata

        def older(self: Place) -> dict[str, Any]:
            kept = metadata(self)
            del kept[KEPT_KEY]["fork"]
            return kept

        with monkeypatch.context() as then:
            then.setattr(Place, "metadata", older)
            place = await before.keep(place_at(new_id()), session, ending=None, store=True)
        await before.close()
        sessions = sessions_of(rt, monkeypatch)
        await sessions.load()
        assert await sessions.place(place.id, "") == place
        assert sessions.catalogue.next_fork(place.id) == 1


async def test_a_session_that_could_not_be_deleted_is_deleted_later_and_nobody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        await session.flush()
        assert rt.store is not None
        assert len(rt.store.sessions()) == 1

        def fails(self: Store, *given: Any) -> None:
            raise SeraiError("the disk is full")

        with monkeypatch.context() as broken:
            broken.setattr(Store, "delete_session", fails)
            await sessions.end(session, erase=True)
        assert len(rt.store.sessions()) == 1
        await sessions.tidy(now_s=0)
        assert not rt.store.sessions()


async def test_whoever_goes_on_after_an_orderly_end_reads_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        places = []
        for number in range(3):
            session = await rt.session()
            await session.append([number] * 20)
            places.append(await sessions.keep(place_at(new_id()), session, ending=None, store=True))
        assert [await rt.replay_tokens(place.id) for place in places] == [20] * 3
        await sessions.close()
        assert [await rt.replay_tokens(place.id) for place in places] == [0] * 3
        assert rt.status().sessions == ()


@pytest.mark.parametrize("unusable", ["another build's", "damaged"])
async def test_what_a_state_that_is_not_used_leaves_to_be_read_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unusable: str
) -> None:
    """A client is told that as much was known as didn't have to be computed again."""
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        session = await rt.session()
        await session.append([1] * 20)
        await session.pause()
        session = await rt.resume(session.id)
        await session.append([2] * 5)
        place = await sessions.keep(place_at(new_id()), session, ending=None, store=True)
        await sessions.close()
    with Store.open(str(tmp_path)) as store:
        if unusable == "damaged":
            logits = store._manifest(place.id).logits
            assert logits is not None
            part = tmp_path / "parts" / logits[:2] / logits[2:]
            part.write_bytes(part.read_bytes()[:-1] + b"?")
        else:
            other = replace(FINGERPRINT, build="another")
            store.save(place.id, store.load(place.id), other, reason="pause")
    async with fake_runtime(store=tmp_path) as rt:
        sessions = sessions_of(rt, monkeypatch)
        await sessions.load()
        session, read = await sessions.go_on(place)
        assert read == rt.counters.prefilled_tokens == 5
        await session.close()
        _, read = await sessions.go_on(place)
        assert read == 0, "it is parked now"
        await sessions.close()
