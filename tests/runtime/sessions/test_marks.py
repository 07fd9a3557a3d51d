"""What a server asks of a session: nodes of a given name, tokens written down unread, and forks by their number."""

from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints.errors import SeraiError
from serai.checkpoints.names import new_id
from serai.runtime.errors import BadParameter
from serai.runtime.sampling.params import SamplingParams
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)


async def test_a_mark_is_a_durable_node_of_the_given_name_and_the_session_goes_on_from_it(tmp_path: Path) -> None:
    name = new_id()
    async with fake_runtime(store=tmp_path) as rt, await rt.session() as session:
        await session.append([3, 4, 5])
        assert await session.mark({"said": "yes"}, node_id=name) == name == session.head
        await session.append([6])
        assert rt.store is not None
        node = rt.store.node(name)
        assert (node.position, dict(node.metadata)) == (3, {"said": "yes"})
        assert rt.store.node(session.head).parent_id == name
        again = await rt.resume(name)
        assert again.tokens().tolist() == [3, 4, 5]
        await again.close()


async def test_a_mark_that_could_not_be_written_is_not_there_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_runtime(store=tmp_path) as rt, await rt.session() as session:
        await session.append([3, 4])
        before, store = session.head, rt.store
        assert store is not None
        with monkeypatch.context() as patch:

            def full(node: object) -> None:
                raise SeraiError("the disk is full")

            patch.setattr(store, "record", full)
            with pytest.raises(SeraiError, match="full"):
                await session.mark({})
        assert session.head == before
        await session.append([5])
        assert store.node(session.head).parent_id == before


async def test_tokens_written_beside_are_read_by_whoever_resumes_them(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt, await rt.session() as session:
        await session.append([3, 4])
        head, read = session.head, rt.counters.prefilled_tokens
        appended, generated = np.array([7, 8], np.int32), np.array([9], np.int32)
        node = await session.write_beside(
            appended, generated, append_metadata={"from": "user"}, metadata={"to": "user"}, node_id=new_id()
        )
        assert (session.head, session.position, rt.counters.prefilled_tokens) == (head, 2, read)
        assert rt.store is not None
        assert dict(rt.store.node(node).metadata) == {"to": "user"}
        async with await rt.resume(node) as there:
            assert there.tokens().tolist() == [3, 4, 7, 8, 9]
            assert (there.turn, there.timeline.turn.generating) == (0, True)
            assert dict(there.append_metadata) == {"from": "user"}
            logits = await there.logits()
        async with await rt.session() as cold:
            await cold.append([3, 4, 7, 8, 9])
            assert logits.tobytes() == (await cold.logits()).tobytes()


async def test_a_choice_draws_the_same_however_often_the_session_was_forked_before() -> None:
    async with fake_runtime() as rt, await rt.session() as session:
        await session.append([3, 4, 5])
        first = [await session.fork(choice=number) for number in range(3)]
        ordinary = await session.fork()
        again = [await session.fork(choice=number) for number in range(3)]
        said = [(await one.generate(DRAWN).collect()).tokens for one in (*first, *again, ordinary)]
        assert said[:3] == said[3:6]
        assert len(set(said[:3])) == 3
        assert said[6] == said[0], "choices count as no forks, so this is fork number 0"
        with pytest.raises(BadParameter, match="count from 0"):
            await session.fork(choice=-1)
        for one in (*first, *again, ordinary):
            await one.close()


async def test_a_twin_says_what_the_session_says() -> None:
    async with fake_runtime() as rt, await rt.session() as session:
        await session.append([3, 4, 5])
        async with await session.twin() as twin, await twin.fork() as its, await session.fork() as own:
            said = [(await one.generate(DRAWN).collect()).tokens for one in (session, twin, its, own)]
        assert said[0] == said[1] != said[2] == said[3]


async def test_a_runtime_says_what_a_server_must_know() -> None:
    async with fake_runtime(max_positions=77) as rt:
        assert (rt.store, rt.max_positions, rt.waiting_calls, rt.engine_error) == (None, 77, 0, None)
        await rt.close()
        assert "shutting down" in str(rt.engine_error)
