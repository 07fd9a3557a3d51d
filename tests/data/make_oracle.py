"""Make `tests/data/oracle/`: two tiny checkpoints with the logits of a float64 forward pass, for a checkout that stands
alone. Run it from the repository root: `python -m tests.data.make_oracle`.

The forward pass is `tests/kernels/naive_model.py`, which `tests/kernels/test_naive_oracle.py` holds against three other
implementations.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from serai.runtime.bench.tiny import TINY_K3, TINY_LINEAR, TinyModel, write_tiny_model
from tests.kernels.naive_model import Model, load

FOLDER = Path(__file__).parent / "oracle"
TOKENS, GREEDY = 40, 12


def small(shape: TinyModel) -> TinyModel:
    """A few hundred kilobytes of it."""
    narrow = replace(shape, layers=4, attention_layers=(2, 4), vocab=96, hidden=64, dense_inner=96)
    return replace(narrow, experts=8, experts_per_token=2, expert_inner=32)


MODELS = {
    "k3": replace(small(TINY_K3), residual_block=2, expert_latent=32, q_lora=32),
    "linear": replace(small(TINY_LINEAR), kv_lora=48),
}


def main() -> None:
    for number, (name, shape) in enumerate(MODELS.items()):
        folder = FOLDER / name
        write_tiny_model(folder, shape, seed=number)
        model = Model(*load(folder), 1e-6)
        tokens = np.random.default_rng(number).integers(0, shape.vocab, TOKENS).astype(np.int32)
        logits = model.feed(tokens)
        greedy = [int(logits[-1].argmax())]
        while len(greedy) < GREEDY:
            greedy.append(int(model.feed(np.array(greedy[-1:]))[-1].argmax()))
        np.savez_compressed(
            folder / "reference.npz",
            tokens=tokens,
            logits=logits.astype(np.float32),
            greedy=np.array(greedy, dtype=np.int32),
        )


if __name__ == "__main__":
    main()
