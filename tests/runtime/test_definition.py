"""The engine against the definitions in float64, in published and in odd shapes, without anything from outside."""

from pathlib import Path

import numpy as np
import pytest

from serai.runtime.bench.tiny import TinyModel, write_tiny_model
from serai.runtime.checks.evaluation import WAYS, evaluate
from serai.runtime.models.open_model import Precision, find_model, load_model
from tests.kernels.naive_model import Model, load
from tests.runtime.odd_models import odd_shapes

ORACLE = Path(__file__).parent.parent / "data" / "oracle"
TOLERANCE = 5e-5
"""RMS of the difference over RMS of the logits: float32 arithmetic against float64, over a few layers."""


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


@pytest.mark.parametrize("name", ["k3", "linear"])
def test_the_kept_oracle_files_agree(name: str) -> None:
    loaded = load_model(find_model(ORACLE / name), Precision.EXACT, max_rows=16)
    with np.load(ORACLE / name / "reference.npz") as want:
        got = evaluate(loaded, want["tokens"], 25, len(want["greedy"]))
        for way in WAYS:
            assert relative_error(got[way].astype(np.float64), want["logits"].astype(np.float64)) <= TOLERANCE, way
            np.testing.assert_array_equal(got[way], got[WAYS[0]])
        np.testing.assert_array_equal(got["greedy"], want["greedy"])


@pytest.mark.parametrize("name", odd_shapes())
def test_odd_shapes_agree_with_the_definitions(name: str, tmp_path: Path) -> None:
    shape: TinyModel = odd_shapes()[name]
    write_tiny_model(tmp_path, shape, seed=3)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, 30).astype(np.int32)
    want = Model(*load(tmp_path), 1e-6).feed(tokens)
    loaded = load_model(find_model(tmp_path), Precision.EXACT, max_rows=8)
    got = evaluate(loaded, tokens, 17, 1)
    assert relative_error(got["prefill_logits"].astype(np.float64), want) <= TOLERANCE
    for way in WAYS[1:]:
        np.testing.assert_array_equal(got[way], got[WAYS[0]], err_msg=way)
