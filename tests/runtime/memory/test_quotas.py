"""A namespace never has more than its quota, and what it wants beyond that is nobody else's trouble."""

import asyncio
import tempfile
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import NamedTuple, cast

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime import FinishReason, Quota, Runtime, SamplingParams, Session, Status
from serai.runtime.chat import ChatFormat, Cursor
from serai.runtime.errors import BadParameter, OutOfBudget, OverQuota, SessionBusy, SessionClosed, WaitedTooLong
from serai.runtime.memory.residency import Tier
from serai.runtime.monitor.reading import status_from_json
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from serai.runtime.sessions.conversation import Chat
from serai.runtime.status import NamespaceStatus
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import FIXED, GREEDY, LOGITS, PAGE, greedy_by_hand

pytestmark = pytest.mark.anyio

RUNNING = 3 * FIXED + 2 * LOGITS
"""What a running session holds beside its latents: the state before, between two slices, and after."""

ROOMY = 1 << 20
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
KEEPING = Policy(reuse=True, snapshot_every=8, save_after_tokens=4)


def account(status: Status, namespace: str) -> NamespaceStatus:
    return next(one for one in status.namespaces if one.namespace == namespace)


async def until_waiting(rt: Runtime, calls: int) -> None:
    with anyio.fail_after(10):
        while rt.status().work.waiting_for_memory < calls:
            await anyio.lowlevel.checkpoint()


async def test_what_could_never_fit_a_quota_is_refused_with_its_numbers_and_no_others() -> None:
    quota = Quota(state_bytes=RUNNING + 10 * PAGE)
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": quota}) as rt:
        session = await rt.session(namespace="team")
        with pytest.raises(OverQuota) as refused:
            await session.append([1] * 100)
        error = refused.value
        assert (error.namespace, error.resource, error.limit) == ("team", "bytes of state", quota.state_bytes)
        assert error.needed_bytes == error.needed > error.limit
        assert error.free_bytes is None
        assert f"{ROOMY:,}" not in str(error)
        assert rt.counters.steps == 0
        await (await rt.session(namespace="other")).append([1] * 100)


async def test_who_has_a_quota_is_not_told_what_others_leave_of_the_budget() -> None:
    limit = RUNNING + 14 * PAGE
    async with fake_runtime(limit_bytes=limit, quotas={"team": Quota(state_bytes=ROOMY)}) as rt:
        other, mine = await rt.session(), await rt.session(namespace="team")
        with pytest.raises(OutOfBudget) as never:
            await mine.append([1] * 100)
        await other.append([1] * 32)
        rt._services.admission._max_wait_s = 0.01
        with pytest.raises(WaitedTooLong) as late:
            await mine.append([2] * 32)
        left = rt._services.admission.free_bytes
        assert left is not None
        for error in (never.value, late.value):
            assert f"{limit:,}" not in str(error)
            assert f"{left:,}" not in str(error)
        assert never.value.free_bytes is None
        assert late.value.free_bytes is None, "it waited for the budget, not for its quota"


async def test_a_full_quota_moves_out_idle_sessions_of_its_own_and_no_others(tmp_path: Path) -> None:
    quota = Quota(state_bytes=RUNNING + 14 * PAGE)
    async with fake_runtime(store=tmp_path, limit_bytes=ROOMY, quotas={"team": quota}) as rt:
        bystander = await rt.session(namespace="other")
        await bystander.append([9] * 32)
        mine = []
        for start in range(4):
            session = await rt.session(namespace="team")
            await session.append([start] * 32)
            mine.append(session)
        assert [session.tier for session in mine] == [Tier.COLD] * 3 + [Tier.HOT]
        assert bystander.tier is Tier.HOT
        for start, session in enumerate(mine):
            assert list((await session.generate(GREEDY).collect()).tokens) == greedy_by_hand([start] * 32, 8)
        assert bystander.tier is Tier.HOT


async def test_who_waits_for_a_quota_holds_up_its_own_namespace_only() -> None:
    quota = Quota(state_bytes=RUNNING + 14 * PAGE)
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": quota}) as rt:
        first, second, third = [await rt.session(namespace="team") for _ in range(3)]
        await first.append([1] * 32)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.append, [2] * 32)
            await until_waiting(rt, 1)
            tasks.start_soon(third.append, [3] * 4)  # would fit, but its turn is after the second's
            await until_waiting(rt, 2)
            with anyio.fail_after(10):
                other = await rt.session(namespace="other")
                await other.append([4] * 200)
            assert (second.position, third.position) == (0, 0)
            assert account(rt.status(), "team").waiting == 2
            await first.close()
        assert (second.position, third.position) == (32, 4)


async def test_a_generation_that_outgrows_its_quota_ends_and_stays() -> None:
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": Quota(state_bytes=RUNNING + 10 * PAGE)}) as rt:
        session = await rt.session(namespace="team")
        await session.append([1] * 20)
        stream = session.generate(SamplingParams(temperature=0, max_tokens=1_000))
        given: list[int] = []

        async def read() -> None:
            async for token in stream:
                given.append(token.id)

        with pytest.raises(OverQuota):
            await read()
        assert stream.finish_reason is FinishReason.BUDGET
        assert session.tokens().tolist() == [1] * 20 + given
        assert len(given) >= 4


async def test_sessions_are_counted_however_they_come_about(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path, quotas={"team": Quota(sessions=2)}) as rt:
        first = await rt.session(namespace="team")
        await first.append([1, 2, 3])
        point = await first.pause()
        first = await rt.resume(point)
        with pytest.raises(OverQuota, match="'team' needs 2 more than the 1 sessions it has, and its quota is 2"):
            await first.fork_many(2)
        with pytest.raises(OverQuota):
            await Chat(first, cast(ChatFormat, None), cast(Cursor, None)).fork_many(2)
        assert len(rt.status().sessions) == 1, "all or none"
        second = await first.fork()
        for call in (rt.session(namespace="team"), first.fork(), first.fork(position=1), first.twin()):
            with pytest.raises(OverQuota) as refused:
                await call
            assert (refused.value.resource, refused.value.used, refused.value.limit) == ("sessions", 2, 2)
        with pytest.raises(OverQuota):
            await rt.resume(point)
        assert account(rt.status(), "team").sessions == 2
        await rt.session(namespace="other")
        await second.close()
        assert (await first.fork()).position == 3


async def test_a_quota_may_bound_how_many_wait() -> None:
    quota = Quota(state_bytes=RUNNING + 14 * PAGE, waiting=1)
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": quota}) as rt:
        first, second, third = [await rt.session(namespace="team") for _ in range(3)]
        await first.append([1] * 32)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(second.append, [2] * 32)
            await until_waiting(rt, 1)
            with pytest.raises(OverQuota, match="calls waiting for memory"):
                await third.append([3] * 32)
            await first.close()
        assert (second.position, third.position) == (32, 0)


async def test_a_larger_quota_lets_those_in_who_wait_for_it() -> None:
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": Quota(state_bytes=RUNNING + 14 * PAGE)}) as rt:
        first, second = [await rt.session(namespace="team") for _ in range(2)]
        await first.append([1] * 32)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.append, [2] * 32)
                await until_waiting(rt, 1)
                rt.set_quota("team", None)
        assert second.position == 32


async def test_the_status_shows_each_namespace() -> None:
    quota = Quota(state_bytes=50_000, sessions=7, waiting=3)
    async with fake_runtime(limit_bytes=ROOMY, quotas={"team": quota}) as rt:
        session, _other = await rt.session(namespace="team"), await rt.session(namespace="x")
        await session.append([1] * 8)
        shown = account(rt.status(), "team")
        held = FIXED + LOGITS + 2 * PAGE
        assert shown == NamespaceStatus("team", 1, held, 0, 0, 50_000, 7, 3)
        assert account(rt.status(), "x") == NamespaceStatus("x", 1, 0, 0, 0, None, None, None)
        status = rt.status()
        assert status_from_json(status.to_json()) == status


@pytest.mark.parametrize("wrong", [{"state_bytes": 0}, {"sessions": -1}, {"waiting": -1}, {"sessions": 1.5}])
def test_a_quota_is_made_of_whole_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(BadParameter, match=next(iter(wrong))):
        Quota(**wrong)


class Move(NamedTuple):
    """One thing that somebody does: which, of whose, and how much."""

    namespace: str
    kind: str
    which: int
    tokens: int


QUOTAS = {
    "small": Quota(state_bytes=RUNNING + 12 * PAGE, sessions=3, waiting=2),
    "large": Quota(state_bytes=2 * RUNNING + 40 * PAGE, sessions=6),
}
FREE = "free"
moves = st.lists(
    st.builds(
        Move,
        st.sampled_from([*QUOTAS, FREE]),
        st.sampled_from(["open", "append", "append", "generate", "fork", "close", "begin alike"]),
        st.integers(0, 9),
        st.integers(1, 40),
    ),
    min_size=4,
    max_size=40,
)


@settings(deadline=None)
@given(moves=moves, stored=st.booleans())
def test_whatever_is_done_no_namespace_passes_its_quota_and_the_others_never_wait(
    moves: list[Move], stored: bool
) -> None:
    """What has a quota is left to itself, many calls at once; who has none does one thing after the other, and each
    must get through."""
    asyncio.run(asyncio.wait_for(_play(moves, stored=stored), 60))


async def _play(moves: list[Move], *, stored: bool) -> None:
    sessions: dict[str, list[Session]] = {name: [] for name in (*QUOTAS, FREE)}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))) if stored else None
        rt = await stack.enter_async_context(
            fake_runtime(store=folder, limit_bytes=ROOMY, limits=Limits(8, 3), policy=KEEPING, quotas=QUOTAS)
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, rt)
            for move in moves:
                if move.namespace == FREE:
                    with anyio.fail_after(10):
                        await _do(rt, sessions[FREE], move)
                else:
                    tasks.start_soon(_do_or_be_refused, rt, sessions[move.namespace], move)
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        _within(rt)


async def _watch(rt: Runtime) -> None:
    while True:
        _within(rt)
        await anyio.sleep(0.0005)  # a loop that never rests keeps the store's threads from running


def _within(rt: Runtime) -> None:
    shown = rt.status().namespaces
    for one in shown:
        assert one.quota_bytes is None or one.live_bytes + one.reserved_bytes <= one.quota_bytes
        assert one.quota_sessions is None or one.sessions <= one.quota_sessions
        assert one.quota_waiting is None or one.waiting <= one.quota_waiting
    assert sum(one.live_bytes for one in shown) == rt.pool.live_bytes


async def _do_or_be_refused(rt: Runtime, sessions: list[Session], move: Move) -> None:
    with suppress(OverQuota, SessionBusy, SessionClosed):
        await _do(rt, sessions, move)


async def _do(rt: Runtime, sessions: list[Session], move: Move) -> None:
    if move.kind == "open" or not sessions:
        sessions.append(await rt.session(namespace=move.namespace))
        return
    session = sessions[move.which % len(sessions)]
    match move.kind:
        case "append":
            await session.append([move.which] * move.tokens)
        case "generate" if session.position:
            ids = session.tokens().tolist()
            said = await session.generate(SamplingParams(temperature=0, max_tokens=move.tokens)).collect()
            assert list(said.tokens) == greedy_by_hand(ids, move.tokens)
        case "fork":
            sessions.append(await session.fork())
        case "begin alike":
            begun = await rt.session(namespace=move.namespace)
            sessions.append(begun)
            await begun.append([*session.tokens().tolist(), move.which])
        case "close":
            sessions.remove(session)
            await session.close()
