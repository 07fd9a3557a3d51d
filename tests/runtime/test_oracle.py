"""The engine against independent implementations, on checkpoints in the published layout (../shared/oracle)."""

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from serai.runtime.checks.evaluation import evaluate
from serai.runtime.models.open_model import Precision, find_model, load_model
from tests.shared import shared

CASES = [
    ("kimi_linear_f32", "transformers", 5e-5),
    ("kimi_linear_f32", "mlx", 5e-5),
    ("kimi_linear_f32", "llama", 5e-5),
    ("kimi_linear_bf16", "transformers", 2e-4),
    ("kimi_linear_bf16", "mlx", 2e-4),
    ("kimi_linear_bf16", "llama", 2e-4),
    ("kimi_k3_f32", "mlx", 5e-5),
    ("kimi_k3_f32", "llama", 5e-5),
    ("kimi_k3_mxfp4", "mlx", 2e-4),
]
WAYS = ("prefill_logits", "decode_logits", "step_logits")


@cache
def ours(model: str) -> dict[str, NDArray[np.generic]]:
    folder = shared("oracle", model)
    loaded = load_model(find_model(folder), Precision.EXACT, max_rows=64)
    with np.load(folder / "ref_mlx.npz") as reference:
        return evaluate(loaded, reference["tokens"], int(reference["split"]), 24)


def test_every_reference_file_has_its_case() -> None:
    files = {(file.parent.name, file.stem.removeprefix("ref_")) for file in shared("oracle").glob("*/ref_*.npz")}
    assert files == {(model, reference) for model, reference, _ in CASES}


def relative_error(got: NDArray[np.generic], want: NDArray[np.generic]) -> float:
    """RMS of the difference over RMS of the reference."""
    difference = got.astype(np.float64) - want.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(want.astype(np.float64) ** 2)))


@pytest.mark.parametrize(("model", "reference", "tolerance"), CASES)
def test_logits_and_greedy_tokens_agree(model: str, reference: str, tolerance: float) -> None:
    got = ours(model)
    with np.load(shared("oracle", model, f"ref_{reference}.npz")) as want:
        for way in WAYS:
            assert relative_error(got[way], want[way]) <= tolerance, way
            np.testing.assert_array_equal(got[way].argmax(-1), want[way].argmax(-1), err_msg=way)
        np.testing.assert_array_equal(got["greedy"], want["greedy"])


@pytest.mark.parametrize(
    ("model", "reference", "tolerance"), [case for case in CASES if case[1] in ("mlx", "transformers")]
)
def test_states_agree(model: str, reference: str, tolerance: float) -> None:
    """KDA state, convolution tails and latents after all tokens, wherever the reference shows them."""
    got = ours(model)
    compared = 0
    with np.load(shared("oracle", model, f"ref_{reference}.npz")) as want:
        for name in want.files:
            if not name.startswith("state_"):
                continue
            _, layer, kind = name.split("_", 2)
            theirs = want[name][0]
            if kind == "recurrent_states":
                mine = got[f"state_{layer}_kda"]
            elif kind == "conv_states":
                # Theirs: q, k and v channels one after the other, taps last, newest last; ours: [3, taps, channels].
                mine = got[f"state_{layer}_conv"].transpose(0, 2, 1).reshape(-1, 3)
                theirs = theirs[:, -3:]
            else:
                rank = want[f"state_{layer}_keys"].shape[-1]
                latents = got[f"state_{layer}_latents"]
                mine = latents[:, :rank] if kind == "keys" else latents[:, rank:]
                theirs = theirs[0]
            assert relative_error(mine, theirs) <= tolerance, name
            compared += 1
    assert compared >= 12


@pytest.mark.parametrize("model", sorted({case[0] for case in CASES}))
def test_the_three_ways_are_equal_bit_for_bit(model: str) -> None:
    got = ours(model)
    for way in WAYS[1:]:
        np.testing.assert_array_equal(got[way], got[WAYS[0]], err_msg=way)
