"""Make a small model with random weights in the layout of Kimi K3 or Kimi-Linear: a folder as from Hugging Face.

    python examples/make_tiny_model.py FOLDER [--family kimi_k3|kimi_linear] [--seed 0]

What it writes is gibberish, but it is computed as the real thing is: `serai run FOLDER "Once"`.
"""

import argparse
from pathlib import Path

from serai.runtime.bench.tiny import TINY_MODELS, write_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model with random weights.")
    parser.add_argument("folder", type=Path, help="where to write it; made if missing")
    parser.add_argument("--family", choices=sorted(TINY_MODELS), default="kimi_k3")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    weight_bytes = write_tiny_model(chosen.folder, TINY_MODELS[chosen.family], seed=chosen.seed)
    print(f"{chosen.folder}: a {chosen.family} model with {weight_bytes / 1e6:.1f} MB of weights")


if __name__ == "__main__":
    main()
