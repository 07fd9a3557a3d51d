"""`serai bench tree`: the same tokens are never read twice.

Sessions that begin alike read the beginning once, across a restart too; a fork far back starts from the nearest kept
state; tokens that were read before are guessed and checked several a step. The bits are those of a cold read each time.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
from numpy.typing import NDArray

from serai.kernels import compile as kernels
from serai.runtime.bench.guessing import measure_guessing
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.small_model import small_model
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.services import Policy

SEED = 7
SESSIONS = 16
TAIL_TOKENS = 24
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is read. `fork_policy` is the default one unless the sizes are scaled down, and then its steps are."""

    prefix_tokens: int
    session_tokens: int
    fork_position: int
    fork_policy: Policy
    answer_tokens: int
    rounds: int


FULL = Scale(
    prefix_tokens=4_000,
    session_tokens=131_072,
    fork_position=64_000,
    fork_policy=Policy(),
    answer_tokens=256,
    rounds=40,
)
QUICK = Scale(
    prefix_tokens=500,
    session_tokens=4_096,
    fork_position=2_000,
    fork_policy=Policy(snapshot_every=625),
    answer_tokens=128,
    rounds=9,
)


def bench_tree(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps a tiny model if one is needed. `tell` is called with what is being done."""
    return anyio.run(_measure, folder, QUICK if quick else FULL, tell)


async def _measure(folder: Path, scale: Scale, tell: Callable[[str], None]) -> Report:
    model, name = small_model(folder)
    tell("compiling what is not compiled yet")
    kernels.warm(lambda step: None)
    shared = await _shared_prefix(model, name, folder, scale, tell)
    fork, row = await _fork_far_back(model, name, scale, tell)
    guessed, rows = await measure_guessing(model, name, tokens=scale.answer_tokens, rounds=scale.rounds, tell=tell)
    return Report("tree", (*shared, *fork, *guessed), (row, *rows))


def _vocab(rt: Runtime) -> int:
    if rt.facts.config is None:
        raise AssertionError("an opened model has a config")
    return rt.facts.config.vocab_size


def _ids(vocab: int, count: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, vocab, count, dtype=np.int32)


async def _shared_prefix(
    model: Path, name: str, folder: Path, scale: Scale, tell: Callable[[str], None]
) -> tuple[Claim, Claim]:
    """Sixteen at once, then sixteen more after a restart; what each then holds against a cold read."""
    computed, found, cold = 0, [], []
    with tempfile.TemporaryDirectory(prefix="serai-bench-tree-", dir=folder) as store:
        for life in range(2):
            tell(f"{SESSIONS} sessions with a shared beginning, {'after a restart' if life else 'all at once'}")
            async with open_runtime(model, store=store) as rt:
                prefix = _ids(_vocab(rt), scale.prefix_tokens, SEED)
                tails = [_ids(_vocab(rt), TAIL_TOKENS, SEED + 1 + one) for one in range(SESSIONS)]
                bits: dict[int, bytes] = {}
                prefilled: list[int] = []

                async def one(rt: Runtime, number: int, prefix: Ids, tail: Ids, bits: dict[int, bytes]) -> None:
                    async with await rt.session() as session:
                        used = await session.append(prefix)
                        prefilled.append(used.prefilled)  # noqa: B023  # the tasks end within this turn of the loop
                        used = await session.append(tail)
                        if used.reused:
                            raise BenchFailed("a tail was known already, so nothing is said of what was computed after")
                        bits[number] = (await session.logits()).tobytes()

                async with anyio.create_task_group() as tasks:
                    for number, tail in enumerate(tails):
                        tasks.start_soon(one, rt, number, prefix, tail, bits)
                counted = rt.counters.prefilled_tokens - SESSIONS * TAIL_TOKENS
                if counted != sum(prefilled):
                    raise BenchFailed(f"the engine read {counted} tokens of beginnings; sessions say {sum(prefilled)}")
                computed += counted
                await rt.settle()
            found.append([bits[number] for number in range(SESSIONS)])
    async with open_runtime(model, policy=Policy(reuse=False)) as rt:
        for number, tail in enumerate(tails):
            tell(f"cold: {number + 1} of {SESSIONS}")
            async with await rt.session() as session:
                await session.append(np.concatenate([prefix, tail]))
                cold.append((await session.logits()).tobytes())
    prefills = computed / scale.prefix_tokens
    equal = statistics.fmean(one == other for life in found for one, other in zip(life, cold, strict=True))
    how = (
        f"{name}, fast precision, {SESSIONS} sessions at once with a beginning of {scale.prefix_tokens:,} tokens as an "
        "append of its own, and as many again after a restart"
    )
    return (
        Claim("shared_prefix_prefills", prefills, "reads", "= 1", prefills == 1.0, f"{how}; counted by the engine"),
        Claim(
            "reuse_bits_equal",
            equal,
            "of the sessions",
            "= 1",
            equal == 1.0,
            f"{how}; every logit after beginning and tail against a cold read of both in one append",
        ),
    )


async def _fork_far_back(
    model: Path, name: str, scale: Scale, tell: Callable[[str], None]
) -> tuple[tuple[Claim, Claim], dict[str, object]]:
    """A fork in the middle of a long session that was appended in one call, beside a cold read of as much."""
    async with open_runtime(model, policy=scale.fork_policy) as rt:
        ids = _ids(_vocab(rt), scale.session_tokens, SEED)
        tell(f"reading {scale.session_tokens:,} tokens in one append")
        session = await rt.session()
        await session.append(ids)
        replayed = session.replay_tokens(position=scale.fork_position)
        tell(f"forking at position {scale.fork_position:,}")
        began_s = time.perf_counter()
        fork = await session.fork(position=scale.fork_position)
        fork_s = time.perf_counter() - began_s
        tell(f"reading {scale.fork_position:,} tokens cold")
        cold = await rt.session(namespace="cold")
        began_s = time.perf_counter()
        used = await cold.append(ids[: scale.fork_position])
        cold_s = time.perf_counter() - began_s
        same = used.reused == 0 and np.array_equal(await fork.logits(), await cold.logits())
    if not same:
        raise BenchFailed("the fork is not what a cold read gives, or the cold read was not cold")
    policy = scale.fork_policy
    how = (
        f"{name}, fast precision, {scale.session_tokens:,} tokens in one append, states kept every "
        f"{policy.snapshot_every:,}{' (the default)' if policy == Policy() else ' (scaled down)'}; "
        f"{replayed:,} tokens replayed, bits equal; cold: {cold_s:.2f} s"
    )
    ratio = cold_s / fork_s
    row: dict[str, object] = {"part": "fork", "fork_s": fork_s, "cold_s": cold_s, "replayed_tokens": replayed}
    at = f"fork at position {scale.fork_position:,}"
    return (
        Claim.measured("fork_at_64k_ms", 1e3 * fork_s, "ms", f"{at}: {how}"),
        Claim("fork_at_vs_prefill", ratio, "times faster", ">= 5", ratio >= 5.0, f"{at} against a cold read: {how}"),
    ), row
