"""`serai bench server`: what a server adds to a runtime, and what restless clients leave behind.

The model is the tiny one, each step of it drawn out to the 20 ms that a mid-size model takes, so that the server is
measured at a realistic rate of tokens and not the model. The clients are a process of their own.
"""

import asyncio
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.tiny import cached_tiny_model
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.server.app import serving
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.running import listen, run_app, settle_in
from serai.runtime.server.service import Service
from serai.runtime.step import Slice, StepEngine, StepPlan, StepResult

STEP_S = 0.02
CLIENTS = 64
MEMORY_SLACK = 0.05
"""How much more memory the process may hold at the end before it counts as a leak: allocators keep some."""


@dataclass(frozen=True, slots=True)
class Span:
    """How long each part takes, in seconds."""

    calm_s: float
    restless_s: float


FULL = Span(60.0, 600.0)
QUICK = Span(6.0, 12.0)


class Paced:
    """An engine whose steps take at least `STEP_S`."""

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    def step(self, plan: StepPlan) -> StepResult:
        began_s = time.monotonic()
        result = self._engine.step(plan)
        time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))
        return result

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        return self._engine.go_on(plan, turn)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds while nobody asks for anything."""

    sessions: int
    states_without_holder: str
    work: int
    tasks: int
    files: int
    rss_bytes: int
    other_bytes: int
    """Resident memory beside the states that the budget accounts for: those kept for reuse grow up to it by intent."""

    @classmethod
    def by(cls, service: Service) -> "Held":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        status = service.runtime.status()
        budget = status.budget
        return cls(
            sessions=len(status.sessions),
            states_without_holder=_without_holder(service.runtime),
            work=service.active + status.work.waiting_calls + status.work.waiting_for_memory,
            tasks=len(asyncio.all_tasks()),
            files=len(list(Path("/proc/self/fd").iterdir())),
            rss_bytes=pages * 4096,
            other_bytes=pages * 4096 - budget.live_bytes - budget.kept_bytes - budget.spare_bytes,
        )


def _without_holder(runtime: Runtime) -> str:
    """What the ledger says of states in memory that belong to no session, nor to those kept for reuse."""
    try:
        runtime.check()
    except AssertionError as error:
        return str(error) or "some"
    return "promised bytes" if runtime.status().budget.reserved_bytes else ""


def bench_server(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps the tiny model."""
    return anyio.run(_bench, cached_tiny_model(folder), QUICK if quick else FULL, tell)


async def _bench(model: Path, span: Span, tell: Callable[[str], None]) -> Report:
    options = ServerOptions(port=0, log_level="warning", unstored_ttl_s=0.0, shutdown_s=2.0)
    with tempfile.TemporaryDirectory(prefix="serai-bench-server-") as store, listen(options) as bound:
        port = bound.getsockname()[1]
        async with open_runtime(model, store=store) as runtime:
            runtime.wrap_engine(Paced)
            settle_in()
            tell(f"{CLIENTS} sessions in this process, {span.calm_s:g} s")
            inside = await _inside(runtime, span.calm_s)
            async with serving(runtime, options) as app, anyio.create_task_group() as tasks:
                tasks.start_soon(run_app, app, options, bound)
                service: Service = app.state.service
                tell(f"{CLIENTS} clients that stay, {span.calm_s:g} s")
                calm = await _clients(port, span.calm_s, CLIENTS, 0)
                outside = sum(calm["tokens"]) / span.calm_s
                # Threads, first imports and bounded records of what clients did: what is there once is no leak.
                await _clients(port, span.calm_s / 2, 0, CLIENTS // 2)
                before = await _settled(service)
                tell(f"{CLIENTS // 2} that stay and {CLIENTS // 2} that come and go, {span.restless_s:g} s")
                seen = await _clients(port, span.restless_s, CLIENTS // 2, CLIENTS // 2)
                after = await _settled(service)
                tasks.cancel_scope.cancel()
    return _report(span, inside, outside, seen, before, after)


async def _inside(runtime: Runtime, seconds: float) -> float:
    """Tokens a second of as many sessions without a server, from when each has its first."""
    sessions = [await runtime.session() for _ in range(CLIENTS)]
    for number, session in enumerate(sessions):
        await session.append(f"client {number}")
    to_begin = set(range(CLIENTS))
    decoded, began_s = runtime.counters.decoded_tokens, time.monotonic()

    async def one(number: int) -> None:
        nonlocal decoded, began_s
        async with sessions[number].generate(SamplingParams(max_tokens=60_000, ignore_eos=True)) as tokens:
            async for _ in tokens:
                if to_begin:
                    to_begin.discard(number)
                    if not to_begin:
                        decoded, began_s = runtime.counters.decoded_tokens, time.monotonic()

    with anyio.move_on_after(seconds):
        async with anyio.create_task_group() as tasks:
            for number in range(CLIENTS):
                tasks.start_soon(one, number)
    rate = (runtime.counters.decoded_tokens - decoded) / (time.monotonic() - began_s)
    for session in sessions:
        await session.close()
    return rate


async def _clients(port: int, seconds: float, steady: int, restless: int) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "serai.runtime.bench.server_clients", *map(str, (port, seconds, steady, restless))]
    done = await anyio.run_process(command, check=False)
    if done.returncode != 0:
        raise BenchFailed(f"the clients failed: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")
    seen: dict[str, list[float]] = json.loads(done.stdout)
    if seen["failed"]:
        raise BenchFailed(f"a client met what it should not: {seen['failed'][0]}")
    return seen


async def _settled(service: Service) -> Held:
    """What is held once all have left."""
    with anyio.move_on_after(30):
        await service.wait_idle()
    await service.tidy()
    await service.runtime.settle()
    await anyio.sleep(1.0)  # connections close behind their clients
    return Held.by(service)


def fairness(shares: list[float]) -> float:
    """Jain's index: 1 when all got the same, 1/n when one got it all."""
    total = sum(shares)
    return total * total / (len(shares) * sum(share * share for share in shares)) if total else 0.0


def _report(
    span: Span, inside: float, outside: float, seen: dict[str, list[float]], before: Held, after: Held
) -> Report:
    health_ms = sorted(1000 * one for one in seen["health_s"])
    p99_ms = health_ms[int(0.99 * (len(health_ms) - 1))]
    grown = (after.other_bytes - before.other_bytes) / before.rss_bytes
    memory = f"RSS {after.rss_bytes / before.rss_bytes - 1:+.1%}, beside states {grown:+.1%}"
    kinds = {
        "sessions": after.sessions > before.sessions,
        "states": bool(after.states_without_holder),
        "calls at work": after.work > 0,
        "tasks": after.tasks > before.tasks,
        "open files": after.files > before.files,
        "memory": grown > MEMORY_SLACK,
    }
    leaked = [name for name, leaks in kinds.items() if leaks]
    how = f"tiny model, steps drawn out to {1000 * STEP_S:g} ms, fast precision, clients in a process of their own"
    came = (
        f"{CLIENTS // 2} steady clients, {seen['left']} visits of {CLIENTS // 2} restless ones in {span.restless_s:g} s"
    )
    index = fairness(seen["tokens"])
    ratio = inside / outside if outside else float("inf")
    return Report(
        "server",
        (
            Claim(
                "leaks",
                len(leaked),
                "kinds",
                "= 0",
                not leaked,
                f"{came}; leaked: {leaked or 'nothing'} {after.states_without_holder}; {memory}",
            ),
            Claim.below("health_p99_ms", p99_ms, "ms", 50.0, f"{len(health_ms)} requests beside {came}"),
            Claim("fairness", index, "", ">= 0.9", index >= 0.9, f"Jain's index of the steady ones' tokens; {how}"),
            Claim(
                "overhead_vs_inprocess",
                ratio,
                "x",
                "<= 1.1",
                ratio <= 1.1,
                f"{inside:.0f} tokens/s of {CLIENTS} sessions, {outside:.0f} of {CLIENTS} clients, counted from when "
                f"all have begun; {how}",
            ),
        ),
        (
            {
                "inside_tokens_s": inside,
                "outside_tokens_s": outside,
                "visits": seen["left"],
                "memory_growth": grown,
                "leaked": leaked,
            },
        ),
    )
