"""Where states are kept on disk: on the way through long appends and at turn ends, thinned like backups."""

import shutil
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.errors import StoreFailed
from serai.checkpoints.store import Store
from serai.runtime import Runtime, Session
from serai.runtime.memory.residency import Tier
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import GREEDY, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

KEEPING = Policy(snapshot_every=16, save_after_tokens=4)
IDS = [(7 * n) % 13 for n in range(130)]


async def is_at(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids and session.position == len(ids)
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


def stored_positions(rt: Runtime) -> list[int]:
    assert rt.store is not None
    return sorted(info.position for info in rt.store.snapshots())


async def test_a_long_append_leaves_states_in_the_store_that_outlive_the_process(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append(IDS, metadata={"said": "all"})
        kept = sorted(session.kept_positions())
        await rt.settle()
        assert kept.pop() == 130, "which is read sooner than it is written: two tokens"
        assert stored_positions(rt) == kept
        assert len(kept) >= 5
        name = session.id
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        again = await rt.resume(name)
        assert await is_at(again, IDS)
        assert again.append_metadata == {"said": "all"}
        assert again.turn == 0
        assert rt.counters.prefilled_tokens == 2
        for position in (129, 100, 50, 20):
            below = max(one for one in kept if one <= position)
            assert again.replay_tokens(position=position) == position - below
            child = await again.fork(position=position)
            assert await is_at(child, IDS[:position])
            assert child.append_metadata == {}, "part of an append is not what it was given to keep"


async def test_an_append_with_states_on_its_way_is_durable_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        before = rt.store.sizes().nodes if rt.store else 0
        with monkeypatch.context() as patched:
            patched.setattr(Store, "record", _fails_at_the_last(Store.record))
            with pytest.raises(StoreFailed, match="no more"):
                await session.append(IDS)
        assert await is_at(session, [1, 2, 3])
        assert rt.store is not None
        assert rt.store.sizes().nodes == before
        await session.append(IDS)
        assert await is_at(session, [1, 2, 3, *IDS])
        name = session.id
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        assert await is_at(await rt.resume(name), [1, 2, 3, *IDS])


def _fails_at_the_last(record: object) -> object:
    def failing(store: Store, *nodes: object) -> None:
        add = store._index.add_node
        done = []

        def add_all_but_one(row: object) -> None:
            done.append(row)
            if len(done) == len(nodes):
                raise OSError("no more")
            add(row)  # type: ignore[arg-type]  # whatever the store calls it with

        store._index.add_node = add_all_but_one  # type: ignore[method-assign]
        try:
            record(store, *nodes)  # type: ignore[operator]
        finally:
            store._index.add_node = add  # type: ignore[method-assign]

    return failing


async def test_what_a_session_leaves_in_the_store_is_dense_near_its_end_and_sparse_far_back(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session, ids = await rt.session(), []
        for number in range(60):
            said = [number % 16] * 6
            await session.append(said)
            ids += [*said, *(await session.generate(GREEDY).collect()).tokens]
            await rt.settle()
        end = session.position
        stored = stored_positions(rt)
        assert end == len(ids) == stored[-1] == 60 * 14
        assert len(stored) <= 2 * end.bit_length(), f"of about {2 * 60} that were written"
        for distance in (30, 100, 300, 700):
            assert any(distance / 2 <= end - one <= 2 * distance for one in stored)
        assert set(stored) <= session.kept_positions() | {6}
        assert await is_at(await session.fork(position=500), ids[:500])


async def test_what_was_asked_for_and_what_others_have_is_never_thinned_out(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append(IDS[:20])
        await session.append(IDS[20:40])
        await session.demote()
        await rt.settle()
        other = await rt.session()
        await other.append(IDS[:20])
        await other.append(IDS[20:40])
        for number in range(40):
            await session.append([number % 16] * 6)
            await rt.settle()
        assert {20, 40} <= set(stored_positions(rt))


async def test_what_was_asked_for_before_it_was_written_in_the_background_is_not_thinned_out(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append(IDS[:20])
        await session.append(IDS[20:40])  # which waits to be written
        await session.demote()
        await rt.settle()
        assert rt.store is not None
        reasons = {info.position: info.reason for info in rt.store.snapshots()}
        assert (reasons[32], reasons[40]) == ("background", "demote")
        for number in range(40):
            await session.append([number % 16] * 6)
            await rt.settle()
        assert 40 in stored_positions(rt)


async def test_a_lost_state_comes_back_in_the_background_and_says_what_that_takes(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store", policy=KEEPING) as rt:
        session = await rt.session()
        await session.append(IDS)
        point = await session.pause()
    shutil.rmtree(tmp_path / "store" / "parts")
    gate = Gate(step=1)
    async with fake_runtime(ScriptedModel(before_layer=gate), store=tmp_path / "store", policy=KEEPING) as rt:
        again = await rt.resume(point, background=True)
        assert (again.tier, again.tokens().tolist()) == (Tier.COLD, IDS)
        await gate.reached.wait()  # nobody has asked for it
        reading = rt.status().sessions[0]
        assert (reading.tier, reading.doing) == ("cold", None)
        fork = await again.fork()
        gate.open()
        with anyio.fail_after(10):
            await again.append([1])  # waits, and is not refused
        assert await is_at(again, [*IDS, 1])
        assert await is_at(fork, IDS)
        assert rt.status().sessions[0].replay_tokens == 0


async def test_what_a_resume_costs_can_be_asked_beforehand(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store", policy=Policy(reuse=False)) as rt:
        session = await rt.session()
        await session.append(IDS)
        early = await session.pause()
        session = await rt.resume(early)
        await session.append([1, 2, 3])
        late = session.head
    async with fake_runtime(store=tmp_path / "store", policy=Policy(reuse=False)) as rt:
        assert await rt.replay_tokens(early) == 0
        assert await rt.replay_tokens(late) == 3
        assert rt.store is not None
        rt.store.drop_snapshot(str(early))
        assert await rt.replay_tokens(late) == 133
        again = await rt.resume(late, background=True)
        assert rt.status().sessions[0].replay_tokens == 133
        assert await is_at(again, [*IDS, 1, 2, 3])
        assert rt.counters.prefilled_tokens == 133
        assert rt.status().sessions[0].replay_tokens == 0
