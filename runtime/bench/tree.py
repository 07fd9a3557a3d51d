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
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.small_model import small_model
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
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
    rounds=5,
)
QUICK = Scale(
    prefix_tokens=500,
    session_tokens=4_096,
    fork_position=2_000,
    fork_policy=Policy(snapshot_every=625),
    answer_tokens=128,
    rounds=3,
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
    copying = await _guessing(model, name, scale, tell, copying=True)
    other = await _guessing(model, name, scale, tell, copying=False)
    return Report("tree", (*shared, *fork, copying[0], other[0]), (row, copying[1], other[1]))


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
                tails = [_ids(_vocab(rt), TAIL_TOKENS, SEED + 1 + life * SESSIONS + one) for one in range(SESSIONS)]
                bits: dict[int, bytes] = {}
                prefilled: list[int] = []

                async def one(rt: Runtime, number: int, prefix: Ids, tail: Ids, bits: dict[int, bytes]) -> None:
                    async with await rt.session() as session:
                        used = await session.append(prefix)
                        prefilled.append(used.prefilled)  # noqa: B023  # the tasks end within this turn of the loop
                        await session.append(tail)
                        bits[number] = (await session.logits()).tobytes()

                async with anyio.create_task_group() as tasks:
                    for number, tail in enumerate(tails):
                        tasks.start_soon(one, rt, number, prefix, tail, bits)
                counted = rt.counters.prefilled_tokens - SESSIONS * TAIL_TOKENS
                if counted != sum(prefilled):
                    raise BenchFailed(f"the engine read {counted} tokens of beginnings; sessions say {sum(prefilled)}")
                computed += counted
                await rt.settle()
            found += [bits[number] for number in range(SESSIONS)]
            async with open_runtime(model, policy=Policy(reuse=False)) as rt:
                for number, tail in enumerate(tails):
                    tell(f"cold: {number + 1} of {SESSIONS}")
                    async with await rt.session() as session:
                        await session.append(np.concatenate([prefix, tail]))
                        cold.append((await session.logits()).tobytes())
    prefills = computed / scale.prefix_tokens
    equal = sum(one == other for one, other in zip(found, cold, strict=True)) / len(cold)
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


async def _guessing(
    model: Path, name: str, scale: Scale, tell: Callable[[str], None], *, copying: bool
) -> tuple[Claim, dict[str, object]]:
    """Tokens a second with guessing over those without it: the same tokens, by turns, so that both see one machine."""
    what = "copied" if copying else "new"
    limit = 1.5 if copying else 0.98
    rates: dict[bool, list[float]] = {True: [], False: []}
    said: set[tuple[int, ...]] = set()
    for round_ in range(scale.rounds):
        for guess in (True, False):
            tell(f"round {round_ + 1} of {scale.rounds}: {what} text {'with' if guess else 'without'} guessing")
            async with open_runtime(model, policy=Policy(reuse=False, guess=guess)) as rt:
                tokens, seconds = await _answer(rt, scale.answer_tokens, copying=copying)
            said.add(tokens)
            rates[guess].append(scale.answer_tokens / seconds)
    if len(said) != 1:
        raise BenchFailed(f"guessing changed what was said: {len(said)} different answers")
    gain = statistics.median(rates[True]) / statistics.median(rates[False])
    claim = "speculation_gain_copying" if copying else "speculation_gain_other"
    detail = (
        f"{name}, fast precision, {scale.answer_tokens} tokens of {what} text, one session; median of {scale.rounds} "
        f"rounds, {statistics.median(rates[False]):.0f} tokens/s without guessing; the tokens are the same"
    )
    row: dict[str, object] = {"part": f"guessing, {what} text", "with": rates[True], "without": rates[False]}
    return Claim(claim, gain, "times", f">= {limit:g}", gain >= limit, detail), row


async def _answer(rt: Runtime, count: int, *, copying: bool) -> tuple[tuple[int, ...], float]:
    """Generate so many tokens after a prompt; the tokens and the seconds.

    What a small model copies by itself depends on its training, while an agent that quotes a file does so reliably. So
    a copy is forced: the prompt repeats four tokens, and greedy choice among those four soon repeats itself.
    """
    vocab = _vocab(rt)
    few = _ids(vocab, 4, SEED).tolist()
    if copying:
        prompt = np.array(few * 32, dtype=np.int32)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logit_bias=dict.fromkeys(few, 100.0))
    else:
        prompt = _ids(vocab, 128, SEED)
        params = SamplingParams(temperature=1.0, seed=SEED, max_tokens=count, ignore_eos=True)
    async with await rt.session() as session:
        await session.append(prompt)
        await session.generate(SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)).collect()  # warm
        began_s = time.perf_counter()
        done = await session.generate(params).collect()
        return done.tokens, time.perf_counter() - began_s
