"""The shipped nano model: the engine's logits on held-out dialogues against two implementations of the trainer's."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.train_nano.data import training_row
from examples.train_nano.reference import reference_logits
from examples.train_nano.tokenizer import NanoTokenizer
from serai.runtime.bench.recall_cases import HELD_OUT
from serai.runtime.checks.evaluation import WAYS, evaluate
from serai.runtime.models.open_model import Precision, find_model, load_model
from tests.shared import ROOT

ASSET = ROOT / "runtime" / "assets" / "nano"
TOLERANCE = 2e-4
"""RMS of the difference over RMS of the logits, as for the oracle's bfloat16 and MXFP4 checkpoints."""
CLOSE_CALL = 1e-5
"""A router whose last chosen and first left-out expert are this near may choose otherwise in other arithmetic."""


def held_out(count: int) -> NDArray[np.int32]:
    return training_row(HELD_OUT + 3, count, NanoTokenizer(ASSET))[0][:count].astype(np.int32)


def engine_logits(tokens: NDArray[np.int32], precision: Precision = Precision.EXACT) -> NDArray[np.generic]:
    """`[T, vocab]`, the same bits three ways."""
    loaded = load_model(find_model("nano"), precision, max_rows=128)
    try:
        got = evaluate(loaded, tokens, len(tokens) // 3, 1)
    finally:
        loaded.model.close()
    for way in WAYS[1:]:
        np.testing.assert_array_equal(got[way], got[WAYS[0]], err_msg=way)
    return got[WAYS[0]]


def log_softmax(logits: NDArray[np.generic]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    difference = got.astype(np.float64) - want.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(want.astype(np.float64) ** 2)))


def test_the_engine_equals_the_float64_forward_pass_on_held_out_tokens() -> None:
    tokens = held_out(120)
    want = reference_logits(ASSET, tokens.tolist())
    got = engine_logits(tokens)
    assert relative_error(got, want) <= TOLERANCE
    assert np.mean(got.argmax(-1) == want.argmax(-1)) >= 0.99


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: nano's own trainer cannot be asked"
)
def test_the_engine_equals_the_torch_model_on_1000_held_out_tokens() -> None:
    import torch

    from examples.train_nano.load import load_folder
    from examples.train_nano.model import LatentMoE

    tokens = held_out(1000)
    model = load_folder(ASSET)
    margins = np.full(len(tokens), np.inf)

    def note_margin(layer: Any, inputs: tuple[Any, ...]) -> None:
        score = torch.sigmoid(inputs[0].reshape(len(tokens), -1).double() @ layer.gate.weight.double().T)
        ranked = (score + layer.gate.e_score_correction_bias).sort(-1, descending=True).values
        chosen = layer.c.num_experts_per_token
        np.minimum(margins, (ranked[:, chosen - 1] - ranked[:, chosen]).numpy(), out=margins)

    for module in model.modules():
        if isinstance(module, LatentMoE):
            module.register_forward_pre_hook(note_margin)
    with torch.no_grad():
        want = model(torch.from_numpy(tokens[None].astype(np.int64)))[0].numpy()
    close = np.flatnonzero(margins < CLOSE_CALL)
    print(f"left out, router margin under {CLOSE_CALL:g}: positions {close.tolist()}")
    assert len(close) <= len(tokens) // 100
    clear = margins >= CLOSE_CALL
    got = engine_logits(tokens)
    assert relative_error(got[clear], want[clear]) <= TOLERANCE
    assert np.mean(got[clear].argmax(-1) == want[clear].argmax(-1)) >= 0.999


def test_fast_precision_says_what_exact_says_on_1000_held_out_tokens() -> None:
    """Mean KL(exact ‖ fast) at most 0.01, and the same likeliest token at 97 of 100 positions."""
    tokens = held_out(1000)
    log_p, log_q = (log_softmax(engine_logits(tokens, precision)) for precision in (Precision.EXACT, Precision.FAST))
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    assert 0 < divergence.mean() <= 0.01
    assert np.mean(log_p.argmax(-1) == log_q.argmax(-1)) >= 0.97
