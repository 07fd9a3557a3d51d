"""Stored states that look sound and fail at their first use: one request hears of it, and nobody meets them again."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from serai.checkpoints.store import Store
from serai.runtime import SamplingParams, Session
from serai.runtime.errors import EngineFailed, LogitsNotFinite
from serai.runtime.models.batch import Batch
from serai.runtime.runtime import Runtime
from serai.runtime.services import Policy
from serai.runtime.sessions.journal import Point
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.scripted import ScriptedModel, floats_at, greedy_by_hand, hash_of, logits_of

pytestmark = pytest.mark.anyio

TOLD = [1, 2, 3, 4]
WRONG = 64_000.0
"""What the scripted model's state is made to hold; no prefix used here has this hash."""


def spoiled() -> ScriptedModel:
    """A model whose logits are no numbers one token after a state that holds `WRONG`."""
    wrong = {hash_of([token], int(WRONG)) for token in range(16)}
    return ScriptedModel(spoil=lambda value: value in wrong)


def break_down(batch: Batch, layer: int) -> None:
    """Before a layer of a step that goes on from `WRONG`."""
    if any(address and floats_at(int(address), 1)[0] == WRONG for address in batch.state_in):
        raise RuntimeError("no such state")


async def stored(folder: Path) -> Point:
    """A session that was paused; then its snapshot was replaced by a sound one of a state that no model gives."""
    async with fake_runtime(store=folder) as rt:
        session = await rt.session()
        await session.append(TOLD)
        point = await session.pause()
    with Store.open(str(folder)) as store:
        snapshot = store.load(point.id)
        wrong = replace(snapshot, kda=np.full_like(snapshot.kda, WRONG))
        store.save(point.id, wrong, FINGERPRINT, reason="test")
    return point


async def append(session: Session) -> list[int]:
    await session.append([9])
    return [*TOLD, 9]


async def generate(session: Session) -> list[int]:
    await session.generate(SamplingParams(temperature=0, max_tokens=3)).collect()
    return [*TOLD, *greedy_by_hand(TOLD, 3)]


@pytest.mark.parametrize("use", [append, generate])
async def test_one_request_fails_and_the_next_is_served_from_the_token_ids(
    tmp_path: Path, use: Callable[[Session], Coroutine[Any, Any, list[int]]]
) -> None:
    """B59."""
    point = await stored(tmp_path)
    async with fake_runtime(spoiled(), store=tmp_path) as rt:
        session = await rt.resume(point)
        fork = await session.fork()
        with pytest.raises(LogitsNotFinite, match="position 5"):
            await use(session)
        assert session.tokens().tolist() == TOLD
        assert rt.store is not None
        assert not rt.store.has_snapshot(point.id), "it is not loaded again"
        assert rt.store.sizes().snapshots == 1, "it is kept for inspection"
        for one in (session, fork):
            wanted = await use(one)
            assert one.tokens().tolist() == wanted
            assert (await one.logits()).tobytes() == logits_of(hash_of(wanted)).tobytes()
        rt.check()
    async with fake_runtime(spoiled(), store=tmp_path) as rt:
        session = await rt.resume(point)
        assert rt.counters.prefilled_tokens == len(TOLD)
        assert (await session.logits()).tobytes() == logits_of(hash_of(TOLD)).tobytes()


async def test_what_others_would_have_begun_from_is_forgotten_too(tmp_path: Path) -> None:
    """A new session that begins with the same tokens finds the snapshot by them."""
    await stored(tmp_path)

    async def begin(rt: Runtime) -> None:
        session = await rt.session()
        await session.append([*TOLD, 9])
        assert (await session.logits()).tobytes() == logits_of(hash_of([*TOLD, 9])).tobytes()

    async with fake_runtime(spoiled(), store=tmp_path, policy=Policy()) as rt:
        with pytest.raises(LogitsNotFinite):
            await begin(rt)
        await begin(rt)
        rt.check()


async def test_a_state_moved_out_before_anybody_tries_again_is_not_written_down(tmp_path: Path) -> None:
    point = await stored(tmp_path)
    async with fake_runtime(spoiled(), store=tmp_path) as rt:
        session = await rt.resume(point)
        with pytest.raises(LogitsNotFinite):
            await session.append([9])
        assert await session.demote()
        assert rt.store is not None
        assert not rt.store.has_snapshot(point.id)
        assert (await session.logits()).tobytes() == logits_of(hash_of(TOLD)).tobytes()


async def test_a_state_that_breaks_the_engine_breaks_it_once(tmp_path: Path) -> None:
    """The engine is gone for this process; the next one does not go the same way."""
    point = await stored(tmp_path)

    async with fake_runtime(ScriptedModel(before_layer=break_down), store=tmp_path) as rt:
        session = await rt.resume(point)
        with pytest.raises(EngineFailed, match="no such state"):
            await session.append([9])
    async with fake_runtime(ScriptedModel(before_layer=break_down), store=tmp_path) as rt:
        session = await rt.resume(point)
        await session.append([9])
        assert (await session.logits()).tobytes() == logits_of(hash_of([*TOLD, 9])).tobytes()


async def test_of_several_resumed_at_once_only_the_one_that_broke_the_engine_is_blamed(tmp_path: Path) -> None:
    point = await stored(tmp_path)
    async with fake_runtime(store=tmp_path) as rt:
        others = []
        for number in range(4):
            session = await rt.session()
            await session.append([number, 5, 6])
            others.append(await session.pause())

    async with fake_runtime(ScriptedModel(before_layer=break_down), store=tmp_path) as rt:
        sessions = [await rt.resume(one) for one in (*others[:2], point, *others[2:])]
        failed = []

        async def use(session: Session) -> None:
            try:
                await session.append([9])
            except EngineFailed:
                failed.append(session)

        async with anyio.create_task_group() as tasks:
            for session in sessions:
                tasks.start_soon(use, session)
        assert sessions[2] in failed
        assert rt.store is not None
        assert [rt.store.has_snapshot(one.id) for one in (*others, point)] == [True] * 4 + [False]


async def test_a_state_that_served_once_is_not_blamed_later(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append(TOLD)
        point = await session.pause()
    ends = hash_of([*TOLD, 9, 8])
    async with fake_runtime(ScriptedModel(spoil=lambda value: value == ends), store=tmp_path) as rt:
        session = await rt.resume(point)
        fork = await session.fork()
        await session.append([9])
        with pytest.raises(LogitsNotFinite):
            await session.append([8])
        with pytest.raises(LogitsNotFinite):
            await fork.append([9, 8])
        assert rt.store is not None
        assert rt.store.has_snapshot(point.id)
