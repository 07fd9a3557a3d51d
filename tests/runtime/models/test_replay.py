"""Repeated steps have the bits of those taken through Python, whatever changes between them."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.checkpoints.snapshot import LatentType
from serai.kernels.threads import parallel_region
from serai.runtime.bench.tiny import TINY_MODELS, TinyModel, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.experts.access import ResidentExperts
from serai.runtime.models import kimi, replay
from serai.runtime.models.batch import batch_of
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.replay import FEW_ROWS, Replays
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import StatePool
from serai.runtime.step import Segment

VARIANTS = [
    (Precision.EXACT, Trunk.AS_STORED, None),
    (Precision.FAST, Trunk.Q8, None),
    (Precision.FAST, Trunk.Q4, LatentType.Q8),
]


def some_steps(loaded: LoadedModel) -> list[bytes]:
    """Three sessions of different lengths, in steps of one to three of them, that each get one or two tokens: the same
    number of rows is had by different sessions and pages."""
    rng, vocab = np.random.default_rng(0), loaded.model.config.vocab_size
    stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
    states = [stepper.run(rng.integers(0, vocab, count).astype(np.int32)) for count in (3, 60, 30)]
    for number in range(24):
        chosen, tokens = 1 + number % 3, 1 + number // 3 % 2
        first = number % (4 - chosen)
        parts = [(one, rng.integers(0, vocab, tokens).astype(np.int32)) for one in states[first : first + chosen]]
        states[first : first + chosen], _ = stepper.feed(parts)
    return [stepper.ended(state) for state in states]


@pytest.mark.parametrize("shape", TINY_MODELS.values(), ids=TINY_MODELS)
@pytest.mark.parametrize(("precision", "trunk", "latents"), VARIANTS)
def test_repeated_steps_have_the_bits_of_called_ones(
    shape: TinyModel,
    precision: Precision,
    trunk: Trunk,
    latents: LatentType | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_tiny_model(tmp_path / "m", shape)
    loaded = load_model(find_model(tmp_path / "m"), precision, max_rows=64, trunk=trunk, latents=latents)
    repeated = [some_steps(loaded) for _ in range(2)]
    assert set(loaded.model.replays.rows) == {1, 2, 3, 4, 6, 30, 60}
    monkeypatch.setattr(ResidentExperts, "addresses", lambda self, layer: None)
    visited = load_model(find_model(tmp_path / "m"), precision, max_rows=64, trunk=trunk, latents=latents)
    assert [some_steps(visited) for _ in range(2)] == repeated, "as of experts that come and go"
    visited.model.close()
    monkeypatch.setattr(Replays, "of", lambda self, batch: None)
    assert [some_steps(loaded)] * 2 == repeated
    loaded.model.close()


@pytest.mark.parametrize("resident", [True, False])
def test_a_pass_that_is_dropped_leaves_what_it_recorded_to_the_next(
    resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every pause: the calls between two pauses are recorded whole, and those after them by whoever gets there."""
    monkeypatch.setattr(kimi, "LAYERS_TOGETHER", 2)
    if not resident:  # then a layer is recorded in several pieces
        monkeypatch.setattr(ResidentExperts, "addresses", lambda self, layer: None)
    write_tiny_model(tmp_path / "m", next(iter(TINY_MODELS.values())))
    loaded = load_model(find_model(tmp_path / "m"), Precision.FAST, max_rows=64)
    model, pool = loaded.model, StatePool(loaded.layout, poison=True)
    stepper, tokens = Stepper(loaded, pool), np.arange(3, dtype=np.int32)
    wanted, whole = stepper.ended(stepper.run(tokens)), model.replays.nbytes
    recorded: list[int] = []
    ended = False
    for pauses in range(100):
        model.replays = Replays()
        before = pool.empty()
        draft = pool.draft(before, len(tokens), with_logits=True)
        passing = model.forward(batch_of([Segment(before, tokens + 7, draft)]))
        with parallel_region():
            ended = sum(1 for _ in itertools.islice(passing, pauses)) < pauses
        if ended:
            draft.abandon()
            before.release()
            break
        passing.close()
        draft.abandon()
        before.release()
        recorded.append(model.replays.nbytes)
        assert [stepper.ended(stepper.run(tokens)) for _ in range(2)] == [wanted] * 2, pauses
        assert model.replays.nbytes == whole
    assert ended
    assert len(recorded) > model.config.num_layers // 2
    assert recorded[0] == 0
    assert recorded == sorted(set(recorded)), "each pass gets further than the one before"
    assert recorded[-1] == whole
    model.close()


def test_a_piece_that_fails_in_the_middle_is_recorded_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had called by then is not taken for the whole of it."""
    monkeypatch.setattr(kimi, "LAYERS_TOGETHER", 2)
    write_tiny_model(tmp_path / "m", next(iter(TINY_MODELS.values())))
    loaded = load_model(find_model(tmp_path / "m"), Precision.FAST, max_rows=64)
    model, stepper = loaded.model, Stepper(loaded, StatePool(loaded.layout))
    tokens = np.arange(3, dtype=np.int32)
    wanted, whole = stepper.ended(stepper.run(tokens)), model.replays.nbytes
    model.replays = Replays()
    attention = model._backbone.attention

    def fails(context: Any, index: int, *rest: Any) -> Any:
        running = attention(context, index, *rest)
        if index == 3:
            raise OSError("in the middle of a layer")
        return running

    with monkeypatch.context() as patch:
        patch.setattr(model._backbone, "attention", fails)
        with pytest.raises(OSError, match="in the middle of a layer"):
            stepper.run(tokens)
    assert 0 < model.replays.nbytes < whole
    assert [stepper.ended(stepper.run(tokens)) for _ in range(2)] == [wanted] * 2
    assert model.replays.nbytes == whole
    model.close()


def test_two_models_that_record_at_once_keep_to_themselves(tmp_path: Path) -> None:
    """Each in a thread of its own, as two runtimes of a process are."""
    models = []
    for seed, shape in enumerate(TINY_MODELS.values()):
        write_tiny_model(tmp_path / str(seed), shape)
        models.append(load_model(find_model(tmp_path / str(seed)), Precision.FAST, max_rows=64))
    wanted = [some_steps(one) for one in models]
    begin = threading.Barrier(len(models), timeout=60)

    def steps(loaded: LoadedModel) -> list[list[bytes]]:
        loaded.model.replays = Replays()
        begin.wait()
        return [some_steps(loaded) for _ in range(2)]

    with ThreadPoolExecutor(len(models)) as threads:
        found = list(threads.map(steps, models))
    assert found == [[bits, bits] for bits in wanted]
    for one in models:
        one.model.close()


def test_a_large_step_is_recorded_when_it_comes_again(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m", next(iter(TINY_MODELS.values())))
    loaded = load_model(find_model(tmp_path / "m"), Precision.EXACT, max_rows=2 * FEW_ROWS)
    stepper = Stepper(loaded, StatePool(loaded.layout))
    tokens = np.random.default_rng(0).integers(0, 100, FEW_ROWS + 1).astype(np.int32)
    bits, rows = [], []
    for _ in range(3):
        bits.append(stepper.ended(stepper.run(tokens)))
        rows.append(loaded.model.replays.rows)
    assert rows == [[], [FEW_ROWS + 1], [FEW_ROWS + 1]]
    assert len(set(bits)) == 1
    loaded.model.close()


def test_only_so_many_bytes_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the numbers of rows that were had last."""
    write_tiny_model(tmp_path / "m", next(iter(TINY_MODELS.values())))
    loaded = load_model(find_model(tmp_path / "m"), Precision.EXACT, max_rows=64)
    stepper, replays = Stepper(loaded, StatePool(loaded.layout)), loaded.model.replays

    def step(rows: int) -> None:
        stepper.run(np.arange(rows, dtype=np.int32)).release()

    step(1)
    one = replays.nbytes
    assert 0 < one < 20_000 * loaded.model.config.num_layers
    monkeypatch.setattr(replay, "MOST_BYTES", 3 * one)
    for rows in (2, 3, 1, 4, 5, 6):
        step(rows)
        step(1)
    assert replays.rows == [4, 5, 6, 1]
    assert replays.nbytes == 4 * one
    loaded.model.close()
