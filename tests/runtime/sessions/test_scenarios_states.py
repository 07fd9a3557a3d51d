"""Scenarios from the field: what a state holds, who shares it, and what undoing, forking and reuse leave of it."""

from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.runtime import SamplingParams, Session
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.state import page_view
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.gate import Gate
from tests.runtime.scripted import FIXED, LAYOUT, LOGITS, PAGE, ScriptedModel, greedy_by_hand, hash_of, logits_of

pytestmark = pytest.mark.anyio


KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)


TWENTY = SamplingParams(temperature=0, max_tokens=20)


def bits(session: Session) -> list[bytes]:
    """Everything a session's state in memory holds, unused rows left out."""
    state = session.held
    if state is None or state.fixed is None or state.logits is None:
        return []
    rows = LAYOUT.page_rows(state.position)
    pages = [page_view(LAYOUT, page)[:, :used].tobytes() for page, used in zip(state.table.pages, rows, strict=True)]
    return [state.fixed.array.tobytes(), state.logits.array.tobytes(), *pages]


async def equals_cold(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


@pytest.mark.parametrize("undone", [3, 1])
@pytest.mark.parametrize("policy", [KEEPING, Policy(reuse=False)])
async def test_undoing_tokens_undoes_the_state_too(undone: int, policy: Policy) -> None:
    """B29: undo three of three, and one of three, twice in a row."""
    first, more = [n % 9 for n in range(10)], [3, 1, 4]
    async with fake_runtime(policy=policy) as rt:
        session, straight = await rt.session(), await rt.session()
        await session.append(first)
        await straight.append((first + more)[: 13 - undone])
        expected = bits(straight)
        for _ in range(2):
            await session.append(more)
            await session.rewind(position=13 - undone)
            assert bits(session) == expected
            await session.append(more[3 - undone :])
            assert await equals_cold(session, first + more)
            await session.rewind(position=10)


async def test_one_snapshot_restored_three_times_goes_on_the_same_way() -> None:
    """B30: and it is the same snapshot after each."""
    async with fake_runtime(policy=KEEPING) as rt:
        kept = await rt.session()
        await kept.append([5, 3, 2, 8, 13, 2, 1])
        before, answers = bits(kept), []
        for _ in range(3):
            async with await kept.fork() as restored:
                await restored.append([1, 2, 3, 4, 5])
                answers.append((await restored.generate(TWENTY).collect()).tokens)
            assert bits(kept) == before
        assert list(answers[0]) == greedy_by_hand([5, 3, 2, 8, 13, 2, 1, 1, 2, 3, 4, 5], 20)
        assert answers == answers[:1] * 3


async def test_siblings_write_into_states_of_their_own() -> None:
    """B31: two forks and their parent go on at once."""
    async with fake_runtime() as rt:
        parent = await rt.session()
        await parent.append([1, 2, 3, 4, 5])
        family = [parent, *await parent.fork_many(2)]
        assert len({id(session.held) for session in family}) == 1
        async with anyio.create_task_group() as tasks:
            for session, token in zip(family, (6, 7, 8), strict=True):
                tasks.start_soon(session.append, [token])
        for session, token in zip(family, (6, 7, 8), strict=True):
            assert await equals_cold(session, [1, 2, 3, 4, 5, token])
        written = [state.fixed.address for one in family if (state := one.held) is not None and state.fixed is not None]
        assert len(set(written)) == 3
        last_pages = {state.table.pages[-1].address for one in family if (state := one.held) is not None}
        assert len(last_pages) == 3, "the partly filled page was copied, or written by one of them alone"


async def test_a_fork_in_the_middle_of_a_step_is_taken_at_the_boundary_before_it() -> None:
    """B31: while the engine stands between two layers of the parent's step."""
    gate = Gate(step=3)
    async with fake_runtime(ScriptedModel(before_layer=gate), limits=Limits(4, 4)) as rt:
        parent = await rt.session()
        await parent.append([1, 2])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(parent.append, [9] * 12)
            await gate.reached.wait()
            child = await parent.fork()
            assert (child.position, parent.position) == (2, 2)
            gate.open()
        await child.append([7])
        assert await equals_cold(child, [1, 2, 7])
        assert await equals_cold(parent, [1, 2, *[9] * 12])


async def test_forks_cost_what_they_add_and_outlive_their_parent() -> None:
    """B32: 4,096 latent rows, eight forks of one token each."""
    ids = [n % 13 for n in range(4_094)]  # two rows of the last page are free: the forks have to copy it
    async with fake_runtime() as rt:
        parent = await rt.session()
        await parent.append(ids)
        before = rt.status().budget.live_bytes
        forks = await parent.fork_many(8)
        assert rt.status().budget.live_bytes == before
        assert all(fork.held is parent.held for fork in forks), "whatever the length, a fork is one reference more"
        for number, fork in enumerate(forks):
            await fork.append([number])
        assert rt.status().budget.live_bytes - before <= 8 * (FIXED + LOGITS + PAGE)
        await parent.close()
        for number, fork in enumerate(forks):
            assert await equals_cold(fork, [*ids, number])
            await fork.close()
        assert rt.status().budget.live_bytes == 0


async def test_nothing_uninitialised_is_reachable_by_reuse_fork_or_resume(tmp_path: Path) -> None:
    """B36: every buffer is NaN when it is handed out, and no state that can be reached holds one."""
    ids = [n % 11 for n in range(70)]

    def clean(session: Session) -> bool:
        return bool(bits(session)) and all(np.isfinite(np.frombuffer(one, np.float32)).all() for one in bits(session))

    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        first = await rt.session()
        await first.append(ids)
        reused = await rt.session()
        assert (await reused.append([*ids, 1])).reused == 70
        forks = [await first.fork(), await first.fork(position=37), await first.fork(position=16)]
        assert all(clean(session) for session in (first, reused, *forks))
        assert await equals_cold(reused, [*ids, 1])
        point = await first.pause()
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        again, new = await rt.resume(point), await rt.session()
        assert (await new.append(ids)).reused == 70
        assert clean(again)
        assert clean(new)
        assert bits(again) == bits(new)
