"""`bench experts`: a model is made once, and the figures come from what was really done."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.runtime.bench.experts import Scale, measure_experts
from serai.runtime.bench.report import BenchFailed
from serai.runtime.bench.stream_model import K3_48B, cached_stream_model, fewer_layers, packed_bytes
from serai.runtime.bench.tiny import TINY_K3, ExpertType, TinyModel
from serai.runtime.models.open_model import find_model

SMALL = replace(TINY_K3, expert_type=ExpertType.MXFP4, experts=64, expert_inner=512, expert_latent=256)
SCALE = Scale(answer_tokens=3, warm_tokens=1, prompt_tokens=40, raw_s=0.02, share=0.3)


def test_the_claims_are_the_issues(tmp_path: Path) -> None:
    told: list[str] = []
    made = cached_stream_model(tmp_path, [SMALL], told.append)
    report = measure_experts(made, SCALE, told.append)
    named = {claim.name: claim for claim in report.claims}
    assert set(named) == {
        "stream_vs_raw",
        "overlap",
        "sessions8_vs_bound",
        "prefill_vs_bound",
        "sharing_answers",
        "sharing_prompts",
        "rss_over_budget",
        "loop_delay_p99_ms",
    }
    assert all(claim.value is not None and claim.value > 0 for claim in report.claims)
    answers, prompts = report.table
    assert answers["tokens"] == 8 * 3
    assert prompts["tokens"] == 8 * 40
    for row in report.table:
        assert row["compute_s"] > 0  # type: ignore[operator]
        assert row["needed_bytes"] > 0  # type: ignore[operator]
        assert row["needed_bytes"] <= row["read_bytes"]  # type: ignore[operator]


def test_making_a_model_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """A file that is whole stays as it is; one that is missing is written; the model can be opened."""
    told: list[str] = []
    made = cached_stream_model(tmp_path, [SMALL], told.append)
    first = len(told)
    files = sorted(made.folder.glob("*.safetensors"))
    assert first == len(files)
    whole = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    files[0].unlink()
    again = cached_stream_model(tmp_path, [SMALL], told.append)
    assert again == made
    assert len(told) == first + 1
    for file in files:
        assert file.read_bytes() == whole[file.name][0]
    assert all(file.stat().st_mtime_ns == whole[file.name][1] for file in files[1:])
    found = find_model(made.folder)
    assert found.packed is not None
    found.files.close()


def test_a_smaller_disk_gets_a_smaller_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def room(nbytes: int) -> None:
        usage = type("Usage", (), {"free": nbytes})
        monkeypatch.setattr("serai.runtime.bench.stream_model.shutil.disk_usage", lambda folder: usage)
        monkeypatch.setattr("serai.runtime.bench.stream_model.SPARE_BYTES", 0)

    room(packed_bytes(replace(SMALL, layers=5, attention_layers=(4,))))
    made = cached_stream_model(tmp_path, fewer_layers(SMALL), lambda told: None)
    assert made.shape.layers == 5
    assert 0 < made.scale < 1
    room(1_000)
    with pytest.raises(BenchFailed, match="has 1,000 to spare; name another --dir"):
        cached_stream_model(tmp_path, fewer_layers(replace(SMALL, vocab=600)), lambda told: None)


@pytest.mark.parametrize("shape", [K3_48B, SMALL])
def test_the_choices_shrink(shape: TinyModel) -> None:
    sizes = [packed_bytes(choice) for choice in list(fewer_layers(shape))[:3]]
    assert np.all(np.diff(sizes) < 0)
