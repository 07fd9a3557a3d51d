"""`serai bench model` and its model maker: complete checkpoints, cut to what fits; cells that say when they don't."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.checkpoints.snapshot import LatentType
from serai.runtime.bench import mid, model
from serai.runtime.bench.against import LLAMA_CLAIMS
from serai.runtime.bench.mid import MID_K3, cached_mid_model, largest_that_fits, model_bytes, with_layers
from serai.runtime.bench.report import BenchFailed
from serai.runtime.bench.tiny import TINY_K3
from serai.runtime.checks.stepping import Stepper
from serai.runtime.errors import BadParameter
from serai.runtime.models.config import load_config
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.tensor_check import check_tensors
from serai.runtime.state import StatePool, page_view, session_bytes

SMALL = replace(TINY_K3, vocab=300, layers=4, attention_layers=(4,))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    made = cached_mid_model(tmp_path_factory.mktemp("mid"), SMALL)
    return load_model(find_model(made.folder), Precision.FAST, max_rows=model.PREFILL_TOKENS)


def test_a_mid_size_checkpoint_is_complete_and_large_matrices_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mid, "_DRAWN", 4096)
    monkeypatch.setattr(mid, "SHARD_BYTES", 1 << 20)
    made = cached_mid_model(tmp_path, SMALL)
    assert cached_mid_model(tmp_path, SMALL) == made
    with CheckpointFiles.open(made.folder) as files:
        check_tensors(load_config(made.folder), files)
        head = files.read("language_model.lm_head.weight")
    assert len(list(made.folder.glob("*.safetensors"))) > 1
    np.testing.assert_array_equal(head[:32], head[32:64])
    assert len(np.unique(head[:32], axis=0)) == 32


def test_the_largest_model_that_fits_is_chosen() -> None:
    whole = model_bytes(MID_K3)
    assert 6e9 < whole < 9e9
    assert largest_that_fits(whole) is MID_K3
    cut = largest_that_fits(whole // 2)
    assert cut.layers in (8, 16, 24)
    assert cut.attention_layers[-1] == cut.layers
    assert model_bytes(cut) <= whole // 2
    with pytest.raises(BenchFailed, match="four layers of the mid-size model take"):
        largest_that_fits(1000)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mid, "SHARD_BYTES", 1 << 60)
    with pytest.raises(BenchFailed, match="are free; name another --dir"):
        cached_mid_model(tmp_path, SMALL)


@pytest.mark.parametrize("latents", LatentType)
def test_a_synthetic_context_can_be_decoded_from(tmp_path: Path, latents: LatentType) -> None:
    made = cached_mid_model(tmp_path, SMALL)
    loaded = load_model(find_model(made.folder), Precision.FAST, max_rows=model.PREFILL_TOKENS, latents=latents)
    stepper = Stepper(loaded, StatePool(loaded.layout, poison=True))
    state = model.state_at(stepper, loaded, 200, seed=1)
    assert state.position == model.PROMPT_TOKENS + 200
    last = (state.position - 1) % loaded.layout.page_tokens
    assert page_view(loaded.layout, state.table.pages[-1])[:, last].any()
    pages = {page.array[: loaded.layout.row_items].tobytes() for page in state.table.pages}
    assert len(pages) == len(state.table.pages), "no two alike"
    (after,), _ = stepper.feed([(state, np.array([5], np.int32))])
    assert after.logits is not None
    assert np.isfinite(after.logits.array).all()
    after.release()
    assert stepper.pool.live_bytes == 0


def test_cells_that_do_not_fit_say_so(loaded: LoadedModel) -> None:
    limit = 2 * session_bytes(loaded.layout, 2000)
    told: list[str] = []
    cells = model.measure(loaded, limit, (1, 9), (0,), 2, told.append)
    assert told[1::2] == [f"  {cell.told}" for cell in cells]
    assert [(cell.kind, cell.sessions, cell.rows) for cell in cells] == [
        *(("prefill", 1, model.PREFILL_TOKENS), ("prefill", 9, model.PREFILL_TOKENS // 9)),
        *(("decode", 1, 1), ("decode", 9, 1)),
    ]
    assert [cell.tokens_per_s is None for cell in cells] == [False, True, False, True]
    assert all(cell.tokens_per_s is None or cell.tokens_per_s > 0 for cell in cells)
    large = replace(cells[1], needed_bytes=17_350_000_000, room_bytes=12_900_000_000)
    assert large.row()["tok/s"] == large.told == "does not fit: 17.4 GB of states, 12.9 free"


def test_a_cell_stops_after_a_few_seconds(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    feed = Stepper.feed

    def counted(stepper: Stepper, parts: Any, draws: Any = ()) -> Any:
        calls.append([len(tokens) for _, tokens in parts])
        return feed(stepper, parts, draws)

    monkeypatch.setattr(Stepper, "feed", counted)
    monkeypatch.setattr(model, "LONG_CONTEXT", 100)
    for most_s, steps in ((0.0, 2), (60.0, 5)):
        calls.clear()
        monkeypatch.setattr(model, "CELL_S", most_s)
        cells = model.measure(loaded, 1 << 30, (2,), (128,), 4, lambda _: None)
        each = model.LONG_PREFILL_TOKENS // 2
        assert [(cell.kind, cell.rows) for cell in cells] == [("prefill", each), ("decode", 1)]
        assert calls.count([1, 1]) == steps
        assert calls.count([each, each]) == steps


def test_a_context_is_no_negative_number(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="0 or more, not -3"):
        model.bench_model(tmp_path, quick=True, tell=lambda _: None, only_contexts=[5, -3])


@pytest.mark.parametrize("count", [0, 65])
def test_each_session_has_a_row_of_every_step(count: int, tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="--sessions is from 1 to 64"):
        model.bench_model(tmp_path, quick=True, tell=lambda _: None, only_sessions=[1, count])


def test_the_claims_are_named_and_none_is_made_of_a_peer_that_was_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "largest_that_fits", lambda room_bytes: SMALL)
    monkeypatch.setattr(model, "with_layers", lambda shape, layers, vocab: shape)
    monkeypatch.setattr(model, "QUICK_CONTEXTS", (0,))
    report = model.bench_model(tmp_path, quick=True, tell=lambda _: None)
    assert [claim.name for claim in report.claims[:3]] == ["decode_tok_s", "prefill_tok_s", "sessions8_tok_s"]
    assert all(claim.value is not None for claim in report.claims[:3])
    assert [(claim.name, claim.holds) for claim in report.claims[3:]] == [(name, None) for name, _ in LLAMA_CLAIMS]


def test_a_cut_keeps_the_attention_layers_it_has() -> None:
    assert with_layers(MID_K3, 8, 1000).attention_layers == (4, 8)
