"""The PyTorch model of `examples/train_nano` as the third pupil of `serai bench recall`.

It is another implementation of the same network, reading the same file of weights: where its answers differ from those
of the engine's `exact` precision, one of the two is wrong. It is there in a checkout of the repository with torch
installed, and nowhere else.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import serai.runtime
from serai.runtime.bench.recall_cases import Case

Judge = Callable[[Case], tuple[bool, bool]]
"""Whether the whole answer, and whether its value alone, is what the model would write."""


def torch_judge(model: Path) -> Judge | str:
    """What asks the torch model with the weights of the folder `model`; or the reason why that can't be done here."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    root = Path(serai.runtime.__file__).parents[1]
    if not (root / "examples" / "train_nano" / "evaluate.py").is_file():
        return "the trainer, examples/train_nano, is in the repository only"
    if str(root) not in sys.path:
        sys.path.append(str(root))
    judge: Judge = importlib.import_module("examples.train_nano.evaluate").judge_of(model)
    return judge
