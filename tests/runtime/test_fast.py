"""What `fast` may cost on the nano model: against `exact` at the end, and layer by layer."""

from itertools import zip_longest

import numpy as np
import pytest
from numpy.typing import NDArray

from examples.train_nano.data import training_row
from examples.train_nano.tokenizer import NanoTokenizer
from serai.kernels.threads import parallel_region
from serai.runtime.bench.recall_cases import HELD_OUT
from serai.runtime.checks.evaluation import evaluate
from serai.runtime.models.batch import Batch, batch_of
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import StatePool
from serai.runtime.step import Segment
from tests.shared import ROOT

MOST_KL = 0.01
LEAST_TOP_1 = 0.97
MOST_LAYER_ERROR = 0.01


def held_out(count: int) -> NDArray[np.int32]:
    row = training_row(HELD_OUT + 3, count, NanoTokenizer(ROOT / "runtime" / "assets" / "nano"))[0]
    return row[:count].astype(np.int32)


def nano(precision: Precision, trunk: Trunk = Trunk.AS_STORED) -> LoadedModel:
    return load_model(find_model("nano"), precision, max_rows=128, trunk=trunk)


def log_probabilities(loaded: LoadedModel, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    logits = evaluate(loaded, tokens, len(tokens), 1)["prefill_logits"].astype(np.float64)
    loaded.model.close()
    shifted = logits - logits.max(-1, keepdims=True)
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


@pytest.mark.parametrize("trunk", Trunk)
def test_fast_says_nearly_what_exact_says_on_held_out_text(trunk: Trunk) -> None:
    """With the trunk as stored, and in 8 bits."""
    tokens = held_out(400)
    exact, fast = (log_probabilities(one, tokens) for one in (nano(Precision.EXACT), nano(Precision.FAST, trunk)))
    divergence = float((np.exp(exact) * (exact - fast)).sum(-1).mean())
    agreement = float((exact.argmax(-1) == fast.argmax(-1)).mean())
    print(f"trunk {trunk.value}: mean KL(exact || fast) {divergence:.6f}, top-1 agreement {agreement:.4f}")
    assert 0 < divergence <= MOST_KL
    assert agreement >= LEAST_TOP_1


def call_of(loaded: LoadedModel, tokens: NDArray[np.int32]) -> tuple[Segment, Batch]:
    """A call with those tokens in an empty session; the segment holds the memory that the batch points to."""
    pool = StatePool(loaded.layout)
    empty = pool.empty()
    segment = Segment(empty, tokens, pool.draft(empty, len(tokens), with_logits=True))
    return segment, batch_of([segment])


@pytest.mark.parametrize("trunk", Trunk)
def test_no_layer_of_fast_is_off_by_more_than_a_hundredth(trunk: Trunk) -> None:
    """Each layer gets what `exact` gave the one before. Both hold the same trunk: this is about activations alone."""
    tokens = held_out(128)
    exact, fast = nano(Precision.EXACT, trunk), nano(Precision.FAST, trunk)
    (_exact_call, exact_batch), (_fast_call, fast_batch) = (call_of(one, tokens) for one in (exact, fast))
    block_size = exact.model.config.attn_res_block_size
    errors = []
    with parallel_region():
        steps = zip_longest(exact.model.forward(exact_batch), fast.model.forward(fast_batch))
        for layer, _ in enumerate(steps):
            want, got = (one.model.scratch.blocks(len(tokens)) for one in (exact, fast))
            running = layer // block_size + 1
            errors.append(np.linalg.norm(got[running] - want[running]) / np.linalg.norm(want[running]))
            got[:] = want
    print("relative errors", [f"{error:.4f}" for error in errors])
    assert len(errors) == exact.model.config.num_layers
    assert 0 < max(errors) <= MOST_LAYER_ERROR
