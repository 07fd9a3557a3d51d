"""Pausing, crashing and resuming: the timeline goes on as if nothing had happened."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from serai.checkpoints.nodes import NodeRecord
from serai.checkpoints.snapshot import Fingerprint, Snapshot
from serai.checkpoints.store import Store
from serai.runtime import SamplingParams
from serai.runtime.errors import (
    BadParameter,
    ModelMismatch,
    SessionClosed,
    SessionGone,
)
from tests.runtime.fake_runtime import FINGERPRINT, fake_runtime
from tests.runtime.scripted import GREEDY, LAYOUT, SAMPLED, ScriptedModel, hash_of, logits_of

pytestmark = pytest.mark.anyio

PANELS = (1, 1, 2, 16)
"""The shape of the scripted model's KDA state in panels; the one it has else is a matrix by rows, as it once was."""


async def test_a_seed_that_was_drawn_is_durable_before_the_first_token_is_shown(tmp_path: Path) -> None:
    """Contract, g: whoever crashes after one token draws the same ones again, on the same branch."""
    unseeded = SamplingParams(temperature=0.8, max_tokens=12)
    async with fake_runtime(store=tmp_path / "store") as runtime:
        root = await runtime.session()
        await root.append([3, 1, 4])
        fork = await root.fork()
        generation = fork.generate(unseeded)
        shown = [(await anext(generation)).id]
        # What a crash would leave now.
        await anyio.to_thread.run_sync(shutil.copytree, tmp_path / "store", tmp_path / "left")
        shown += [token.id async for token in generation]
        seed, branch, fork_id = fork.timeline.turn.seed, fork.timeline.branch, fork.id
    assert seed is not None
    async with fake_runtime(store=tmp_path / "left") as runtime:
        again = await runtime.resume(fork_id)
        assert (again.timeline.turn.seed, again.timeline.branch) == (seed, branch)
        params = SamplingParams.from_record({**unseeded.to_record(), "seed": seed})
        assert list((await again.generate(params).collect()).tokens) == shown


async def test_pause_and_resume_at_every_boundary_of_a_sampled_run(tmp_path: Path) -> None:
    """B42, B43: resuming feeds nothing, draws the same token, and penalties and random numbers go on."""
    async with fake_runtime(store=tmp_path / "a") as rt:
        session = await rt.session()
        await session.append([2, 7, 1])
        expected = (await session.generate(SAMPLED).collect()).tokens
    for cut in range(len(expected)):
        store = tmp_path / f"cut{cut}"
        async with fake_runtime(store=store) as rt:
            session = await rt.session()
            await session.append([2, 7, 1])
            if cut:
                first = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": cut})
                assert (await session.generate(first).collect()).tokens == expected[:cut]
            point = await session.pause()
            with pytest.raises(SessionClosed, match="was paused"):
                session.generate()
        async with fake_runtime(store=store) as rt:
            session = await rt.resume(str(point))
            assert session.position == 3 + cut
            rest = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": len(expected) - cut})
            assert (await session.generate(rest).collect()).tokens == expected[cut:]
            assert rt.counters.prefilled_tokens == 0


async def test_what_was_said_survives_a_crash_and_is_replayed(tmp_path: Path) -> None:
    """Ids are durable when an append or a generation returns; a missing snapshot is replayed."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        name = session.id
        await session.append([1, 2, 3])
        done = await session.generate(GREEDY).collect()
        expected = [1, 2, 3, *done.tokens]
    async with fake_runtime(store=tmp_path) as rt:
        again = await rt.resume(name)
        assert again.id == name
        assert again.tokens().tolist() == expected
        assert rt.counters.prefilled_tokens == len(expected)
        np.testing.assert_array_equal(await again.logits(), logits_of(hash_of(expected)))


@pytest.mark.parametrize("as_is", [False, True])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"page_tokens": 8}, "with pages of another size"),
        ({"kda_shape": PANELS}, "with KDA states in another order"),
        ({"kda_shape": PANELS, "page_tokens": 8}, "with KDA states in another order"),
    ],
    ids=["pages", "KDA", "both"],
)
async def test_a_state_that_lies_otherwise_in_memory_is_replayed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, Any], said: str, as_is: bool
) -> None:
    """Where its numbers lie decides no bits (contract, b), so who is resumed is the same and exact."""
    caplog.set_level(logging.INFO)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5, 6])
        point = await session.pause()
    model = ScriptedModel(**other)
    laid_out = replace(FINGERPRINT, state_layout=model.layout.describe())
    async with fake_runtime(model, store=tmp_path, fingerprint=laid_out) as rt:
        again = await rt.resume(point, as_is=as_is)
        assert f"not used on the way to node {point}: 1 {said}" in caplog.text
        assert (rt.counters.prefilled_tokens, again.inexact) == (6, False)
        assert np.array_equal(await again.logits(), logits_of(hash_of([1, 2, 3, 4, 5, 6])))
        await rt.resume(await again.pause(), as_is=as_is)
        assert rt.counters.prefilled_tokens == 6, "it is stored as this model has it now"
    async with fake_runtime(model, store=tmp_path, fingerprint=replace(laid_out, weights="others")) as rt:
        with pytest.raises(ModelMismatch, match="weights"):
            await rt.resume(point, as_is=as_is)


@pytest.mark.parametrize(
    "other",
    [
        {"kda_shape": (2, 1, 2, 2), "conv_shape": (2, 3, 3, 2)},
        {"kda_shape": (2, 1, 2, 16), "conv_shape": (2, 3, 3, 2)},
        {"kda_shape": (1, 2, 2, 2)},
        {"kda_shape": (1, 2, 2, 1)},
        {"kda_shape": (1, 1, 4, 16)},
    ],
    ids=["layers", "layers in panels", "heads", "columns", "key channels"],
)
async def test_a_state_of_other_sizes_is_of_another_model(tmp_path: Path, other: dict[str, Any]) -> None:
    """Only the two orders in which builds have had the same numbers may stand for each other."""
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
    model = ScriptedModel()
    model.layout = replace(LAYOUT, **other)
    laid_out = replace(FINGERPRINT, state_layout=model.layout.describe())
    async with fake_runtime(model, store=tmp_path, fingerprint=laid_out) as rt:
        with pytest.raises(ModelMismatch, match="state_layout"):
            await rt.resume(point)


async def test_another_build_replays_unless_told_otherwise(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
    async with fake_runtime(store=tmp_path, fingerprint=replace(FINGERPRINT, build="newer")) as rt:
        replayed = await rt.resume(point)
        assert rt.counters.prefilled_tokens == 3
        assert not replayed.inexact
        as_is = await rt.resume(point, as_is=True)
        assert rt.counters.prefilled_tokens == 3
        assert as_is.inexact
        assert (await as_is.fork()).inexact
    async with fake_runtime(store=tmp_path, fingerprint=replace(FINGERPRINT, weights="others")) as rt:
        with pytest.raises(ModelMismatch, match="weights"):
            await rt.resume(point)


async def test_resuming_twice_branches_off(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        point = await session.pause()
        first = await rt.resume(point)
        second = await rt.resume(point)
        assert first.id == session.id
        assert second.id != first.id
        params = SamplingParams(temperature=1.5, seed=3, max_tokens=6)
        same = (await first.generate(params).collect()).tokens
        assert (await second.generate(params).collect()).tokens == same, "continuing a node keeps its random branch"


async def test_resuming_what_was_never_stored_says_so(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path) as rt:
        with pytest.raises(SessionGone):
            await rt.resume("nothing")
    async with fake_runtime() as rt:
        with pytest.raises(BadParameter, match="store"):
            await rt.resume("nothing")
        session = await rt.session()
        await session.append([1])
        with pytest.raises(BadParameter, match="store"):
            await session.pause()
        assert session.is_open


async def test_a_state_is_read_straight_into_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a second whole copy: a state that just fits the budget can be resumed within it."""
    loaded: list[Snapshot] = []
    load = Store.load

    def noting(self: Store, node_id: str, fingerprint: Fingerprint | None = None, **options: Any) -> Snapshot:
        loaded.append(load(self, node_id, fingerprint, **options))
        return loaded[-1]

    monkeypatch.setattr(Store, "load", noting)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5])
        session = await rt.resume(await session.pause())
        state = session.held
        assert state is not None
        assert state.fixed is not None
        assert np.shares_memory(loaded[0].kda, state.fixed.array)
        assert all(
            np.shares_memory(page.rows, held.array)
            for page, held in zip(loaded[0].pages, state.table.pages, strict=True)
        )


async def test_a_session_that_was_moved_out_comes_back_without_reading_its_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has them in memory; of a long session they were a quarter of what coming back took."""
    asked: list[str] = []
    path = Store.path

    def noted(store: Store, node_id: str) -> list[NodeRecord]:
        asked.append(node_id)
        return path(store, node_id)

    monkeypatch.setattr(Store, "path", noted)
    async with fake_runtime(store=tmp_path) as rt:
        session = await rt.session()
        await session.append([1, 2, 3])
        before = await session.logits()
        assert await session.demote()
        assert (await session.logits() == before).all()
        assert asked == []
        assert await session.demote()
        store = rt._services.journal.store
        assert store is not None
        await anyio.to_thread.run_sync(store.drop_snapshot, session.head)
        assert (await session.logits() == before).all()
        assert asked == [session.head], "without a snapshot they are read once more"
