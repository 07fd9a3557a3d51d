"""A float64 forward pass written from `kernels/naive.py` alone gives the logits of three other implementations."""

import numpy as np
import pytest

from serai.kernels import naive
from tests.kernels.naive_model import Array, Model, load
from tests.shared import shared

# Relative L2 error. Random mixture models are chaotic, which is why K3's references differ from each other by 6e-4 at
# worst and by 1.4e-5 so measured; a float32 run of these same definitions is 1.1e-5 (K3) or 1.3e-6 (Kimi-Linear) from
# float64.
LINEAR_TOLERANCE, K3_TOLERANCE = 3e-6, 1.6e-5

# The last number is the epsilon the reference gives its q_a and kv_a norms.
REFERENCES = [
    ("kimi_linear_f32", "transformers", LINEAR_TOLERANCE, 1e-6),
    ("kimi_linear_f32", "mlx", LINEAR_TOLERANCE, 1e-6),
    ("kimi_linear_f32", "llama", LINEAR_TOLERANCE, 1e-6),
    ("kimi_linear_bf16", "transformers", LINEAR_TOLERANCE, 1e-6),
    ("kimi_linear_bf16", "mlx", LINEAR_TOLERANCE, 1e-5),
    ("kimi_linear_bf16", "llama", LINEAR_TOLERANCE, 1e-5),
    ("kimi_k3_f32", "mlx", K3_TOLERANCE, 1e-6),
    ("kimi_k3_f32", "llama", K3_TOLERANCE, 1e-6),
    ("kimi_k3_mxfp4", "mlx", K3_TOLERANCE, 1e-6),
]


def relative_error(value: Array, expected: Array) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("folder", "reference", "tolerance", "latent_norm_eps"), REFERENCES)
def test_float64_forward_pass_matches_the_reference(
    folder: str, reference: str, tolerance: float, latent_norm_eps: float
) -> None:
    path = shared("oracle", folder)
    expected = np.load(path / f"ref_{reference}.npz")
    model = Model(*load(path), latent_norm_eps)
    split = int(expected["split"])
    logits = np.concatenate([model.feed(expected["tokens"][:split]), model.feed(expected["tokens"][split:])])
    for kind in ("prefill_logits", "decode_logits", "step_logits"):
        assert relative_error(logits, expected[kind]) < tolerance, kind
    if reference != "llama":  # its states can't be read out
        for layer, state in model.kda.items():
            assert relative_error(state.matrix, expected[f"state_{layer}_recurrent_states"][0]) < tolerance
            tails = np.concatenate(list(state.tails), axis=1).T
            assert relative_error(tails, expected[f"state_{layer}_conv_states"][0, :, -3:]) < tolerance
        for layer, latents in model.latents.items():
            parts = [expected[f"state_{layer}_{half}"][0, 0] for half in ("keys", "values")]
            assert relative_error(latents, np.concatenate(parts, axis=1)) < tolerance
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < len(expected["greedy"]):
        greedy.append(int(model.feed(np.array(greedy[-1:]))[-1].argmax()))
    assert greedy == expected["greedy"].tolist()


def test_zeroing_the_state_between_two_windows_is_caught() -> None:
    """B03: the check above must fail for a run that starts its second window from an empty KDA state."""
    path = shared("oracle", "kimi_k3_f32")
    expected = np.load(path / "ref_mlx.npz")
    model = Model(*load(path), 1e-6)
    split = int(expected["split"])
    model.feed(expected["tokens"][:split])
    for layer in model.kda:
        model.kda[layer] = naive.empty_kda_state(model.heads, model.head_dim)
    logits = model.feed(expected["tokens"][split:])
    assert relative_error(logits, expected["decode_logits"][split:]) > 100 * K3_TOLERANCE
