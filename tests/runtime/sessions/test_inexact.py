"""A state that was stored with loss, or by another build, and all that comes of it: never taken for an exact one."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints.files.manifest import Storage, StoredAs
from serai.checkpoints.snapshot import new_snapshot
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import rebuild
from serai.runtime import Session
from serai.runtime.runtime import Runtime
from serai.runtime.services import Policy
from serai.runtime.sessions.journal import Journal
from serai.runtime.sessions.prefixes import Prefixes
from serai.runtime.state import StatePool
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.scripted import GREEDY, LAYOUT, hash_of, logits_of

pytestmark = pytest.mark.anyio

IDS = [1, 2, 3, 4, 5, 6]
WITH_LOSS = Storage(StoredAs.BFLOAT16, StoredAs.BFLOAT16)
SHARING = Policy(snapshot_every=4, save_after_tokens=1)


async def stored_point(store: Path) -> str:
    """After `IDS`, at a session's end, with a snapshot."""
    async with fake_runtime(store=store) as rt:
        session = await rt.session()
        await session.append(IDS)
        return str(await session.pause())


def make_wrong(store: Store, node_id: str, *, build: str = "another", storage: Storage | None = None) -> None:
    """Have a node's snapshot as another build would have it, with numbers that this one doesn't compute."""
    info = store.snapshot_info(node_id)
    snapshot = new_snapshot(info.layout, info.position)
    for array in (snapshot.kda, snapshot.conv, snapshot.logits, *(page.rows for page in snapshot.pages)):
        assert array is not None
        array[...] = 1
    made_by = replace(info.fingerprint, build=build)
    store.save(node_id, snapshot, made_by, reason=info.reason, storage=storage or info.storage)


@pytest.fixture(params=["another build's", "with loss"])
async def point(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A durable point in the store under `tmp_path` whose snapshot is not what its tokens give."""
    node_id = await stored_point(tmp_path)
    with Store.open(str(tmp_path)) as store:
        if request.param == "with loss":
            make_wrong(store, node_id, build=FINGERPRINT.build, storage=WITH_LOSS)
        else:
            make_wrong(store, node_id)
    return node_id


async def is_right(session: Session) -> bool:
    """Whether its state is what its tokens give."""
    return np.array_equal(await session.logits(), logits_of(hash_of(session.tokens().tolist())))


async def resumed_as_is(rt: Runtime, point: str) -> Session:
    session = await rt.resume(point, as_is=True)
    assert session.inexact
    assert not await is_right(session)
    return session


async def check_all(store: Path, *, original: str) -> None:
    """Whatever of a store is resumed, or begun alike: it is right, or said to be inexact."""
    with Store.open(str(store)) as opened:
        nodes = [node for info in opened.sessions() for node in opened.ancestry(info.head_id)]
        tokens = {node: opened.tokens(node).tolist() for node in nodes}
        ours = [one for one in opened.snapshots() if one.is_exact_for(FINGERPRINT)]
    assert original not in [one.node_id for one in ours]
    async with fake_runtime(store=store, policy=SHARING) as rt:
        await rt.recall()
        for node, ids in tokens.items():
            again = await rt.resume(node)
            assert again.inexact or again.position == 0 or await is_right(again)
            if ids:
                alike = await rt.session()
                await alike.append(ids)
                assert not alike.inexact
                assert await is_right(alike)


async def test_pausing_leaves_the_point_as_it_was_and_gives_another(tmp_path: Path, point: str) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        logits = await session.logits()
        paused = str(await session.pause())
        assert paused != point
    async with fake_runtime(store=tmp_path) as rt:
        assert rt.store is not None
        assert not rt.store.snapshot_info(point).is_exact_for(FINGERPRINT)
        for name in (paused, session.id):
            again = await rt.resume(name)
            assert again.inexact
            assert np.array_equal(await again.logits(), logits)
        assert rt.counters.prefilled_tokens == 0
    await check_all(tmp_path, original=point)


async def test_a_look_that_stores_nothing_leaves_nothing(tmp_path: Path) -> None:
    point = await stored_point(tmp_path)
    with Store.open(str(tmp_path)) as store:
        make_wrong(store, point)
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        await session.close()
    async with fake_runtime(store=tmp_path) as rt:
        again = await rt.resume(session.id)
        assert not again.inexact
        assert await is_right(again)


async def test_out_of_memory_and_back_it_is_the_same_state(tmp_path: Path, point: str) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        logits = await session.logits()
        assert await session.demote()
        cold = await session.fork()
        for one in (session, cold):
            assert np.array_equal(await one.logits(), logits)
            assert one.inexact
        assert rt.counters.prefilled_tokens == 0
    await check_all(tmp_path, original=point)


async def appended(session: Session) -> Session:
    await session.append([7, 8])
    return session


async def generated(session: Session) -> Session:
    await session.generate(GREEDY).collect()
    return session


async def forked_from_an_earlier_place(session: Session) -> Session:
    await session.append([7, 8])
    return await session.fork(position=7)


async def rewound(session: Session) -> Session:
    await session.append([7, 8])
    await session.rewind(position=len(IDS))
    return session


async def edited(session: Session) -> Session:
    await session.append([7, 8])
    await session.edit(0, [*IDS, 9])
    return session


async def marked(session: Session) -> Session:
    await session.mark({"here": True})
    return session


async def written_beside(session: Session) -> Session:
    await session.write_beside(np.array([7], np.int32), np.array([8], np.int32))
    return session


WAYS = [
    appended,
    generated,
    Session.fork,
    Session.twin,
    forked_from_an_earlier_place,
    rewound,
    edited,
    marked,
    written_beside,
]


@pytest.mark.parametrize("way", WAYS)
async def test_all_that_comes_of_it_stays_inexact(
    tmp_path: Path, point: str, way: Callable[[Session], Awaitable[Session]]
) -> None:
    async with fake_runtime(store=tmp_path, policy=SHARING) as rt:
        session = await resumed_as_is(rt, point)
        after = await way(session)
        assert after.inexact
        alike = await rt.session()
        await alike.append(after.tokens())
        assert await is_right(alike), "nobody begins from what is in memory"
        stored = [str(await after.pause())]
        if after is not session:
            stored.append(str(await session.pause()))
        await rt.settle()
    async with fake_runtime(store=tmp_path, policy=SHARING) as rt:
        for name in stored:
            again = await rt.resume(name)
            assert again.inexact
            onward = await again.fork()
            await onward.append([3])
            assert onward.inexact
            await onward.pause()
    await check_all(tmp_path, original=point)


@pytest.mark.parametrize("way", ["migrate", "push", "pull", "by a place"])
async def test_moved_to_another_store_it_is_inexact_there(tmp_path: Path, point: str, way: str) -> None:
    there = tmp_path / "there"
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        logits = await session.logits()
        match way:
            case "migrate":
                name = str(await session.migrate(there))
            case "push":
                name = str(await session.pause())
                await rt.push(name, there)
            case "by a place":
                await session.migrate(f"file://{tmp_path}/place")
                async with fake_runtime(store=there) as other:
                    name = (await other.take(session.id, f"file://{tmp_path}/place")).head
            case _:
                name = str(await session.pause())
                async with fake_runtime(store=there) as other:
                    await other.pull(name, tmp_path)
    async with fake_runtime(store=there) as rt:
        again = await rt.resume(name)
        assert again.inexact
        assert np.array_equal(await again.logits(), logits)
        await again.append([9])
        await again.pause()
    await check_all(there, original=point)


async def test_an_index_that_is_made_again_knows_it(tmp_path: Path, point: str) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        paused = str(await session.pause())
    rebuild(str(tmp_path))
    async with fake_runtime(store=tmp_path) as rt:
        assert (await rt.resume(paused)).inexact
    await check_all(tmp_path, original=point)


async def test_an_exact_session_that_was_moved_out_comes_back_exact(tmp_path: Path) -> None:
    """Though its snapshot was stored anew with loss meanwhile; whoever resumes that is told so."""
    point = await stored_point(tmp_path)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.resume(point)
        assert await session.demote()
        assert rt.store is not None
        make_wrong(rt.store, point, build=FINGERPRINT.build, storage=WITH_LOSS)
        assert await is_right(session)
        assert not session.inexact
        assert rt.counters.prefilled_tokens == len(IDS)
        assert (await rt.resume(point)).inexact


async def test_what_is_replaced_after_it_was_looked_at_is_not_read(tmp_path: Path) -> None:
    point = await stored_point(tmp_path)
    with Store.open(str(tmp_path)) as store:
        journal = Journal(store, FINGERPRINT, LAYOUT)
        start = await journal.own_start(point)
        assert start is not None
        assert await journal.load(start, new_snapshot(LAYOUT, len(IDS)))
        make_wrong(store, point)
        assert not await journal.load(start, new_snapshot(LAYOUT, len(IDS)))
        assert await journal.own_start(point) is None


async def test_whoever_resumes_in_the_background_replays_rather(tmp_path: Path) -> None:
    """The session was given as an exact one before its state was read."""
    point = await stored_point(tmp_path)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.resume(point)
        await session.append([7])
        later = str(await session.pause())
        assert rt.store is not None
        make_wrong(rt.store, point, build=FINGERPRINT.build, storage=WITH_LOSS)
        session = await rt.resume(later, background=True)
        rt.store.drop_snapshot(later)
        assert not session.inexact
        assert await is_right(session)


async def test_a_session_whose_inexact_state_is_gone_goes_on_exactly_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    point = await stored_point(tmp_path)
    with Store.open(str(tmp_path)) as store:
        make_wrong(store, point)
    async with fake_runtime(store=tmp_path) as rt:
        session = await resumed_as_is(rt, point)
        for erase in (False, True):
            assert await session.demote()
            assert rt.store is not None
            if erase:
                rt.store.drop_snapshot(session.head)
            assert await is_right(session) is erase
            assert ("can't be read any more" in caplog.text) is erase
        assert session.inexact, "what follows is no more trusted than before"


async def test_a_state_where_no_node_is_says_so(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(IDS)
        state = rt.pool.draft(rt.pool.empty(), 3, with_logits=True).commit()
        with pytest.raises(AssertionError, match="no node at position 3"):
            await session.record.save(state, "pause")
        state.release()


def test_a_kept_state_is_never_an_inexact_one() -> None:
    pool = StatePool(LAYOUT)
    state = pool.draft(pool.empty(), 1, with_logits=True).commit()
    state.inexact = True
    assert pool.draft(state, 1, with_logits=True).commit().inexact, "nor is what is computed from one"
    with pytest.raises(AssertionError, match="inexact"):
        Prefixes(pool, lambda: 0.0).keep("", b"", state)
