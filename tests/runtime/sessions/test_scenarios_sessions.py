"""Scenarios from the field: which session is meant, and two who mean the same one."""

import asyncio
import threading
from pathlib import Path

import anyio
import numpy as np
import pytest

from serai.checkpoints.store import Store
from serai.runtime import Session
from serai.runtime.errors import (
    BadParameter,
    NothingToContinue,
    SessionBusy,
    SessionGone,
)
from serai.runtime.services import Policy
from serai.runtime.sessions.events import EventKind
from serai.runtime.state import session_bytes
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import (
    GREEDY,
    LAYOUT,
    greedy_by_hand,
    hash_of,
    logits_of,
)

pytestmark = pytest.mark.anyio


KEEPING = Policy(reuse=True, snapshot_every=16, save_after_tokens=4)


def everything_under(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


async def equals_cold(session: Session, ids: list[int]) -> bool:
    same_ids = session.tokens().tolist() == ids
    return same_ids and bool(np.array_equal(await session.logits(), logits_of(hash_of(ids))))


class SlowDisk:
    """Holds up the store's loads until it is told to let them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads = 0
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()
        load = Store.load

        def slow(store: Store, *arguments: object, **named: object) -> object:
            self.loads += 1
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self._go_on.wait(timeout=10), "the test lets it go on"
            return load(store, *arguments, **named)  # type: ignore[arg-type]  # whatever the runtime calls it with

        monkeypatch.setattr(Store, "load", slow)

    def go_on(self) -> None:
        self._go_on.set()


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
