"""What guessing ahead brings a text that copies, and what it costs one where it never pays."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.report import BenchFailed, Claim
from serai.runtime.opening import open_runtime
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.services import Policy
from serai.runtime.sessions.session import Session

SEED = 7
GENERATED_TOKENS = 64
"""What beginning a generation costs is shared among so many tokens."""
TURN_TOKENS = 8
"""So many tokens with, then without guesses: what else the machine does lasts longer, and meets both."""
MOST_OF_A_TURN = 3.0
Ids = NDArray[np.int32]
Seconds = NDArray[np.float64]


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


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """How long a text took with guesses and without: seconds `[session, turn]` each, the same tokens in every row."""

    text: Text
    with_s: Seconds
    without_s: Seconds
    guessed: int
    right: int

    @property
    def ratios(self) -> list[float]:
        """How many times faster it was written with guesses, session by session."""
        # Guesses may cost a turn half of its time again, a pause of the machine many times that.
        most_s = MOST_OF_A_TURN * np.median(self.without_s, axis=0)
        with_s, without_s = (np.minimum(seconds, most_s).sum(axis=1) for seconds in (self.with_s, self.without_s))
        ratios: list[float] = (without_s / with_s).tolist()
        return ratios

    def __str__(self) -> str:
        low, high = median_interval(self.ratios)
        return (
            f"{self.text.what}: {statistics.median(self.ratios):.3f} ({low:.3f} to {high:.3f} with 95 % confidence), "
            f"{self.right} of {self.guessed} guesses right"
        )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which two of the values the median of what they were drawn from lies, with 95 % confidence.

    Whatever the distribution, each value is below its median with a chance of one half, so how many of them are is
    binomial. All of them are given when there are too few to say more.
    """
    ordered, count = sorted(values), len(values)
    beyond, outside = 0, 0.0  # so many values are left out at either end, with that chance of being wrong
    while beyond < (count - 1) // 2 and outside + 2 * math.comb(count, beyond) / 2**count <= 0.05:
        outside += 2 * math.comb(count, beyond) / 2**count
        beyond += 1
    beyond = max(beyond - 1, 0)
    return ordered[beyond], ordered[count - 1 - beyond]


async def measure_guessing(
    model: Path, name: str, *, tokens: int, rounds: int, tell: Callable[[str], None]
) -> tuple[tuple[Claim, Claim], tuple[dict[str, object], ...]]:
    """How many times faster a text is written with guesses than without."""
    async with open_runtime(model, policy=Policy(reuse=False)) as rt:
        if rt.facts.config is None:
            raise AssertionError("an opened model has a config")
        gains = [await _gain(text, rt, rounds, tell) for text in texts(rt.facts.config.vocab_size, tokens)]
    medians = [statistics.median(gain.ratios) for gain in gains]
    copying, other = medians[0], min(medians[1:])
    how = (
        f"{name}, fast precision, medians of {rounds} pairs of sessions of {tokens} tokens in one runtime, "
        f"{TURN_TOKENS} of every {GENERATED_TOKENS} with and without guessing by turns; the tokens are the same"
    )
    lower = f"the lower of two ({'; '.join(map(str, gains[1:]))})"
    return (
        Claim.at_least("speculation_gain_copying", copying, "times", 1.5, f"{gains[0]}; {how}"),
        Claim.at_least("speculation_gain_other", other, "times", 0.98, f"{lower}; {how}"),
    ), tuple(
        {"part": gain.text.what, "with_s": float(gain.with_s.sum()), "without_s": float(gain.without_s.sum())}
        for gain in gains
    )


async def _gain(text: Text, rt: Runtime, rounds: int, tell: Callable[[str], None]) -> Gain:
    """The same text in pairs of sessions, a few tokens by turns, so that whatever slows the machine slows both alike;
    and which of a pair is made first changes, so that where their memory lies is nobody's advantage."""
    counters = rt.counters
    before = counters.guessed_tokens, counters.right_guesses
    seconds: dict[bool, list[list[float]]] = {True: [], False: []}
    for round_ in range(rounds):
        tell(f"round {round_ + 1} of {rounds}: {text.what}")
        order = (True, False) if round_ % 2 else (False, True)
        sessions = {guess: await _begun(rt, text) for guess in order}
        for row in seconds.values():
            row.append([])
        for _ in range(text.params.max_tokens // GENERATED_TOKENS):
            params = replace(text.params, max_tokens=GENERATED_TOKENS)
            both = {guess: session.generate(params, guess=guess) for guess, session in sessions.items()}
            for turn in range(GENERATED_TOKENS // TURN_TOKENS):
                for guess in order if turn % 2 else order[::-1]:
                    began_s = time.perf_counter()
                    for _ in range(TURN_TOKENS):
                        await anext(both[guess])
                    seconds[guess][-1].append(time.perf_counter() - began_s)
        if not np.array_equal(sessions[True].tokens(), sessions[False].tokens()):
            raise BenchFailed(f"guessing changed what was said in {text.what}")
        for session in sessions.values():
            await session.close()
    return Gain(
        text=text,
        with_s=np.array(seconds[True]),
        without_s=np.array(seconds[False]),
        guessed=counters.guessed_tokens - before[0],
        right=counters.right_guesses - before[1],
    )


async def _begun(rt: Runtime, text: Text) -> Session:
    """A session that has read the prompt, and written a little without having measured anything."""
    session = await rt.session()
    await session.append(text.prompt)
    await session.generate(replace(text.params, max_tokens=4), guess=False).collect()
    return session
