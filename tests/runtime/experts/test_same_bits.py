"""The engine's answers are the same bits however few experts fit in memory and wherever they are read from."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.runtime.bench.tiny import TinyModel
from serai.runtime.checks.evaluation import evaluate
from serai.runtime.engine import Engine
from serai.runtime.experts.access import Experts, Visit
from serai.runtime.experts.disk import DiskCalls
from serai.runtime.experts.errors import ExpertUnreadable
from serai.runtime.experts.pack import pack_model
from serai.runtime.experts.policy import SlotState
from serai.runtime.experts.source import DirectSource
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.models.kimi import KimiModel
from serai.runtime.models.look_ahead import LookAhead
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.weights import MoeWeights
from serai.runtime.state import StatePool
from serai.runtime.step import AbortFlag, Segment, StepPlan, StepResult
from tests.runtime.experts.faults import FailingReads, SlowReads
from tests.runtime.experts.packing import K3, LINEAR, written

Stepped = tuple[StepResult, list[NDArray[np.float32]]]
"""A result, and the logits of each session."""

TOKENS = np.random.default_rng(4).integers(0, 96, 12)


@contextmanager
def loaded(folder: Path, slots: int | None, precision: Precision = Precision.EXACT) -> Iterator[LoadedModel]:
    found = find_model(folder)
    model = load_model(found, precision, max_rows=16, expert_slots=slots)
    try:
        yield model
    finally:
        experts_of(model).close()
        found.files.close()


def experts_of(model: LoadedModel) -> Experts:
    assert model.model.experts is not None
    return model.model.experts


def answers(model: LoadedModel) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in evaluate(model, TOKENS, 7, greedy=4).items()}


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("model", [K3, LINEAR], ids=["k3", "linear"])
def test_budget_and_source_change_no_bit(tmp_path: Path, model: TinyModel, precision: Precision) -> None:
    """B13: all experts, most, as many as a token needs, one; the release and the packed model."""
    folder = written(tmp_path / "m", model, shards=2)
    with loaded(folder, None, precision) as resident:
        expected = answers(resident)
        identity = resident.fingerprint
    found = find_model(folder)
    pack_model(found.config, found.files, found.prefix, tmp_path / "p")
    found.files.close()
    for place, slots in (("m", 7), ("m", 2), ("m", 1), ("p", None), ("p", 2)):
        with loaded(tmp_path / place, slots, precision) as streamed:
            assert answers(streamed) == expected
            assert streamed.fingerprint == identity
            if slots is not None:
                experts = experts_of(streamed)
                assert isinstance(experts, StreamedExperts)
                experts.check()
                assert experts.cache.nbytes == slots * experts.layout.record_bytes


def with_disk(folder: Path, calls: DiskCalls, slots: int) -> tuple[LoadedModel, StreamedExperts]:
    """A model whose experts are read through `calls`, one at a time."""
    found = find_model(folder)
    model = load_model(found, Precision.EXACT, max_rows=16, expert_slots=1)
    experts_of(model).close()
    experts = StreamedExperts(DirectSource(found.config, found.files, found.prefix, calls), slots, 1)
    streamed = KimiModel(
        found.config, model.model.weights, experts, model.layout, max_rows=16, fast=False, looks_ahead=True
    )
    return LoadedModel(streamed, model.layout, model.fingerprint), experts


def step(
    model: LoadedModel, pool: StatePool, prompts: list[NDArray[np.int32]], abort: AbortFlag | None = None
) -> Stepped:
    """One step that feeds each prompt to a session of its own; the drafts are abandoned afterwards."""
    states = [pool.empty() for _ in prompts]
    drafts = [pool.draft(state, len(prompt), with_logits=True) for state, prompt in zip(states, prompts, strict=True)]
    segments = [Segment(*one) for one in zip(states, prompts, drafts, strict=True)]
    result = Engine(model.model, model.layout).step(StepPlan(tuple(segments), abort or AbortFlag()))
    logits = [draft.logits.array.copy() for draft in drafts if draft.logits is not None]
    for draft, state in zip(drafts, states, strict=True):
        draft.abandon()
        state.release()
    return result, logits


@pytest.mark.parametrize("model", [K3, LINEAR], ids=["k3", "linear"])
def test_each_layer_is_guessed_before_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: TinyModel
) -> None:
    """From a part of this layer's sum, which leaves no trace; and the first one from the embedding on."""
    folder = written(tmp_path / "m", model)
    prompts = [np.array([token], dtype=np.int32) for token in range(5)]
    with loaded(folder, None) as resident:
        _, expected = step(resident, StatePool(resident.layout), prompts)
    # Longer than all that is computed meanwhile takes, also on a busy machine.
    streamed, experts = with_disk(folder, SlowReads(0.1), 6)
    early, guess = [], LookAhead.before_the_last

    def noted(
        self: LookAhead,
        weights: MoeWeights,
        each: NDArray[np.float32],
        pick_weights: NDArray[np.float32],
        shared: NDArray[np.float32] | None,
    ) -> None:
        before = experts.status.cache.guessed
        assert experts.cache.count(SlotState.LOADING)
        guess(self, weights, each, pick_weights, shared)
        early.append(experts.status.cache.guessed - before)

    first = experts.cache.layers[0]
    seen: list[tuple[str, int]] = []

    def noted_guess(layer: int, ids: NDArray[np.int32]) -> None:
        seen.append(("guess", layer))
        StreamedExperts.guess(experts, layer, ids)

    def noted_visit(layer: int, ids: NDArray[np.int32], picks: int, *, expected: Visit | None = None) -> Visit:
        seen.append(("visit", layer))
        return StreamedExperts.visit(experts, layer, ids, picks, expected=expected)

    monkeypatch.setattr(LookAhead, "before_the_last", noted)
    monkeypatch.setattr(experts, "guess", noted_guess)
    monkeypatch.setattr(experts, "visit", noted_visit)
    _, logits = step(streamed, StatePool(streamed.layout, poison=True), prompts)
    assert [one.tobytes() for one in logits] == [one.tobytes() for one in expected]
    assert any(early)
    assert seen[: first + 2] == [*[("guess", first)] * (first + 1), ("visit", first)], (
        "before the first layer, after each"
    )
    experts.check()
    experts.close()


def test_an_unreadable_expert_ends_only_the_sessions_that_needed_it(tmp_path: Path) -> None:
    """B25, EIO: the others' answers keep their bits."""
    folder = written(tmp_path / "m", LINEAR)
    prompts = [np.array([token], dtype=np.int32) for token in range(6)]
    with loaded(folder, None) as resident:
        _, expected = step(resident, StatePool(resident.layout), prompts)
    calls = FailingReads(lambda number: number in (0, 1))  # the first expert read, both times
    model, experts = with_disk(folder, calls, 4)
    calls.armed = True
    result, logits = step(model, StatePool(model.layout), prompts)
    failed = [segment.error is not None for segment in result.segments]
    assert 0 < sum(failed) < len(failed)
    for number, segment in enumerate(result.segments):
        if failed[number]:
            assert isinstance(segment.error, ExpertUnreadable)
            assert segment.error.path == folder / "model.safetensors"
        else:
            assert logits[number].tobytes() == expected[number].tobytes()
    experts.check()
    again, logits = step(model, StatePool(model.layout), prompts)
    assert all(segment.error is None for segment in again.segments)
    assert [one.tobytes() for one in logits] == [one.tobytes() for one in expected]
    experts.close()


def test_a_truncated_shard_is_an_error_of_the_step_and_the_engine_lives(tmp_path: Path) -> None:
    """B25."""
    folder = written(tmp_path / "m", LINEAR)
    model, experts = with_disk(folder, DiskCalls(), 2)
    os.truncate(folder / "model.safetensors", 4096)
    prompt = [np.array([1, 2], dtype=np.int32)]
    for _ in range(2):
        result, _ = step(model, StatePool(model.layout), prompt)
        assert "ended at 4,096 of" in str(result.segments[0].error)
    assert "ended at 4,096 of" in experts.status.degraded
    experts.check()
    experts.close()


def test_an_aborted_step_gives_every_slot_back(tmp_path: Path) -> None:
    model, experts = with_disk(written(tmp_path / "m", LINEAR), DiskCalls(), 2)
    abort = AbortFlag()
    abort.set()
    result, _ = step(model, StatePool(model.layout), [np.array([1, 2], dtype=np.int32)], abort)
    assert result.aborted
    experts.check()
    experts.close()
