"""`serai bench sessions`: an agent platform's day. Many sessions, most of them waiting, under a budget for a few.

Each session reads a prompt, answers, waits for a tool, reads what the tool said and answers again. The budget holds a
fraction of them in memory, so the others lie in the store and come back when it is their turn. Afterwards a seeded
sample is run again alone and compared token by token.
"""

import gc
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from serai.kernels import compile as kernels
from serai.runtime.bench.fork_cost import TOKENS, ForkCost, fork_cost
from serai.runtime.bench.report import Claim, Report
from serai.runtime.bench.resident import forget_peak, peak_resident_bytes, resident_bytes
from serai.runtime.bench.small_model import small_model
from serai.runtime.bench.tool_wait import mid_shape, mid_tool_wait, small_tool_wait, tool_claim
from serai.runtime.loop_delay import LoopDelay
from serai.runtime.memory.beside import beside_bytes
from serai.runtime.memory.give_back import give_back_freed
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.services import Policy
from serai.runtime.sessions.session import Session
from serai.runtime.state import session_bytes

SEED = 5
ONE_AT_A_TIME = Policy(reuse=False)
"""For what must be computed in full to be compared with."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a day is measured. `working` sessions have a call under way at a time; the wait for a tool is measured
    on so many layers of the mid-size model too, unless 0."""

    sessions: int
    hot: int
    least_tokens: int
    most_tokens: int
    working: int
    sample: int
    tool_tokens: int
    forks: int
    fair_s: float
    mid_layers: int


FULL = Scale(
    sessions=256,
    hot=32,
    least_tokens=1_024,
    most_tokens=16_384,
    working=8,
    sample=32,
    tool_tokens=32_768,
    forks=200,
    fair_s=10.0,
    mid_layers=4,
)
QUICK = Scale(
    sessions=24,
    hot=6,
    least_tokens=64,
    most_tokens=512,
    working=3,
    sample=6,
    tool_tokens=2_048,
    forks=50,
    fair_s=2.0,
    mid_layers=0,
)


@dataclass(frozen=True, slots=True)
class Script:
    """What one session goes through."""

    prompt: NDArray[np.int32]
    tool_said: NDArray[np.int32]
    params: SamplingParams


def bench_sessions(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps a tiny model if one is needed. `tell` is called with what is being done."""
    return anyio.run(_measure, folder, QUICK if quick else FULL, tell)


async def _measure(folder: Path, scale: Scale, tell: Callable[[str], None]) -> Report:
    model, name = small_model(folder)
    tell("compiling what is not compiled yet")
    kernels.warm(lambda step: None)
    # The day's store is removed last: for a minute after thousands of files were deleted, ext4 takes up to ten times as
    # long to create one, and moving a session out creates many.
    with tempfile.TemporaryDirectory(prefix="serai-bench-sessions-", dir=folder) as store:
        day = await _day(model, name, folder, Path(store), scale, tell)
        tell(f"forking a K3-shaped session of {TOKENS:,} tokens")
        forking = await fork_cost(scale.forks)
        tell(f"a session of {scale.tool_tokens:,} tokens waits for a tool")
        waits = [await small_tool_wait(model, name, folder, scale.tool_tokens)]
        if scale.mid_layers:
            waits.append(await mid_tool_wait(folder, scale.tool_tokens, mid_shape(scale.mid_layers), tell))
    rows = (*day.rows, *(wait.row() for wait in waits))
    return Report("sessions", (*day.claims, *_forking_claims(forking, scale.forks), tool_claim(waits)), rows)


@dataclass(frozen=True, slots=True)
class Day:
    """What the day gave."""

    claims: tuple[Claim, ...]
    rows: tuple[dict[str, object], ...]


async def _day(model: Path, name: str, folder: Path, store: Path, scale: Scale, tell: Callable[[str], None]) -> Day:
    """All sessions under one budget, with `store` to move out to, then the sample alone."""
    async with _once_open(model, folder) as rt:
        scripts = _scripts(scale, rt.facts.config.vocab_size if rt.facts.config else 1)
        budget_bytes = _budget(rt, scripts, scale)
    gc.collect()
    give_back_freed()
    before_bytes = resident_bytes()
    forget_peak()
    delay = LoopDelay(kept=None)
    async with open_runtime(model, budget=budget_bytes, store=store) as rt, delay.measured():
        began_s = time.perf_counter()
        answers = await _live(rt, scripts, scale.working, tell)
        took_s = time.perf_counter() - began_s
        status = rt.status()
        rss = (peak_resident_bytes() - before_bytes) / budget_bytes
        delay_ms = 1e3 * delay.p99_s()
    fair = await _fairness(model, scale, tell)
    equal = await _solo(model, scripts, answers, scale, tell)
    prompts = sum(len(script.prompt) + len(script.tool_said) for script in scripts)
    how = (
        f"{name}, fast precision, {scale.sessions} sessions of {scale.least_tokens:,} to {scale.most_tokens:,} tokens, "
        f"{scale.working} at work at a time, budget {budget_bytes / 2**20:,.1f} MiB for {scale.hot} of them hot"
    )
    work = status.work
    row: dict[str, object] = {
        "part": "day",
        "seconds": took_s,
        "completed": len(answers),
        "prompt_tokens": prompts,
        "prefilled_tokens": work.prefilled_tokens,
        "decoded_tokens": work.decoded_tokens,
        "demotions": work.demotions,
        "promotions": work.promotions,
        "budget_bytes": budget_bytes,
    }
    claims = (
        Claim(
            "sessions_equal_solo",
            equal,
            "of the sample",
            "= 1",
            equal == 1.0,
            f"{how}; all {len(answers)} completed in {took_s:.1f} s with {work.demotions} demotions and "
            f"{work.promotions} promotions; {scale.sample} of them, drawn with seed {SEED}, rerun alone",
        ),
        Claim(
            "rss_over_budget",
            rss,
            "of the budget",
            "<= 1.05",
            rss <= 1.05,
            f"(peak RSS − RSS just before open_runtime, kernels compiled) ÷ {budget_bytes / 2**20:,.1f} MiB, over the "
            "whole day",
        ),
        Claim.below("loop_delay_p99_ms", delay_ms, "ms", 3.0, f"{len(delay):,} timers of 10 ms over the whole day"),
        fair,
    )
    return Day(claims, (row,))


@asynccontextmanager
async def _once_open(model: Path, folder: Path) -> AsyncIterator[Runtime]:
    """A runtime in which everything has been done once: libraries are loaded that belong to no budget."""
    with tempfile.TemporaryDirectory(prefix="serai-bench-warm-", dir=folder) as store:
        async with open_runtime(model, store=store, policy=ONE_AT_A_TIME) as rt:
            session = await rt.session()
            await session.append(list(range(300)))
            await session.generate(SamplingParams(seed=0, max_tokens=2, ignore_eos=True)).collect()
            await (await rt.resume(await session.pause())).close()
            yield rt


def _scripts(scale: Scale, vocab: int) -> list[Script]:
    """Lengths are spread evenly over the octaves between least and most."""
    rng = np.random.default_rng(SEED)
    scripts = []
    for number in range(scale.sessions):
        span = scale.most_tokens / scale.least_tokens
        length = int(scale.least_tokens * span ** ((number + 0.5) / scale.sessions))
        prompt, tool_said = (rng.integers(0, vocab, count, dtype=np.int32) for count in (length, 32))
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=8, ignore_eos=True)
        scripts.append(Script(prompt, tool_said, params))
    rng.shuffle(scripts)
    return scripts


def _budget(rt: Runtime, scripts: list[Script], scale: Scale) -> int:
    """The model, the average state times `hot`, what all hold beside their states, and what the working ones hold while
    they step."""
    facts, pool = rt.facts, rt.pool
    model_bytes = facts.trunk_bytes + facts.expert_bytes + facts.scratch_bytes
    lengths = [len(script.prompt) + len(script.tool_said) + 16 for script in scripts]
    states = [session_bytes(pool.layout, length) for length in lengths]
    working = 2 * scale.working * session_bytes(pool.layout, 1)
    beside = sum(beside_bytes(length) for length in lengths)
    return model_bytes + beside + scale.hot * sum(states) // len(states) + max(states) + working


async def _live(
    rt: Runtime, scripts: list[Script], working: int, tell: Callable[[str], None]
) -> dict[int, tuple[int, ...]]:
    """The whole day; gives what each session said."""
    answers: dict[int, tuple[int, ...]] = {}
    waiting: dict[int, tuple[Session, tuple[int, ...]]] = {}

    async def morning(number: int, script: Script) -> None:
        session = await rt.session(label=str(number))
        await session.append(script.prompt)
        waiting[number] = session, (await session.generate(script.params).collect()).tokens

    async def evening(number: int, script: Script) -> None:
        session, said = waiting[number]
        await session.append(script.tool_said)
        answers[number] = said + (await session.generate(script.params).collect()).tokens

    async def work(part: Callable[[int, Script], Awaitable[None]], left: Iterator[tuple[int, Script]]) -> None:
        for number, script in left:
            await part(number, script)

    for part in (morning, evening):
        tell(f"{part.__name__}: {len(scripts)} sessions, {working} at a time")
        left = iter(enumerate(scripts))
        async with anyio.create_task_group() as tasks:
            for _ in range(working):
                tasks.start_soon(work, part, left)
    tell("night: all sessions close")
    for session, _ in waiting.values():
        await session.close()
    return answers


async def _solo(
    model: Path, scripts: list[Script], answers: dict[int, tuple[int, ...]], scale: Scale, tell: Callable[[str], None]
) -> float:
    """The fraction of a sample that says the same when it is alone, in a runtime that keeps and guesses nothing."""
    chosen = np.random.default_rng(SEED).choice(len(scripts), scale.sample, replace=False).tolist()
    equal = 0
    async with open_runtime(model, policy=Policy(reuse=False, guess=False)) as rt:
        for count, number in enumerate(chosen):
            tell(f"alone: {count + 1} of {len(chosen)}")
            script = scripts[number]
            async with await rt.session() as session:
                await session.append(script.prompt)
                said = (await session.generate(script.params).collect()).tokens
                await session.append(script.tool_said)
                said += (await session.generate(script.params).collect()).tokens
                equal += said == answers.get(number)
    return equal / len(chosen)


async def _fairness(model: Path, scale: Scale, tell: Callable[[str], None]) -> Claim:
    """Equal workflows, each reading and answering without a pause for as long: Jain's index of their tokens."""
    count = 8
    tell(f"{count} equal workflows for {scale.fair_s:g} s")
    tokens = [0] * count

    async def one(rt: Runtime, number: int, prompt: NDArray[np.int32]) -> None:
        while True:
            async with await rt.session(namespace=f"fair-{number}") as session:
                for _ in range(4):
                    tokens[number] += (await session.append(prompt)).prefilled
                    async for _ in session.generate(SamplingParams(seed=number, max_tokens=32, ignore_eos=True)):
                        tokens[number] += 1

    async with open_runtime(model, policy=ONE_AT_A_TIME) as rt:
        vocab = rt.facts.config.vocab_size if rt.facts.config else 1
        prompts = np.random.default_rng(SEED).integers(0, vocab, (count, 64), dtype=np.int32)
        with anyio.move_on_after(scale.fair_s):
            async with anyio.create_task_group() as tasks:
                for number, prompt in enumerate(prompts):
                    tasks.start_soon(one, rt, number, prompt)
    index = sum(tokens) ** 2 / (count * sum(one**2 for one in tokens))
    detail = (
        f"Jain's index of the tokens of {count} equal workflows in {scale.fair_s:g} s: {min(tokens)} to {max(tokens)}"
    )
    return Claim("fairness", index, "index", ">= 0.95", index >= 0.95, detail)


def _forking_claims(cost: ForkCost, times: int) -> tuple[Claim, Claim]:
    how = (
        f"{times} forks of a session with Kimi K3's state at {TOKENS:,} tokens ({cost.state_bytes / 1e9:.2f} GB "
        "reserved, its pages untouched)"
    )
    median_ms = 1e3 * cost.median_s
    slowest = f"median; the slowest took {1e3 * cost.slowest_s:.2f} ms"
    return (
        Claim("fork_ms", median_ms, "ms", "<= 1", median_ms <= 1.0, f"{how}; {slowest}"),
        Claim("fork_bytes", float(cost.added_bytes), "bytes", "= 0", cost.added_bytes == 0, how),
    )
