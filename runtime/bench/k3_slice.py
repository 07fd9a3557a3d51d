"""`serai bench k3-slice`: two layers of Kimi K3 at full width, 896 experts of 17.5 MB, under a budget of 6 GiB.

One session reads a prompt and answers; then the same again at the floor, the smallest budget the model opens with,
where it must say the same tokens. Random weights, all experts the same bytes (`stream_model.py`), so routing is
even and nearly every expert wanted is read. Precision is `fast`.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import numpy as np

from serai.kernels import compile as kernels
from serai.kernels.threads import threads
from serai.runtime.bench.k3 import K3, k3_slices
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.resident import forget_peak, peak_resident_bytes, resident_bytes
from serai.runtime.bench.stream_model import StreamModel, cached_stream_model
from serai.runtime.bench.stream_phases import Tokens, streamed_in
from serai.runtime.bench.tiny import TinyModel
from serai.runtime.memory.give_back import give_back_freed
from serai.runtime.memory.plan import MemoryPlan, plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.opening import LEAST_CONTEXT_TOKENS, open_runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy

BUDGET_BYTES = 6 << 30
ONLY_WHAT_IS_ASKED = Policy(reuse=False, guess=False)


@dataclass(frozen=True, slots=True)
class Scale:
    """Tokens of the prompt and of the answer."""

    prompt_tokens: int
    answer_tokens: int


FULL = Scale(prompt_tokens=64, answer_tokens=32)
QUICK = Scale(prompt_tokens=16, answer_tokens=8)

QUICK_SHAPE = replace(
    K3,
    layers=2,
    attention_layers=(2,),
    vocab=4096,
    hidden=1792,
    dense_inner=8448,
    kda_heads=24,
    heads=24,
    q_lora=384,
    experts=112,
    expert_inner=768,
    expert_latent=896,
)
"""A quarter of every width: experts of 1.1 MB."""


@dataclass(frozen=True, slots=True)
class Run:
    """One opening under `budget_bytes`. `step_s` are the times between an answer's tokens, `said` its ids."""

    budget_bytes: int
    slots: int
    said: tuple[int, ...]
    prompt_s: float
    step_s: tuple[float, ...]
    prompt_read_bytes: int
    answer_read_bytes: int
    reading_s: float
    rss_over_budget: float

    def row(self) -> dict[str, object]:
        return {
            "budget_bytes": self.budget_bytes,
            "slots": self.slots,
            "prompt_s": self.prompt_s,
            "step_s": statistics.median(self.step_s),
            "prompt_read_bytes": self.prompt_read_bytes,
            "token_read_bytes": self.answer_read_bytes / len(self.step_s),
            "bytes_per_s": (self.prompt_read_bytes + self.answer_read_bytes) / self.reading_s,
            "rss_over_budget": self.rss_over_budget,
        }


def bench_k3_slice(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps the model, with as many experts as its disk has room for."""
    shapes: Iterable[TinyModel] = [QUICK_SHAPE] if quick else k3_slices()
    made = cached_stream_model(folder, shapes, tell)
    tell("compiling what is not compiled yet")
    kernels.warm(lambda step: None)
    return anyio.run(_measure, made, QUICK if quick else FULL, tell)


def budgets(shape: TinyModel) -> tuple[int, int]:
    """6 GiB, or where that would leave nothing to stream, what holds half of the experts; and the floor."""
    plan = _plan(shape)
    floor = plan.streaming_floor_bytes.bfloat16
    half = floor + plan.moe_layers * plan.experts_per_layer * plan.expert_slot_bytes // 2
    return max(floor, min(BUDGET_BYTES, half)), floor


def _plan(shape: TinyModel) -> MemoryPlan:
    config, rows = parse_config(shape.config()), Limits().step_rows
    return plan_memory(
        config,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=rows,
        kernel_scratch_bytes=kernel_scratch_bytes(config, rows, fast=True),
    )


async def _measure(made: StreamModel, scale: Scale, tell: Callable[[str], None]) -> Report:
    prompt = np.random.default_rng(0).integers(0, made.shape.vocab, scale.prompt_tokens).astype(np.int32)
    runs = [await _run(made, budget, prompt, scale.answer_tokens, tell) for budget in budgets(made.shape)]
    return Report("k3-slice", tuple(_claims(runs, made, scale)), tuple(run.row() for run in runs))


async def _run(made: StreamModel, budget: int, prompt: Tokens, answer: int, tell: Callable[[str], None]) -> Run:
    tell(f"{made.nbytes / 1e9:.1f} GB under {budget / 2**30:.2f} GiB")
    gc.collect()
    give_back_freed()
    before_bytes = resident_bytes()
    forget_peak()
    async with open_runtime(made.folder, budget=budget, policy=ONLY_WHAT_IS_ASKED) as rt:
        experts = streamed_in(rt)
        session = await rt.session()
        opened, began_s = experts.status.reads, time.perf_counter()
        await session.append(prompt)
        prompt_s, read = time.perf_counter() - began_s, experts.status.reads
        said, times = [], [time.perf_counter()]
        async for token in session.generate(SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)):
            said.append(token.id)
            times.append(time.perf_counter())
        after = experts.status.reads
        slots = experts.status.slots
        rss = (peak_resident_bytes() - before_bytes) / budget
    if after.failed:
        raise BenchFailed(f"{after.failed} reads failed")
    return Run(
        budget_bytes=budget,
        slots=slots,
        said=tuple(said),
        prompt_s=prompt_s,
        step_s=tuple(float(step) for step in np.diff(times)),
        prompt_read_bytes=read.read_bytes - opened.read_bytes,
        answer_read_bytes=after.read_bytes - read.read_bytes,
        reading_s=after.reading_s - opened.reading_s,
        rss_over_budget=rss,
    )


def _claims(runs: list[Run], made: StreamModel, scale: Scale) -> list[Claim]:
    under, floor = runs
    plan = _plan(made.shape)
    size = (
        f"{made.shape.layers} layers, {made.shape.experts} experts of {plan.expert_slot_bytes / 1e6:.1f} MB, "
        f"{made.nbytes / 1e9:.1f} GB, scale {made.scale:.2f}"
    )
    how = f"{size}; {under.slots} slots in {under.budget_bytes / 2**30:.2f} GiB; fast, {threads()} threads"
    read = under.answer_read_bytes / scale.answer_tokens
    rate = (under.prompt_read_bytes + under.answer_read_bytes) / under.reading_s
    worst = max(runs, key=lambda run: run.rss_over_budget)
    equal = float(under.said == floor.said)
    return [
        Claim.at_most(
            "rss_over_budget",
            worst.rss_over_budget,
            "of the budget",
            1.03,
            f"(peak RSS - RSS just before open_runtime, kernels compiled) / budget; {under.rss_over_budget:.3f} under "
            f"{under.budget_bytes / 2**30:.2f} GiB, {floor.rss_over_budget:.3f} at the floor, "
            f"{floor.budget_bytes / 2**30:.2f} GiB; {size}",
        ),
        Claim.at_least(
            "same_tokens",
            equal,
            "of runs",
            1.0,
            f"{scale.answer_tokens} greedy tokens after {scale.prompt_tokens}; {under.slots} slots, and {floor.slots}",
        ),
        Claim.measured("step_s", statistics.median(under.step_s), "s", f"median of {len(under.step_s)} tokens; {how}"),
        Claim.measured(
            "token_read_bytes",
            read,
            "bytes",
            f"read for a token of the answer; a cold one wants {plan.token_expert_bytes:,}; {how}",
        ),
        Claim.measured("bytes_per_s", rate, "bytes/s", f"while anything was being read; {how}"),
        Claim.measured(
            "prompt_s",
            under.prompt_s,
            "s",
            f"{scale.prompt_tokens} tokens, {under.prompt_read_bytes / 1e9:.2f} GB read; {how}",
        ),
    ]
