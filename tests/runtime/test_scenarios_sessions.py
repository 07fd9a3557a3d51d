"""How other engines lost sessions, and that this one doesn't: each test is one story, over the scripted model."""

import asyncio
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.store import Store
from serai.runtime import Runtime, SamplingParams, Session
from serai.runtime.errors import (
    BadParameter,
    NothingToContinue,
    OutOfBudget,
    SessionBusy,
    SessionClosed,
    SessionGone,
    ShuttingDown,
)
from serai.runtime.memory.residency import Tier
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.events import EventKind
from serai.runtime.state import Part, page_view, part_bytes, session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import LAYOUT, ScriptedModel, hash_of, logits_of
from tests.runtime.test_session import GREEDY, Gate, greedy_by_hand

pytestmark = pytest.mark.anyio

KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)
TWENTY = SamplingParams(temperature=0, max_tokens=20)
FIXED, LOGITS, PAGE = (part_bytes(LAYOUT, part) for part in (Part.FIXED, Part.LOGITS, Part.PAGE))


def bits(session: Session) -> list[bytes]:
    """Everything a session's state in memory holds, unused rows left out."""
    state = session.held
    if state is None or state.fixed is None or state.logits is None:
        return []
    rows = LAYOUT.page_rows(state.position)
    pages = [page_view(LAYOUT, page)[:, :used].tobytes() for page, used in zip(state.table.pages, rows, strict=True)]
    return [state.fixed.array.tobytes(), state.logits.array.tobytes(), *pages]


def everything_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


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


async def test_resuming_in_another_process_feeds_only_what_is_new(tmp_path: Path) -> None:
    """B40: 500 tokens checkpointed, restarted, five more: five prefilled."""
    ids = [n % 7 for n in range(500)]
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(ids)
        point = await session.pause()
    async with fake_runtime(store=tmp_path) as rt:
        again = await rt.resume(str(point))
        assert (again.position, rt.counters.prefilled_tokens) == (500, 0)
        used = await again.append([1, 2, 3, 4, 5])
        assert (used.prefilled, used.position, rt.counters.prefilled_tokens) == (5, 505, 5)
        assert await equals_cold(again, [*ids, 1, 2, 3, 4, 5])


async def test_a_new_session_knows_nothing_of_what_lies_in_the_store(tmp_path: Path) -> None:
    """B44: what lies there is resumed by its id only, and that is told."""
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        old = await rt.session(label="old")
        await old.append([1] * 40)
        point = await old.pause()
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        new = await rt.session()
        assert (new.position, new.turn, new.tokens().tolist()) == (0, 0, [])
        with pytest.raises(NothingToContinue):
            new.generate()
        await new.append([2])
        assert await equals_cold(new, [2])
        with rt.watch() as events:
            again = await rt.resume(point)
            told = await events.get()
        assert (told.kind, told.session_id, again.label) == (EventKind.OPENED, old.id, "old")


async def test_an_unknown_id_opens_nothing_and_writes_nothing(tmp_path: Path) -> None:
    """B45: over the interface of the runtime; those of the server and the command line have tests of their own."""
    async with fake_runtime(store=tmp_path) as rt:
        files = everything_under(tmp_path)
        for unknown in ("nope", "", "../../etc/passwd", "a" * 26):
            with pytest.raises((SessionGone, BadParameter, ValueError)):
                await rt.resume(unknown)
        assert rt.status().sessions == ()
        assert everything_under(tmp_path) == files


async def test_two_generations_on_one_session_are_one_and_a_refusal() -> None:
    """B46: never interleaved, never shortened."""
    async with fake_runtime() as rt:
        session = await rt.session()
        await session.append([4, 2])
        outcomes: list[str] = []

        async def one() -> None:
            try:
                await session.generate(GREEDY).collect()
            except SessionBusy:
                outcomes.append("refused")
            else:
                outcomes.append("done")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
        assert sorted(outcomes) == ["done", "refused"]
        assert session.tokens().tolist() == [4, 2, *greedy_by_hand([4, 2], 8)]


class SlowDisk:
    """Holds up the store's loads until it is told to let them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()
        load = Store.load

        def slow(store: Store, *arguments: object) -> object:
            self.loads += 1
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self._go_on.wait(timeout=10), "the test lets it go on"
            return load(store, *arguments)  # type: ignore[arg-type]  # whatever the runtime calls it with

        monkeypatch.setattr(Store, "load", slow)

    def go_on(self) -> None:
        self._go_on.set()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_two_resumes_at_once_are_two_timelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """B47: one goes on as the session, the other branches off; nothing is orphaned, nothing taken from the other."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5])
        point = await session.pause()
        disk = SlowDisk(monkeypatch)
        first, second = (asyncio.ensure_future(rt.resume(point)) for _ in range(2))
        await disk.begun.wait()
        if cancelled:
            first.cancel()
        disk.go_on()
        got = [one for one in await asyncio.gather(first, second, return_exceptions=True) if isinstance(one, Session)]
        assert len(got) == 2 - cancelled
        assert [one.id for one in got].count(session.id) == 1, "one of them is the session itself"
        assert len({one.id for one in got}) == len(got)
        assert rt.status().budget.live_bytes == len(got) * session_bytes(LAYOUT, 5)
        rt.check()
        for one in got:
            assert await equals_cold(one, [1, 2, 3, 4, 5])
        await got[0].close()
        for one in got[1:]:
            assert await equals_cold(one, [1, 2, 3, 4, 5])


@pytest.mark.parametrize("left", ["broken off", "cancelled"])
async def test_a_client_who_leaves_keeps_exactly_what_was_delivered(left: str) -> None:
    """B48: three delivered, and the next turn comes at once."""
    async with fake_runtime(policy=Policy(reuse=False, guess=True)) as rt:
        session = await rt.session()
        await session.append([5, 6])
        given: list[int] = []
        stream = session.generate(GREEDY)
        if left == "broken off":
            async for token in stream:
                given.append(token.id)
                if len(given) == 3:
                    break
            await stream.aclose()
        else:
            with anyio.CancelScope() as scope:
                async for token in stream:
                    given.append(token.id)
                    if len(given) == 3:
                        scope.cancel()
            await stream.aclose()
        await session.append([1])
        assert given == greedy_by_hand([5, 6], 3)
        assert await equals_cold(session, [5, 6, *given, 1])
        assert session.turn == 1
        rt.check()


async def test_cancelled_twice_while_the_first_is_being_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B105: the clean-up waits for the store, is cancelled again, and everything is free all the same."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6])
        begun, go_on = asyncio.Event(), threading.Event()
        loop, record = asyncio.get_running_loop(), Store.record

        def slow(store: Store, *arguments: object) -> object:
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(timeout=10)
            return record(store, *arguments)  # type: ignore[arg-type]  # whatever the runtime calls it with

        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given = [(await anext(stream)).id for _ in range(3)]
        monkeypatch.setattr(Store, "record", slow)
        leaving = asyncio.ensure_future(stream.aclose())
        await begun.wait()
        for _ in range(2):
            leaving.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert session.doing is None
        assert await equals_cold(session, [5, 6, *given])
        rt.check()
    async with fake_runtime(store=tmp_path) as rt:
        assert await equals_cold(await rt.resume(session.id), [5, 6, *given])


async def test_shutting_down_while_a_generation_is_cleaned_up_leaves_nothing(tmp_path: Path) -> None:
    """B105: the fake runtime itself checks that every buffer came back and that the store can be opened again."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([5, 6])
        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given = [(await anext(stream)).id for _ in range(3)]
        leaving = asyncio.ensure_future(stream.aclose())
        await asyncio.sleep(0)
    await asyncio.gather(leaving, return_exceptions=True)
    with pytest.raises(SessionClosed):
        await session.append([1])
    async with fake_runtime(store=tmp_path) as rt:
        ids = (await rt.resume(session.id)).tokens().tolist()
        assert ids == [5, 6, *given]


@pytest.mark.parametrize("call", ["append", "generate", "rewind", "hot"])
async def test_shutting_down_in_the_middle_of_a_step_leaves_nothing(tmp_path: Path, call: str) -> None:
    """B105: the step comes back to a session that is gone; the fake runtime checks that its memory came back."""
    gate = Gate(step=4 if call != "rewind" else 3)
    async with fake_runtime(ScriptedModel(before_layer=gate), store=tmp_path, policy=KEEPING) as rt:
        session = await rt.session()
        await session.append([5, 6])
        await session.append([7])
        given: list[int] = []
        stream = session.generate(GREEDY)

        async def read() -> None:
            async for token in stream:
                given.append(token.id)

        async def work() -> None:
            if call == "append":
                await session.append([8])
                await session.append([1] * 9)
            elif call == "generate":
                await read()
            elif call == "rewind":
                await session.rewind(position=1)
            else:
                await session.append([8])
                await session.demote()
                await session.append([1])

        working = asyncio.ensure_future(work())
        await gate.reached.wait()
        asyncio.get_running_loop().call_later(0.01, gate.open)
    outcome = (await asyncio.gather(working, return_exceptions=True))[0]
    assert outcome is None or isinstance(outcome, SessionClosed | ShuttingDown)
    async with fake_runtime(store=tmp_path, policy=KEEPING) as rt:
        again = (await rt.resume(session.id)).tokens().tolist()
        assert again[: 3 + len(given)] == [5, 6, 7, *given]


async def test_fifty_sessions_ramp_up_within_the_budget(tmp_path: Path) -> None:
    """B116: sessions are moved out before the limit, never over it; the limit itself is read in `memory_limits`."""
    limit = 12 * session_bytes(LAYOUT, 64)
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=KEEPING, limits=Limits(16, 8)) as rt:
        sessions = []
        for number in range(50):
            session = await rt.session()
            await session.append([number % 16, *[number // 16] * 63])
            sessions.append(session)
            budget = rt.status().budget
            assert budget.used_bytes + budget.reserved_bytes <= limit
        assert sum(session.tier is Tier.COLD for session in sessions) >= 38
        for number in (0, 13, 49):
            assert await equals_cold(sessions[number], [number % 16, *[number // 16] * 63])


async def test_snapshots_count_and_everything_returns_to_where_it_began(tmp_path: Path) -> None:
    """B117: live states, kept ones and reserves stay under the budget at each step; closing gives all of it back."""
    limit = 6_000
    async with fake_runtime(store=tmp_path, limit_bytes=limit, policy=KEEPING, limits=Limits(8, 8)) as rt:
        root = await rt.session()
        await root.append([1] * 40)
        grown = [root]
        for number in range(30):
            fork = await grown[number // 2].fork()
            await fork.append([number % 16] * 7)
            grown.append(fork)
            budget = rt.status().budget
            assert budget.used_bytes + budget.reserved_bytes <= limit
            own = sum(session.own_bytes for session in rt.status().sessions)
            assert own <= budget.live_bytes + budget.kept_bytes
        await rt.settle()
        rt.check()
        for session in grown:
            await session.close()
        services = rt._services
        services.prefixes.clear()
        budget = rt.status().budget
        assert (budget.live_bytes, budget.kept_bytes, budget.reserved_bytes) == (0, 0, 0)


async def test_one_over_is_refused_and_two_that_fit_in_turn_take_turns() -> None:
    """B119: with states kept for reuse, which must not stand in the way."""
    rows = 100
    limit = 4 * FIXED + 3 * LOGITS + (rows // 4) * PAGE
    kept = Policy(reuse=True, snapshot_every=1_000)
    async with fake_runtime(limit_bytes=limit, policy=kept, limits=Limits(8, 8)) as rt:
        session = await rt.session()
        with pytest.raises(OutOfBudget) as refused:
            await session.append([1] * 3 * rows)
        assert refused.value.needed_bytes > limit == refused.value.free_bytes
        assert rt.counters.prefilled_tokens == 0
        done: list[int] = []

        async def one(rt: Runtime, token: int) -> None:
            async with await rt.session() as mine:
                await mine.append([token] * 60)
                assert await equals_cold(mine, [token] * 60)
                done.append(token)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, rt, 1)
            tasks.start_soon(one, rt, 2)
        assert sorted(done) == [1, 2]
        assert rt.counters.prefilled_tokens == 120, "each was prefilled once"


@pytest.mark.parametrize("failing", ["budget", "parameters", "cancelled"])
async def test_a_hit_whose_call_then_fails_holds_nothing(failing: str) -> None:
    """B120: a hundred times; after each the ledger is exact and nothing is reserved."""
    shared = [3] * 32
    async with fake_runtime(limit_bytes=2_000, policy=KEEPING) as rt:
        first = await rt.session()
        await first.append(shared)
        for _ in range(100):
            session = await rt.session()
            if failing == "budget":
                with pytest.raises(OutOfBudget):
                    await session.append(shared + [1] * 2_000)
            elif failing == "parameters":
                with pytest.raises(BadParameter):
                    await session.append([*shared, 99])
            else:
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await session.append([*shared, 1])
            await session.close()
            assert rt.status().budget.reserved_bytes == 0
            rt.check()
        assert await equals_cold(first, shared)
