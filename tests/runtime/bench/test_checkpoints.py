"""`serai bench checkpoints`: the pieces its claims are made of, on small states."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints.files.streams import aligned_empty
from serai.checkpoints.harness.samples import LAYOUT, sample_state
from serai.checkpoints.reports import SaveReport
from serai.runtime.bench import checkpoint_codecs, checkpoint_states, checkpoints, resume
from serai.runtime.bench.checkpoint_states import K3, Shape, grown, recurrence, shape_at, shape_that_fits
from serai.runtime.bench.raw_disk import NoDirectTransfers, drop_page_cache, read_raw, write_raw
from serai.runtime.bench.tiny import TINY_K3


def test_the_whole_shape_is_that_of_k3_at_32k_tokens() -> None:
    shape = shape_at(1)
    assert shape.layout == K3
    assert 2.2e9 < shape.bytes < 2.4e9
    assert K3.page_tokens * K3.token_bytes == 3_538_944


def test_the_largest_shape_with_room_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shape_that_fits(tmp_path, quick=True).scale == checkpoint_states.QUICK_SCALE
    monkeypatch.setattr(checkpoint_states, "_fits", lambda shape, memory, disk: shape.scale >= 4)
    assert shape_that_fits(tmp_path, quick=False).scale == 4
    monkeypatch.setattr(checkpoint_states, "_fits", lambda shape, memory, disk: False)
    assert shape_that_fits(tmp_path, quick=False).scale == checkpoint_states.QUICK_SCALE


def test_the_recurrence_stores_what_it_was_told() -> None:
    """With one token and no decay that matters, the key's row of the state is the value times its rate."""
    state = recurrence(2, 8, 8, np.random.default_rng(0), tokens=1)
    assert np.linalg.matrix_rank(state[0]) == 1
    assert np.isfinite(recurrence(2, 8, 8, np.random.default_rng(0), tokens=200)).all()


def test_a_grown_state_shares_its_full_pages_and_keeps_the_rows_of_the_last() -> None:
    before = sample_state(10)
    after = grown(before, 3, np.random.default_rng(0))
    assert after.position == 13
    assert [page is known for page, known in zip(after.pages, before.pages, strict=False)] == [True, True, False]
    assert np.array_equal(after.pages[2].rows[:, :2], before.pages[2].rows)


def test_raw_transfers_give_back_what_they_wrote(tmp_path: Path) -> None:
    memory = [aligned_empty((3, 4096), np.dtype("<f4")), aligned_empty((1025,), np.dtype("<f4"))]
    for array in memory:
        array[:] = np.random.default_rng(0).standard_normal(array.shape)
    kept = [array.copy() for array in memory]
    try:
        _, written = write_raw(tmp_path, memory, 2)
    except NoDirectTransfers as error:
        pytest.skip(str(error))
    for array in memory:
        array.fill(0)
    drop_page_cache(tmp_path)
    _, read = read_raw(tmp_path, memory, 2)
    assert written == read == 3 * 4096 * 4 + 4096
    assert np.array_equal(memory[0], kept[0])
    assert np.array_equal(memory[1][:1024], kept[1][:1024])
    with pytest.raises(ValueError, match="begins on a block"):
        write_raw(tmp_path, [memory[1][1:]], 2)


def test_excess_is_what_was_written_beyond_the_fixed_state_and_the_new_latents() -> None:
    needed = LAYOUT.fixed_bytes + 5 * LAYOUT.token_bytes
    page_bytes = LAYOUT.page_tokens * LAYOUT.token_bytes
    report = SaveReport(0, needed + page_bytes * 3 // 2, 0, 0, 0, 0.0)
    assert checkpoints.excess_pages(report, LAYOUT, 5) == pytest.approx(1.5)


def test_the_effect_on_logits_is_nothing_for_equal_ones_and_kl_otherwise() -> None:
    logits = np.log(np.array([[0.5, 0.5]], np.float32))
    assert checkpoint_codecs.effect_on_logits(logits, logits + 3) == {"max_abs_logit": 3.0, "mean_kl": 0.0}
    other = np.log(np.array([[0.25, 0.75]], np.float32))
    found = checkpoint_codecs.effect_on_logits(logits, other)
    assert found["mean_kl"] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-5)


def test_a_whole_run_on_a_tiny_state_makes_every_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = replace(K3, kda_shape=(2, 16, 128, 16), conv_shape=(2, 3, 3, 256), mla_layers=2, vocab=1024)
    tiny = Shape(1, layout, 54)
    monkeypatch.setattr(checkpoints, "shape_that_fits", lambda folder, quick: tiny)
    monkeypatch.setattr(checkpoint_codecs, "shape_at", lambda scale: tiny)
    monkeypatch.setattr(checkpoint_codecs, "QUICK_READ_TOKENS", 200)
    monkeypatch.setattr(checkpoint_codecs, "ASKED_TOKENS", 200)
    monkeypatch.setattr(checkpoints, "QUICK_TOKENS", 400)
    monkeypatch.setattr(checkpoints, "QUICK_ROUNDS", 1)
    monkeypatch.setattr(resume, "MODEL", TINY_K3)
    try:
        report = checkpoints.bench_checkpoints(tmp_path, quick=True, tell=lambda _: None)
    except NoDirectTransfers as error:
        pytest.skip(str(error))
    claims = {claim.name: claim for claim in report.claims}
    assert set(claims) == {
        "save_vs_raw",
        "load_vs_raw",
        "incremental_excess_pages",
        "loop_delay_p99_ms",
        "resume_vs_prefill",
    }
    values = {name: claim.value for name, claim in claims.items()}
    assert all(value is not None and value >= 0 for value in values.values())
    # A save of so little may end before the loop's first timer is due, and then nothing was late.
    assert all(value for name, value in values.items() if name != "loop_delay_p99_ms")
    assert claims["incremental_excess_pages"].holds is True
    nano = {row["codec"]: row for row in report.table if row["max_abs_logit"] is not None}
    assert len(nano) == len(checkpoint_codecs.WAYS)
    for row in nano.values():
        assert (row["max_abs_logit"] == 0) is not row["lossy"]
        assert row["recall_cases"] == checkpoint_codecs.QUICK_ASKED
    lossless = {row["recall"] for row in nano.values() if not row["lossy"]}
    assert lossless == {1.0}, "what is kept without loss is all remembered"
    assert [left.name.split("-")[0] for left in tmp_path.iterdir()] == ["mid"], "the model is kept, nothing else"
