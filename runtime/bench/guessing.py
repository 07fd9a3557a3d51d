"""What guessing ahead brings a text that copies, and what it costs one where it never pays."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.report import BenchFailed, Claim
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.guessing import Worth
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.services import Policy
from serai.runtime.sessions.session import Session

SEED = 7
SLICE_TOKENS = 64
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, and how to go on from it, `max_tokens` aside."""

    what: str
    prompt: Ids
    params: SamplingParams


def texts(vocab: int, tokens: int) -> tuple[Text, Text, Text]:
    """A text that copies, and two in which guessing never pays.

    What a small model copies by itself depends on its training, while an agent that quotes a file does so reliably. So
    a copy is forced: the prompt repeats four tokens, and greedy choice among those four soon repeats itself. Among the
    same four, each as likely as the next, every few tokens were there before and say nothing of what follows.
    """
    rng = np.random.default_rng(SEED)
    few = rng.integers(0, vocab, 4, dtype=np.int32)
    forced = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logit_bias=dict.fromkeys(few.tolist(), 100.0)
    )
    drawn = SamplingParams(temperature=1.0, seed=SEED, max_tokens=tokens, ignore_eos=True)
    by_lot = replace(forced, temperature=1e6, top_k=len(few), seed=SEED)
    return (
        Text("text that copies", np.tile(few, 32), forced),
        Text("text drawn at temperature 1 after 128 random tokens", rng.integers(0, vocab, 128, dtype=np.int32), drawn),
        Text("text drawn by lot from four tokens", rng.choice(few, 128), by_lot),
    )


async def measure_guessing(
    model: Path, name: str, *, tokens: int, rounds: int, tell: Callable[[str], None]
) -> tuple[tuple[Claim, Claim], tuple[dict[str, object], ...]]:
    """How many times faster a text is written with guesses than without."""
    measured = []
    policies = (Policy(reuse=False, guess=True), Policy(reuse=False, guess=False))
    async with open_runtime(model, policy=policies[0]) as with_, open_runtime(model, policy=policies[1]) as without:
        if with_.facts.config is None:
            raise AssertionError("an opened model has a config")
        for text in texts(with_.facts.config.vocab_size, tokens):
            measured.append(await _compare(text, with_, without, rounds, tell))
    gains = [one["gain"] for one in measured]
    copying, other = gains[0], min(gains[1:])
    how = (
        f"{name}, fast precision, {rounds} sessions of {tokens} tokens, {SLICE_TOKENS} with and without guessing by "
        "turns; the tokens are the same"
    )
    said = [f"{one['part']}: {one['gain']:.3f}, {one['right']} of {one['guessed']} guesses right" for one in measured]
    return (
        Claim("speculation_gain_copying", copying, "times", ">= 1.5", copying >= 1.5, f"{said[0]}; {how}"),
        Claim(
            "speculation_gain_other",
            other,
            "times",
            ">= 0.98",
            other >= 0.98,
            f"the lower of two ({'; '.join(said[1:])}); {how}",
        ),
    ), tuple({"part": one["part"], "with_s": one["with"], "without_s": one["without"]} for one in measured)


async def _compare(
    text: Text, with_: Runtime, without: Runtime, rounds: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The same text by both, a few tokens by turns, so that whatever slows the machine down slows down both alike."""
    counters = with_.counters
    before = counters.guessed_tokens, counters.right_guesses
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(rounds):
        tell(f"round {round_ + 1} of {rounds}: {text.what}")
        sessions = {True: await _begun(with_, text), False: await _begun(without, text)}
        for slice_ in range(text.params.max_tokens // SLICE_TOKENS):
            for guess in (True, False) if slice_ % 2 else (False, True):
                began_s = time.perf_counter()
                await sessions[guess].generate(replace(text.params, max_tokens=SLICE_TOKENS)).collect()
                seconds[guess].append(time.perf_counter() - began_s)
        if not np.array_equal(sessions[True].tokens(), sessions[False].tokens()):
            raise BenchFailed(f"guessing changed what was said in {text.what}")
        for session in sessions.values():
            await session.close()
    return {
        "part": text.what,
        "gain": _total(seconds[False]) / _total(seconds[True]),
        "guessed": counters.guessed_tokens - before[0],
        "right": counters.right_guesses - before[1],
        "with": seconds[True],
        "without": seconds[False],
    }


def _total(seconds: Sequence[float]) -> float:
    """Their sum, each at most three times the middle one: no try costs a slice so much, but a pause of the machine."""
    most = 3 * statistics.median(seconds)
    return sum(min(one, most) for one in seconds)


async def _begun(rt: Runtime, text: Text) -> Session:
    """A session that has read the prompt, warm, and has measured nothing yet."""
    session = await rt.session()
    await session.append(text.prompt)
    await session.generate(replace(text.params, max_tokens=4)).collect()
    session.worth = Worth()
    return session
