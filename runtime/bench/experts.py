"""`serai bench experts`: a model several times larger than its budget, its experts read when they are routed.

Eight sessions answer, then eight prompts are read, through a runtime. Beside it stand the two bounds nothing can beat:
the disk (what had to be read, at the rate of plain direct reads in the same run) and the processor (the same tokens
again, with every expert's id aliased onto a record in memory; all experts hold the same bytes, so the routing is
the same). Precision is `fast`.
"""

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import numpy as np
from anyio.to_thread import run_sync

from serai.kernels import compile as kernels
from serai.kernels.threads import threads
from serai.runtime.bench.mid import with_layers
from serai.runtime.bench.report import Claim, Report
from serai.runtime.bench.resident import forget_peak, peak_resident_bytes, resident_bytes
from serai.runtime.bench.stream_model import K3_48B, StreamModel, cached_stream_model, fewer_layers
from serai.runtime.bench.stream_phases import Computing, Phase, PhaseClock, RawDisk, Tokens
from serai.runtime.bench.tiny import TinyModel
from serai.runtime.loop_delay import LoopDelay
from serai.runtime.memory.give_back import give_back_freed
from serai.runtime.memory.plan import WIDE_ROWS, MemoryPlan, plan_memory
from serai.runtime.models.config import parse_config
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.opening import LEAST_CONTEXT_TOKENS, SESSION_SHARE, open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy

SESSIONS = 8
FULL_BUDGET_BYTES = 8 << 30
BEGINNING_TOKENS = 16
"""What each session reads before it answers."""

ONLY_WHAT_IS_ASKED = Policy(reuse=False, guess=False)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: tokens of each answer, of which the first few come before the clock starts, tokens of each
    prompt, for how long the disk alone, and the share of experts the budget holds (None: as 8 GiB)."""

    answer_tokens: int
    warm_tokens: int
    prompt_tokens: int
    raw_s: float
    share: float | None


FULL = Scale(answer_tokens=10, warm_tokens=3, prompt_tokens=WIDE_ROWS // SESSIONS, raw_s=1.0, share=None)
QUICK = Scale(answer_tokens=24, warm_tokens=8, prompt_tokens=256, raw_s=0.5, share=0.4)
QUICK_SHAPE = replace(with_layers(K3_48B, 4, 32_768), experts=128)


def bench_experts(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps the model. `tell` is called with what is being done."""
    made = cached_stream_model(folder, [QUICK_SHAPE] if quick else fewer_layers(K3_48B), tell)
    return measure_experts(made, QUICK if quick else FULL, tell)


def measure_experts(made: StreamModel, scale: Scale, tell: Callable[[str], None]) -> Report:
    """Measure on that model."""
    tell("compiling what is not compiled yet")
    kernels.warm(lambda step: None)
    return anyio.run(_measure, made, scale, tell)


def budget_bytes(shape: TinyModel, share: float | None) -> int:
    """What holds that share of the shape's experts, and the sessions; by default the share that 8 GiB hold of the whole
    model's."""
    experts, plan = _plan(shape)
    if share is None:
        all_experts, whole = _plan(K3_48B)
        left = (FULL_BUDGET_BYTES - whole.streaming_floor_bytes.bfloat16) / all_experts * experts
    else:
        states = SESSIONS * plan.running_session_bytes.bfloat16
        left = max(100 * share * experts / (100 - SESSION_SHARE), 100 * states / SESSION_SHARE)
    return int(plan.streaming_floor_bytes.bfloat16 + left)


def _plan(shape: TinyModel) -> tuple[int, MemoryPlan]:
    """Bytes of all experts, and what opening the model plans with."""
    config, rows = parse_config(shape.config()), Limits().step_rows
    plan = plan_memory(
        config,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=rows,
        kernel_scratch_bytes=kernel_scratch_bytes(config, rows, fast=True),
    )
    return plan.moe_layers * plan.experts_per_layer * plan.expert_slot_bytes, plan


async def _measure(made: StreamModel, scale: Scale, tell: Callable[[str], None]) -> Report:
    budget = budget_bytes(made.shape, scale.share)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, made.shape.vocab, scale.prompt_tokens).astype(np.int32) for _ in range(SESSIONS)]
    delay = LoopDelay(kept=None)
    with RawDisk(made.folder, scale.raw_s) as disk:
        gc.collect()
        give_back_freed()
        before_bytes = resident_bytes()
        forget_peak()
        tell(f"opening the model, {made.nbytes / 1e9:.1f} GB under {budget / 2**30:.2f} GiB")
        async with open_runtime(made.folder, budget=budget, policy=ONLY_WHAT_IS_ASKED) as rt:
            answering, answers = await _answers(rt, disk, delay, prompts, scale, tell)
            prompting = await _prompts(rt, disk, delay, prompts, tell)
            rss = (peak_resident_bytes() - before_bytes) / budget
            tell("the same tokens with every expert in memory")
            alone = Computing(rt)
            begun = [prompt[:BEGINNING_TOKENS] for prompt in prompts]
            answering = replace(answering, compute_s=await run_sync(alone.answers, begun, answers, scale.warm_tokens))
            prompting = replace(prompting, compute_s=await run_sync(alone.prompts, prompts))
    loop = Claim.below(
        "loop_delay_p99_ms", 1e3 * delay.p99_s(), "ms", 3.0, "timers of 10 ms while sessions answer and read"
    )
    under = Claim.at_most(
        "rss_over_budget",
        rss,
        "of the budget",
        1.03,
        f"(peak RSS - RSS just before open_runtime, kernels compiled) / {budget / 2**30:.2f} GiB",
    )
    return Report("experts", (*claims(answering, prompting, made), under, loop), (answering.row(), prompting.row()))


async def _answers(
    rt: Runtime,
    disk: RawDisk,
    delay: LoopDelay,
    prompts: Sequence[Tokens],
    scale: Scale,
    tell: Callable[[str], None],
) -> tuple[Phase, list[Tokens]]:
    """All sessions answer at once; the phase, and what each said from the start."""
    sessions = [await rt.session() for _ in prompts]
    said: list[Tokens] = [np.empty(0, np.int32)] * len(sessions)

    async def answer(number: int, tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        got = await sessions[number].generate(params).collect()
        said[number] = np.concatenate([said[number], np.array(got.tokens, np.int32)])

    async def all_answer(tokens: int) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(len(sessions)):
                tasks.start_soon(answer, number, tokens)

    async with anyio.create_task_group() as tasks:
        for session, prompt in zip(sessions, prompts, strict=True):
            tasks.start_soon(session.append, prompt[:BEGINNING_TOKENS])
    tell(f"{len(sessions)} sessions answer, {scale.warm_tokens} + {scale.answer_tokens} tokens each")
    async with delay.measured():
        await all_answer(scale.warm_tokens)
        clock = PhaseClock(rt, disk)
        await all_answer(scale.answer_tokens)
    phase = await run_sync(clock.stop, "answers", len(sessions) * scale.answer_tokens)
    for session in sessions:
        await session.close()
    return phase, said


async def _prompts(
    rt: Runtime, disk: RawDisk, delay: LoopDelay, prompts: Sequence[Tokens], tell: Callable[[str], None]
) -> Phase:
    """As many new sessions read a prompt each, all at once."""
    tell(f"{len(prompts)} prompts of {len(prompts[0])} tokens")
    sessions = [await rt.session() for _ in prompts]
    clock = PhaseClock(rt, disk)
    async with delay.measured(), anyio.create_task_group() as tasks:
        for session, prompt in zip(sessions, prompts, strict=True):
            tasks.start_soon(session.append, prompt)
    phase = await run_sync(clock.stop, "prompts", sum(len(prompt) for prompt in prompts))
    for session in sessions:
        await session.close()
    return phase


def claims(answers: Phase, prompts: Phase, made: StreamModel) -> list[Claim]:
    """What the phases prove."""
    shape = made.shape
    size = (
        f"{shape.layers} layers in K3's layout with {shape.experts} experts of {answers.record_bytes / 1e6:.1f} MB, "
        f"{made.nbytes / 1e9:.1f} GB, scale {made.scale:.2f}; fast precision, {threads()} threads, {_load()}"
    )
    found = []
    rate = answers.read_bytes / answers.reading_s
    found.append(
        Claim.at_least(
            "stream_vs_raw",
            rate / answers.raw_rate,
            "of the raw rate",
            0.9,
            f"{rate / 1e9:.2f} GB/s while {SESSIONS} sessions answer, {answers.raw_rate / 1e9:.2f} GB/s by plain "
            f"direct reads of the same records afterwards; {size}",
        )
    )
    found.append(
        Claim.at_most(
            "overlap", answers.seconds / answers.bound_s, "of the bound", 1.15, f"{SESSIONS} answers: {_times(answers)}"
        )
    )
    for name, phase in (("sessions8_vs_bound", answers), ("prefill_vs_bound", prompts)):
        detail = f"{phase.tokens / phase.seconds:.3g} tok/s; {_times(phase)}"
        found.append(Claim.at_least(name, phase.bound_s / phase.seconds, "of the bound", 0.85, detail))
    for name, phase in (("sharing_answers", answers), ("sharing_prompts", prompts)):
        detail = (
            f"{phase.cache.wanted:,} distinct experts for {phase.cache.picks:,} routed, summed over layers and steps"
        )
        found.append(Claim.measured(name, phase.cache.sharing, "distinct / routed", detail))
    return found


def _times(phase: Phase) -> str:
    return (
        f"{phase.seconds:.2f} s for {phase.tokens:,} tokens; the disk alone {phase.disk_s:.2f} s "
        f"({phase.needed_bytes / 1e9:.2f} GB needed), computing alone {phase.compute_s:.2f} s"
    )


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
