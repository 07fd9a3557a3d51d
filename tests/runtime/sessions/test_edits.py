"""An edit of an earlier turn is done whole, or the session is what it was, in memory and in the store."""

from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.errors import StoreFailed
from serai.checkpoints.store import Store
from serai.runtime import Session
from serai.runtime.errors import LogitsNotFinite, OutOfBudget
from serai.runtime.services import Policy
from serai.runtime.state import session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import GREEDY, LAYOUT, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

KEEPING = Policy(snapshot_every=16, save_after_tokens=4)
OTHER = [7, 7, 7]


async def told(session: Session) -> list[int]:
    """Two turns, and what the session holds then."""
    await session.append([1, 2, 3], metadata={"turn": 0})
    await session.generate(GREEDY).collect()
    await session.append([4, 5], metadata={"turn": 1})
    ids: list[int] = session.tokens().tolist()
    return ids


async def is_as_before(session: Session, ids: list[int]) -> bool:
    same = session.tokens().tolist() == ids and session.position == len(ids) and session.turn == 1
    same = same and session.append_metadata == {"turn": 1}
    return same and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


@pytest.mark.parametrize("policy", [KEEPING, Policy(reuse=False)], ids=["keeping", "keeping nothing"])
@pytest.mark.parametrize("durable", [True, False])
async def test_an_edit_whose_text_fails_leaves_the_session_what_it_was(
    policy: Policy, durable: bool, tmp_path: Path
) -> None:
    bad = hash_of([*OTHER, 9])
    store = tmp_path if durable else None
    async with fake_runtime(ScriptedModel(spoil=lambda value: value == bad), policy=policy, store=store) as rt:
        session = await rt.session()
        ids = await told(session)
        head = session.head
        with pytest.raises(LogitsNotFinite):
            await session.edit(0, [*OTHER, 9])
        assert await is_as_before(session, ids)
        if rt.store is not None:
            assert rt.store.session_head(session.id) == head
        await session.append([6])
        assert session.tokens().tolist() == [*ids, 6]
        assert (await session.edit(1, OTHER)).position == len(ids) - 2 + len(OTHER)
        assert session.tokens().tolist() == [*ids[:-2], *OTHER]
        await rt.settle()
        rt.check()
        name = session.id
    if durable:
        async with fake_runtime(store=tmp_path, policy=policy) as rt:
            again = await rt.resume(name)
            assert again.tokens().tolist() == [*ids[:-2], *OTHER]
            assert again.append_metadata == {}


async def test_an_edit_that_cannot_be_written_leaves_the_session_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        ids = await told(session)
        await session.flush()
        assert rt.store is not None
        nodes = rt.store.sizes().nodes

        def fails(store: Store, *nodes: object) -> None:
            raise StoreFailed(path="it", doing="recording a node", reason="no more")

        with monkeypatch.context() as patched:
            patched.setattr(Store, "record", fails)
            with pytest.raises(StoreFailed, match="no more"):
                await session.edit(0, OTHER)
        assert await is_as_before(session, ids)
        assert rt.store.sizes().nodes == nodes
        await session.edit(0, OTHER)
        assert session.tokens().tolist() == OTHER
        assert len(rt.store.path(session.head)) == 3, "the root, the way back, and what was said instead"


async def test_an_edit_that_is_cancelled_while_it_reads_leaves_the_session_what_it_was() -> None:
    """And a fork taken meanwhile has what the session has."""
    model = ScriptedModel()
    async with fake_runtime(model, policy=KEEPING) as rt:
        session = await rt.session()
        ids = await told(session)
        model.before_layer = gate = Gate(step=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(session.edit, 0, OTHER)
            await gate.reached.wait()
            assert session.doing == "edit"
            fork = await session.fork()
            tasks.cancel_scope.cancel()
        gate.open()
        for one in (session, fork):
            assert await is_as_before(one, ids)
        await session.edit(0, OTHER)
        assert session.tokens().tolist() == OTHER


async def test_an_edit_that_does_not_fit_beside_what_is_kept_for_it_is_refused_at_once() -> None:
    """Not after waiting for memory that it holds itself."""
    limit = session_bytes(LAYOUT, 200) + session_bytes(LAYOUT, 100)
    async with fake_runtime(policy=Policy(reuse=False), limit_bytes=limit) as rt:
        session = await rt.session()
        await session.append([1])
        ids = [(7 * n) % 13 for n in range(180)]
        await session.append(ids)
        with anyio.fail_after(5), pytest.raises(OutOfBudget):
            await session.edit(0, [3] * 190)
        assert session.tokens().tolist() == [1, *ids]
        await session.append([2])
        assert (await session.edit(0, [3])).position == 1
        assert session.tokens().tolist() == [3]


async def test_an_edit_may_say_nothing() -> None:
    async with fake_runtime(policy=KEEPING) as rt:
        session = await rt.session()
        ids = await told(session)
        assert (await session.edit(1, [])).position == len(ids) - 2
        assert session.tokens().tolist() == ids[:-2]
