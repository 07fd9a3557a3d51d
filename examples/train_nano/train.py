"""Train the nano model: `python -m examples.train_nano.train RUN --seconds 6000`. The same command resumes it.

RUN holds the tokenizer, `state.pt` (written every few minutes) and `log.txt`. The curriculum and the learning rate
follow the seconds spent training, so a slower machine makes fewer steps of the same plan. Two processes of one thread
each beat one of two threads: the many small operations would wait for each other's threads on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from .data import VALUE_WEIGHT, training_row
from .model import NanoConfig, NanoModel, Router
from .optimiser import MuonAdam
from .tokenizer import NanoTokenizer
from .tokenizer import train as train_tokenizer

# (sequence length, share of the training time at which it stops being the longest one used, whatever was learned)
CURRICULUM = ((256, 0.08), (512, 0.18), (1024, 0.36), (2048, 0.6), (4096, 1.0))
READY_AT = 0.9
"""Share of value tokens right (a moving mean at the longest length) that makes the next length due early."""
TOKENS_PER_STEP = 2048
"""Of one worker; a dialogue longer than that makes a longer step."""
QUANTISE_FROM = 0.66
DECAY_FROM = 0.66
SHORTER_SHARE = 0.3
"""Share of the steps at a length of an earlier stage: short dialogues stay fluent."""
SAVE_EVERY_S = 120.0
SMALL_WEIGHT, SMALL_KEPT = 0.05, 0.2
"""Tokens lighter than this are scored with this probability only (and weigh more then), which saves most logits."""


def learning_rate_factor(step: int, progress: float) -> float:
    """Linear warm-up over 40 steps, flat, then linear down to 3 % from DECAY_FROM on."""
    warm = min(1.0, (step + 1) / 40)
    return warm * min(1.0, 0.03 + 0.97 * max(0.0, (1.0 - progress) / (1.0 - DECAY_FROM)))


def stage(reached: int, ready: float, progress: float) -> int:
    """Index into CURRICULUM: the next one when it is learned or its time is over, never back."""
    due = next(i for i, (_, until) in enumerate(CURRICULUM) if progress < until or until >= 1.0)
    learned = reached + 1 if ready >= READY_AT else reached
    return min(max(due, learned), len(CURRICULUM) - 1)


def sequence_length(step: int, reached: int) -> int:
    rng = Random(step)
    if reached and rng.random() < SHORTER_SHARE:
        reached = rng.randrange(reached)
    return CURRICULUM[reached][0]


def batch(seed: int, step: int, length: int, rank: int, tokenizer: NanoTokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [B, length + 1] and the weights of predicting each. Seeds are under 2^48, held-out ones over 2^50."""
    first = ((seed * 100_000_000 + step) * 4 + rank) * 64
    count = max(1, TOKENS_PER_STEP // length)
    rows = [training_row((first + row) % 2**48, length, tokenizer) for row in range(count)]
    return torch.from_numpy(np.stack([r[0] for r in rows])), torch.from_numpy(np.stack([r[1] for r in rows]))


def train_step(
    model: NanoModel, ids: torch.Tensor, weights: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, float, float]:
    """Weighted loss, answer-token accuracy and value-token accuracy of one batch (no update)."""
    target, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    small = weight < SMALL_WEIGHT
    kept = ~small | (torch.rand(weight.shape, generator=generator) < SMALL_KEPT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(ids[:, :-1]).flatten(0, 1)[kept]
        logits = model.lm_head(hidden).float()
    target, weight, small = target[kept], weight[kept], small[kept]
    weight = torch.where(small, weight / SMALL_KEPT, weight)
    loss = (F.cross_entropy(logits, target, reduction="none") * weight).sum() / weight.sum()
    right = (logits.argmax(-1) == target).float()
    answer, value = weight >= 0.4, weight == VALUE_WEIGHT
    return loss, right[answer].mean().item(), right[value].mean().item()


def balance_experts(model: NanoModel, rate: float) -> None:
    """Loss-free balancing: the selection bias of an overloaded expert goes down, of an idle one up."""
    for layer in model.model.layers:
        if hasattr(layer, "block_sparse_moe"):
            gate = layer.block_sparse_moe.gate
            gate.e_score_correction_bias -= rate * torch.sign(gate.load - gate.load.mean())
            gate.load.zero_()


def save(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def average(model: NanoModel, spent: float, value: float, rank: int, workers: int) -> tuple[float, float]:
    """Average gradients and add up expert loads over workers; returns the first one's clock and the mean of `value`."""
    if workers == 1:
        return spent, value
    parts = [p.grad for p in model.parameters() if p.grad is not None]
    loads = [m.load for m in model.modules() if isinstance(m, Router)]
    clock = torch.tensor([spent if rank == 0 else 0.0, value / workers])
    flat = torch.cat([t.flatten() for t in (*parts, *loads, clock)])
    torch.distributed.all_reduce(flat)
    offset = 0
    for tensor in (*parts, *loads, clock):
        piece = flat[offset : offset + tensor.numel()].view(tensor.shape)
        tensor.copy_(piece / workers if offset < sum(p.numel() for p in parts) else piece)
        offset += tensor.numel()
    return clock[0].item(), clock[1].item()


def worker(rank: int, options: argparse.Namespace) -> None:
    workers = options.workers
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    if workers > 1:
        store = f"file://{options.run.resolve()}/meeting-{os.getppid()}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    tokenizer = NanoTokenizer(options.run)
    model = NanoModel(NanoConfig())
    optimiser = MuonAdam(model)
    step, spent, tokens, reached, ready = 0, 0.0, 0, 0, 0.0
    state_file = options.run / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load(state["optimiser"])
        step, spent, tokens = state["step"], state["spent_s"], state["tokens"]
        reached, ready = state["reached"], state["ready"]
    generator = torch.Generator().manual_seed(options.seed + step)
    model.train()
    log = (options.run / "log.txt").open("a")
    since, saved, mean = time.monotonic(), spent, np.zeros(4)
    parent = os.getppid()  # stopping the command stops its workers
    while spent < options.seconds and os.getppid() == parent:
        progress = spent / options.seconds
        model.set_quantised(progress >= QUANTISE_FROM)
        before, reached = reached, stage(reached, ready, progress)
        ready = ready if reached == before else 0.0
        length = sequence_length(step, reached)
        ids, weights = batch(options.seed, step, length, rank, tokenizer)
        loss, answer, value = train_step(model, ids, weights, generator)
        loss.backward()  # type: ignore[no-untyped-call]
        now = time.monotonic()
        (spent, value), since = average(model, spent + now - since, value, rank, workers), now
        if length == CURRICULUM[reached][0]:
            ready += 0.1 * (value - ready)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = learning_rate_factor(step, progress)
        optimiser.step(factor)
        model.zero_grad(set_to_none=True)
        balance_experts(model, 0.002 * factor)
        tokens += ids.numel() // (length + 1) * length * workers
        step += 1
        mean += (loss.item(), answer, value, 1.0)
        if rank == 0 and step % 20 == 0:
            text = f"step {step} {spent:.0f} s, {tokens / 1e6:.2f} M tokens, length {length}, rate {factor:.2f}: "
            text += "loss {:.4f}, answer tokens {:.4f}, value tokens {:.4f}".format(*(mean[:3] / mean[3]))
            print(text, flush=True)
            log.write(text + "\n")
            log.flush()
            mean[:] = 0.0
        if rank == 0 and (spent - saved > SAVE_EVERY_S or spent >= options.seconds):
            saved = spent
            state = {"model": model.state_dict(), "optimiser": optimiser.state(), "config": model.config.as_dict()}
            save(
                state_file,
                {**state, "step": step, "spent_s": spent, "tokens": tokens, "reached": reached, "ready": ready},
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seconds", type=float, default=6000.0, help="training time in all, over every resumption")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of one thread each, every one with its own rows"
    )
    options = parser.parse_args()
    if not (options.run / "tokenizer.json").exists():
        train_tokenizer(options.run, options.seed)
    torch.multiprocessing.spawn(worker, (options,), options.workers)


if __name__ == "__main__":
    main()
