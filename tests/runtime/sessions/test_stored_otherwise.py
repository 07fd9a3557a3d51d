"""Snapshots that lie otherwise in memory, or are of another build, among those of this build: what is replayed of them,
and when they are written anew.
"""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.checkpoints.snapshot import new_snapshot
from serai.checkpoints.store import Store
from serai.runtime.runtime import Runtime
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.scripted import LAYOUT, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

PANELS = (1, 1, 2, 16)
IDS = [1, 2, 3, 4, 5, 6, 7, 8]

PAGES: dict[str, Any] = {"page_tokens": 8}
ROWS: dict[str, Any] = {"kda_shape": LAYOUT.kda_shape}
IN_OTHER_PLACES = pytest.mark.parametrize("other", [PAGES, ROWS, PAGES | ROWS], ids=["pages", "KDA by rows", "both"])


def runtime_of(store: Path) -> AbstractAsyncContextManager[Runtime]:
    model = ScriptedModel(kda_shape=PANELS)
    made_by = replace(FINGERPRINT, state_layout=model.layout.describe())
    return fake_runtime(model, store=store, fingerprint=made_by)


@dataclass(frozen=True, slots=True)
class Points:
    """Three on one way, each with a snapshot: after six of `IDS`, after all, and past them at the session's end."""

    early: str
    whole: str
    end: str


async def stored_points(store: Path) -> Points:
    async with runtime_of(store) as rt:
        session, points = await rt.session(), []
        for ids in (IDS[:6], IDS[6:], [9]):
            await session.append(ids)
            points.append(str(await session.pause()))
            session = await rt.resume(points[-1])
        return Points(*points)


def store_otherwise(folder: Path, node_id: str, *, build: str = FINGERPRINT.build, **layout: Any) -> None:
    """Have a node's snapshot as another build would have stored it, of numbers that nobody may read."""
    with Store.open(str(folder)) as store:
        info = store.snapshot_info(node_id)
        snapshot = new_snapshot(replace(info.layout, **layout), info.position)
        for array in (snapshot.kda, snapshot.conv, snapshot.logits, *(page.rows for page in snapshot.pages)):
            assert array is not None
            array[...] = 1
        made_by = replace(info.fingerprint, state_layout=snapshot.layout.describe(), build=build)
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
