"""Snapshots that are of no use here, as they lie otherwise in memory or are of another build, among others: what is
replayed for want of them, and what is written then.
"""

import logging
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.checkpoints.reports import SnapshotInfo
from serai.checkpoints.snapshot import new_snapshot
from serai.checkpoints.store import Store
from serai.runtime.errors import ModelMismatch
from serai.runtime.runtime import Runtime
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import FINGERPRINT, ONLY_SESSIONS, fake_runtime
from tests.runtime.scripted import LAYOUT, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

PANELS = (1, 1, 2, 16)
IDS = [1, 2, 3, 4, 5, 6, 7, 8]

EAGER = Policy(reuse=False, save_after_tokens=4)

PAGES: dict[str, Any] = {"page_tokens": 8}
ROWS: dict[str, Any] = {"kda_shape": LAYOUT.kda_shape}
IN_OTHER_PLACES = pytest.mark.parametrize("other", [PAGES, ROWS, PAGES | ROWS], ids=["pages", "KDA by rows", "both"])


def runtime_of(store: Path, policy: Policy = ONLY_SESSIONS) -> AbstractAsyncContextManager[Runtime]:
    model = ScriptedModel(kda_shape=PANELS)
    made_by = replace(FINGERPRINT, state_layout=model.layout.describe())
    return fake_runtime(model, store=store, fingerprint=made_by, policy=policy)


@dataclass(frozen=True, slots=True)
class Points:
    """Three on one way, each with a snapshot: after six of `IDS`, after all, and past them at the session's end."""

    early: str
    whole: str
    end: str


async def stored_points(store: Path) -> Points:
    async with runtime_of(store) as rt:
        session = await rt.session()
        points: list[str] = []
        for ids in (IDS[:6], IDS[6:], [9]):
            await session.append(ids)
            points.append(str(await session.pause()))
            session = await rt.resume(points[-1])
        return Points(*points)


def store_otherwise(
    folder: Path, node_id: str, *, build: str = FINGERPRINT.build, precision: str = FINGERPRINT.precision, **layout: Any
) -> None:
    """Have a node's snapshot as another build would have stored it, of numbers that nobody may read."""
    with Store.open(str(folder)) as store:
        info = store.snapshot_info(node_id)
        snapshot = new_snapshot(replace(info.layout, **layout), info.position)
        for array in (snapshot.kda, snapshot.conv, snapshot.logits, *(page.rows for page in snapshot.pages)):
            assert array is not None
            array[...] = 1
        made_by = replace(info.fingerprint, state_layout=snapshot.layout.describe(), build=build, precision=precision)
        store.save(node_id, snapshot, made_by, reason=info.reason)


@pytest.mark.parametrize("other", [PAGES, ROWS, {"build": "another"}], ids=["pages", "KDA by rows", "build"])
async def test_what_is_not_used_hides_nothing_before_it(tmp_path: Path, other: dict[str, Any]) -> None:
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.whole, **other)
    async with runtime_of(tmp_path) as rt:
        assert await rt.replay_tokens(points.whole) == 2
        session = await rt.resume(points.whole)
        assert (rt.counters.prefilled_tokens, session.inexact) == (2, False)
        assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))


@pytest.mark.parametrize("background", [False, True], ids=["at once", "in the background"])
@IN_OTHER_PLACES
async def test_what_lies_otherwise_is_written_anew_once_it_was_replayed(
    tmp_path: Path, other: dict[str, Any], background: bool
) -> None:
    """Though nobody pauses there: the session has gone on, so whoever resumes the point branches off."""
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.whole, **other)
    async with runtime_of(tmp_path) as rt:
        session = await rt.resume(points.whole, background=background)
        assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))
        await rt.settle()
    async with runtime_of(tmp_path) as rt:
        again = await rt.resume(points.whole)
        assert (rt.counters.prefilled_tokens, again.inexact) == (0, False)
        assert np.array_equal(await again.logits(), logits_of(hash_of(IDS)))
    with Store.open(str(tmp_path)) as store:
        assert store.snapshot_info(points.whole).reason == "pause", "what was asked for stays asked for"


async def test_a_replay_from_another_builds_state_is_not_written_over_one_that_is_exact(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.early, build="another")
    store_otherwise(tmp_path, points.whole, **PAGES)
    async with runtime_of(tmp_path) as rt:
        session = await rt.resume(points.whole, as_is=True)
        assert (rt.counters.prefilled_tokens, session.inexact) == (2, True)
        await rt.settle()
    async with runtime_of(tmp_path) as rt:
        session = await rt.resume(points.whole)
        assert (rt.counters.prefilled_tokens, session.inexact) == (8, False)
        assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))


async def test_another_builds_state_stays_for_who_wants_it_as_it_is(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.whole, build="another")
    async with runtime_of(tmp_path) as rt:
        await rt.resume(points.whole)
        await rt.settle()
        before = rt.counters.prefilled_tokens
        assert (await rt.resume(points.whole, as_is=True)).inexact
        assert rt.counters.prefilled_tokens == before


async def test_an_ancestors_snapshot_of_another_model_hinders_nobody(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.early, precision="another")
    store_otherwise(tmp_path, points.whole, build="another")
    async with runtime_of(tmp_path) as rt:
        for _ in range(2):
            session = await rt.resume(points.whole)
            assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))
            with pytest.raises(ModelMismatch, match="precision"):
                await rt.resume(points.early)
        assert rt.counters.prefilled_tokens == 2 * len(IDS)


async def test_a_snapshot_that_is_erased_after_it_was_found_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = await stored_points(tmp_path)
    nearest = Store.nearest_snapshot

    def erased(store: Store, node_id: str) -> str | None:
        found = nearest(store, node_id)
        if found == points.whole:
            store.drop_snapshot(found)
        return found

    monkeypatch.setattr(Store, "nearest_snapshot", erased)
    async with runtime_of(tmp_path) as rt:
        session = await rt.resume(points.whole)
        assert rt.counters.prefilled_tokens == 2
        assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))


async def test_what_is_not_used_is_looked_at_once_and_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = await stored_points(tmp_path)
    for point in (points.early, points.whole):
        store_otherwise(tmp_path, point, build="another")
    store_otherwise(tmp_path, points.end, **PAGES)
    read: list[str] = []
    look = Store.snapshot_info

    def noted(store: Store, node_id: str) -> SnapshotInfo:
        read.append(node_id)
        return look(store, node_id)

    monkeypatch.setattr(Store, "snapshot_info", noted)
    caplog.set_level(logging.INFO)
    async with runtime_of(tmp_path) as rt:
        for number in (1, 2):
            await rt.resume(points.end)
            assert read == [points.end, points.whole, points.early]
            assert len(caplog.records) == number
            assert "1 with pages of another size, 2 of another build or SIMD path" in caplog.text
        assert (await rt.resume(points.whole, as_is=True)).inexact, "what may be used now is looked at again"
        await rt.settle()
        before = rt.counters.prefilled_tokens
        assert not (await rt.resume(points.end)).inexact
        assert rt.counters.prefilled_tokens == before, "and so is what was stored in its place"


async def bare_point(store: Path, points: Points) -> str:
    """A token past their end, without a snapshot."""
    async with runtime_of(store) as rt:
        session = await rt.resume(points.end)
        await session.append([10])
        await session.close()
        return session.head


@pytest.mark.parametrize("policy", [EAGER, ONLY_SESSIONS], ids=["eager", "not for so few"])
async def test_where_much_was_replayed_it_is_stored_though_nothing_was_there_before(
    tmp_path: Path, policy: Policy
) -> None:
    points = await stored_points(tmp_path)
    bare = await bare_point(tmp_path, points)
    for point in (points.early, points.whole, points.end):
        store_otherwise(tmp_path, point, **PAGES)
    async with runtime_of(tmp_path, policy) as rt:
        saver = rt._services.saver
        await rt.resume(bare)
        await rt.resume(bare)
        await rt.settle()
        assert saver.saved == (1 if policy is EAGER else 0), "once, whoever resumes it"
        await rt.resume(bare)
        assert rt.counters.prefilled_tokens == (20 if policy is EAGER else 30)
        assert len(rt._services.prefixes) == 0, "nobody else begins from it where nothing is reused"
        rt.check()


async def test_a_little_past_a_snapshot_nothing_is_stored(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    bare = await bare_point(tmp_path, points)
    async with runtime_of(tmp_path, EAGER) as rt:
        await rt.resume(bare)
        assert (rt.counters.prefilled_tokens, rt._services.saver.waiting) == (1, 0)


async def test_whoever_pauses_where_it_was_replayed_has_it_written_once(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    store_otherwise(tmp_path, points.end, **PAGES)
    async with runtime_of(tmp_path) as rt:
        session = await rt.resume(points.end)
        assert rt._services.saver.waiting == 1
        assert str(await session.pause()) == points.end
        assert rt._services.saver.waiting == 0
        await rt.settle()
        assert (rt._services.journal.saves, rt._services.saver.saved) == (1, 0)
        rt.check()


async def test_two_points_at_one_position_of_a_session_are_both_written_anew(tmp_path: Path) -> None:
    async with runtime_of(tmp_path) as rt:
        session = await rt.session()
        points: list[str] = []
        for ids in ([1, 2, 3], [4, 5], [6, 7]):
            if len(points) == 2:
                await session.rewind(position=3)
            await session.append(ids)
            points.append(str(await session.pause()))
            session = await rt.resume(points[-1])
    for point in points[1:]:
        store_otherwise(tmp_path, point, **PAGES)
    async with runtime_of(tmp_path) as rt:
        for point in points[1:]:
            assert (await rt.resume(point)).position == 5
        await rt.settle()
        assert rt._services.saver.saved == 2


async def test_what_was_set_aside_stays_to_be_looked_at(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    with Store.open(str(tmp_path)) as store:
        store.set_aside(points.whole, "a test says so")
    async with runtime_of(tmp_path, Policy(reuse=False, save_after_tokens=0)) as rt:
        await rt.resume(points.whole)
        assert (rt.counters.prefilled_tokens, rt._services.saver.waiting) == (2, 0)


async def test_a_snapshot_with_damaged_parts_is_written_anew(tmp_path: Path) -> None:
    points = await stored_points(tmp_path)
    with Store.open(str(tmp_path)) as store, store.reading_index() as index, index.change():
        for part in index.parts():
            index.mark_damaged(part.hash)
    async with runtime_of(tmp_path) as rt:
        for _ in range(2):
            session = await rt.resume(points.whole)
            assert np.array_equal(await session.logits(), logits_of(hash_of(IDS)))
            assert rt.counters.prefilled_tokens == len(IDS)
            await rt.settle()
