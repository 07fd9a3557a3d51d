"""Recall by distance of an exported folder: `python -m examples.train_nano.evaluate FOLDER --distances 256 4096`.

The questions are those of `serai bench recall`. The training model is loaded with the exported (rounded, MXFP4) weights
and reads prompt + right answer in one pass. A case counts as exact when every token of the answer sentence (and the
`<|close|>` after it) is the likeliest one: that is the same as greedy decoding writing exactly this sentence. "value"
asks it only of the value's tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from serai.runtime.bench.recall_cases import TASKS, Case, cases
from serai.runtime.chat import ChatFormat, chat_format_for
from serai.runtime.models.open_model import find_model

from .load import load_folder
from .model import NanoModel
from .tokenizer import NanoTokenizer


@torch.no_grad()
def judge(model: NanoModel, case: Case, tokenizer: NanoTokenizer) -> tuple[bool, bool]:
    """(whole answer exact, value exact) under greedy choice."""
    answer, offsets = tokenizer.text_ids_and_offsets(case.answer)
    wanted = [*answer, tokenizer.special_id("<|close|>")]
    ids = torch.tensor([[*case.prompt.tolist(), *wanted[:-1]]])
    hidden = model.hidden(ids)[0, -len(wanted) :]
    right = (model.lm_head(hidden).argmax(-1) == torch.tensor(wanted)).tolist()
    end = case.value_start + len(case.value)
    value = [ok for ok, (a, b) in zip(right[:-1], offsets, strict=True) if b > case.value_start and a < end]
    return all(right), all(value)


def judge_of(folder: Path) -> Callable[[Case], tuple[bool, bool]]:
    """`judge` with the model and the tokenizer of an exported folder, for `serai bench recall`."""
    torch.set_flush_denormal(True)
    return partial(judge, load_folder(folder), tokenizer=NanoTokenizer(folder))


def chat_format(folder: Path) -> ChatFormat:
    found = find_model(folder)
    try:
        assert found.tokenizer is not None, f"{folder} has no tokenizer.json"
        return chat_format_for(found.config.family.value, found.tokenizer)
    finally:
        found.files.close()


def table(model: NanoModel, folder: Path, tasks: list[str], distances: list[int], n: int, seed: int) -> None:
    tokenizer, chat = NanoTokenizer(folder), chat_format(folder)
    for task in tasks:
        for distance in distances:
            began = time.monotonic()
            count = n if distance <= 8192 else max(10, n // 5)
            results = [judge(model, case, tokenizer) for case in cases(task, distance, count, chat, seed=seed)]
            exact, value = (sum(r[i] for r in results) / count for i in (0, 1))
            seconds = time.monotonic() - began
            print(
                f"{task:16} {distance:6} tokens, {count:4} cases: "
                f"value {value:.3f}, answer {exact:.3f} ({seconds:.0f} s)",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--distances", nargs="+", type=int, default=[256, 1024, 4096])
    parser.add_argument("-n", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    model = load_folder(options.folder)
    table(model, options.folder, options.tasks, options.distances, options.n, options.seed)


if __name__ == "__main__":
    main()
