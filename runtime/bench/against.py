"""`serai bench model --against llama`: the same weights, threads and tokens through serai and llama.cpp, in turns.

Both hold the experts in MXFP4 and the projections in 8 bits (serai's `trunk="q8"`, llama.cpp's Q8_0). First both read
the same prompts in float32 with a small model of the same layout, as many layers and a router that picks: their logits
must agree to float32's rounding, otherwise nothing is compared. Then rounds in which each side does the same work right
after the other; a claim is the median over rounds of serai's speed over llama.cpp's.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.kernels.compile import warm
from serai.kernels.threads import parallel_region, threads
from serai.runtime.bench.kernels import Peaks, Scale, measure_peaks
from serai.runtime.bench.llama import PINNED, Llama, crashes_with_amx, system_info
from serai.runtime.bench.mid import MidModel
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.step_bound import StepCost, step_cost
from serai.runtime.bench.tiny import TINY_K3, write_tiny_model
from serai.runtime.checks.stepping import Stepper
from serai.runtime.models.open_model import LoadedModel, Precision, find_model, load_model
from serai.runtime.models.trunk import Trunk
from serai.runtime.state import State, StatePool

PREFILL_TOKENS = 512
PROMPT_TOKENS = 64
SESSIONS = 8
ROUNDS, QUICK_ROUNDS = 5, 3
STEPS, SESSION_STEPS = 32, 9
TURN_STEPS = 4
"""Steps of one side between those of the other."""
MOST_ERROR = 1e-3
"""Relative RMS difference of the small model's logits in float32 above which the two sides do not compute the same
function. Two functions that have nothing in common differ by 1.4."""

SMALL = replace(TINY_K3, layers=16, attention_layers=(4, 8, 12, 16), q_lora=64)
"""Everything that is K3's own, 4 of 32 experts picked by the router, with a multiple of 32 columns in every matrix, as
Q8_0 wants it. In 8 bits no two runs of so many random layers have much in common: a rounding sends tokens to other
experts. So the function is compared in float32, and what 8 bits do to serai's own logits is said beside."""

LLAMA_CLAIMS = (("decode_vs_llama", 1.4), ("prefill_vs_llama", 4.0), ("sessions8_vs_llama", 3.0))

STREAMS = Scale(stream_bytes=1 << 28, weight_bytes=0, kda_layers=0, context=0, flat_positions=0)
"""Buffers of the stream read between two rounds: larger than what processors cache."""

Tokens = NDArray[np.int32]


class Side(Protocol):
    """What both sides do: feed tokens after what numbered sequences hold, and forget."""

    def feed(self, parts: Sequence[tuple[int, Tokens]]) -> NDArray[np.float32]: ...
    def forget(self, sequence: int) -> None: ...


class Serai:
    """serai's engine with numbered sequences."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._stepper = Stepper(loaded, StatePool(loaded.layout))
        self._states: dict[int, State] = {}

    def feed(self, parts: Sequence[tuple[int, Tokens]]) -> NDArray[np.float32]:
        before = [(self._states.get(one) or self._stepper.pool.empty(), tokens) for one, tokens in parts]
        after, _ = self._stepper.feed(before)
        self._states |= {one: state for (one, _), state in zip(parts, after, strict=True)}
        return np.stack([state.logits.array for state in after if state.logits is not None])

    def forget(self, sequence: int) -> None:
        if state := self._states.pop(sequence, None):
            state.release()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second of one side in one round."""

    prefill: float
    decode: float
    sessions8: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """What serai's steps cost at least, by the names of `Speeds`, and what the machine gave between the rounds."""

    costs: Mapping[str, StepCost]
    peaks: Peaks

    def sentence(self, name: str, tokens: int, ours: float, theirs: float) -> str:
        """How near both sides' tokens a second come to the bound, and what ratio it leaves room for."""
        cost = self.costs[name]
        most = tokens / cost.least_s(self.peaks)
        reached = f"serai reaches {ours / most:.2f} of it, llama.cpp {theirs / most:.2f}"
        room = f"so the ratio could be {most / theirs:.2f} at most"
        return f"the bound of a step is {cost.limit(self.peaks)}: {reached}, {room}"


def bench_against_llama(made: MidModel, gguf: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure both on a written model and its GGUF file."""
    warm()
    tell("do both compute the same?")
    same = check_same_function()
    with ExitStack() as opened:
        tell("reading the weights, serai")
        found = find_model(made.folder)
        opened.callback(found.files.close)
        loaded = load_model(found, Precision.FAST, max_rows=PREFILL_TOKENS, trunk=Trunk.Q8)
        opened.callback(loaded.model.close)
        tell("reading the weights, llama.cpp")
        room = PREFILL_TOKENS + PROMPT_TOKENS + 2 * STEPS + ROUNDS * SESSION_STEPS
        llama = Llama(gguf, threads=threads(), sequences=1 + SESSIONS, tokens=room, batch=PREFILL_TOKENS)
        opened.callback(llama.close)
        serai = Serai(loaded)
        for side in (serai, llama):
            side.feed(prompts(loaded.model.config.vocab_size))
        rounds, peaks = [], []
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            tell(f"round {number + 1}")
            rounds.append(one_round(serai, llama, loaded.model.config.vocab_size, number))
            with parallel_region():
                peaks.append(measure_peaks(STREAMS))
        costs = {
            "decode": step_cost(loaded, 1, 1),
            "prefill": step_cost(loaded, PREFILL_TOKENS, 1),
            "sessions8": step_cost(loaded, SESSIONS, SESSIONS),
        }
    return report(rounds, made, gguf, same, Bounds(costs, median_peaks(peaks)))


def check_same_function() -> str:
    """Both sides with a small model; says how far their logits are apart. Raises `BenchFailed` if that is too far."""
    error, agreed, own = in_float32_and_in_8_bits()
    many = f"{SMALL.layers} layers, {SMALL.experts_per_token} of {SMALL.experts} experts picked by the router"
    near = f"in float32 the logits of a small model ({many}) differ by {error:.0e} of their size"
    return f"{near}, {agreed} of {SESSIONS} top-1 equal; 8 bits move serai's own by {own:.2f}, its weights being random"


def in_float32_and_in_8_bits() -> tuple[float, int, float]:
    """Difference of both sides' logits in float32 and equal top-1; difference of serai's in 8 bits from those."""
    from serai.runtime.bench.gguf_model import write_gguf  # needs the extra

    with ExitStack() as opened:
        made = Path(opened.enter_context(TemporaryDirectory()))
        folder, gguf = made / "model", made / "model.gguf"
        write_tiny_model(folder, SMALL)
        found = find_model(folder)
        opened.callback(found.files.close)
        write_gguf(found.config, found.files, gguf, in_float32=True)
        exact = load_model(found, Precision.EXACT, max_rows=PREFILL_TOKENS)
        opened.callback(exact.model.close)
        rounded = load_model(found, Precision.FAST, max_rows=PREFILL_TOKENS, trunk=Trunk.Q8)
        opened.callback(rounded.model.close)
        room = 2 * PROMPT_TOKENS
        llama = Llama(
            gguf, threads=threads(), sequences=1 + SESSIONS, tokens=room, batch=PREFILL_TOKENS, in_float32=True
        )
        opened.callback(llama.close)
        error, agreed = compare(Serai(exact), llama, SMALL.vocab)
        parts = prompts(SMALL.vocab)
        return error, agreed, difference(Serai(rounded).feed(parts), Serai(exact).feed(parts))


def difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    """Relative RMS difference of a prompt's logits, the median prompt's."""
    return float(np.median(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1)))


def prompts(vocab: int) -> list[tuple[int, Tokens]]:
    """A prompt for each of the sequences 1 to 8."""
    rng = np.random.default_rng(5)
    return [(1 + i, rng.integers(0, vocab, PROMPT_TOKENS).astype(np.int32)) for i in range(SESSIONS)]


def compare(serai: Side, llama: Side, vocab: int) -> tuple[float, int]:
    """Both read `prompts`: the `difference` of their logits, and equal top-1.

    Raises `BenchFailed` when they differ by more than float32's roundings explain.
    """
    parts = prompts(vocab)
    ours, theirs = serai.feed(parts), llama.feed(parts)
    error = difference(ours, theirs)
    agreed = int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum())
    if not error <= MOST_ERROR:
        raise BenchFailed(f"serai's and llama.cpp's logits differ by {error:.3f} of their size, so nothing is compared")
    return error, agreed


def one_round(serai: Side, llama: Side, vocab: int, number: int) -> tuple[Speeds, Speeds]:
    """serai's and llama.cpp's speeds; who begins alternates from round to round."""
    sides = (serai, llama) if number % 2 else (llama, serai)
    rng = np.random.default_rng(number)
    prompt = rng.integers(0, vocab, PREFILL_TOKENS).astype(np.int32)
    following = rng.integers(0, vocab, (STEPS, SESSIONS, 1)).astype(np.int32)
    for side in sides:
        side.forget(0)
    prefill = _seconds(sides, [[(0, prompt)]])
    decode = _seconds(sides, [[(0, one[0])] for one in following])
    sessions = _seconds(sides, [[(1 + i, one[i]) for i in range(SESSIONS)] for one in following[:SESSION_STEPS]])
    first, second = (
        Speeds(PREFILL_TOKENS / prefill[at], 1 / decode[at], SESSIONS / sessions[at]) for at in range(len(sides))
    )
    return (first, second) if number % 2 else (second, first)


def _seconds(sides: Sequence[Side], steps: Sequence[Sequence[tuple[int, Tokens]]]) -> list[float]:
    """Median time of a step, of each side. They take turns every few steps: what memory gives drifts within seconds."""
    seconds: list[list[float]] = [[] for _ in sides]
    for begin in range(0, len(steps), TURN_STEPS):
        for side, own in zip(sides, seconds, strict=True):
            for parts in steps[begin : begin + TURN_STEPS]:
                began = time.perf_counter()
                side.feed(parts)
                own.append(time.perf_counter() - began)
    return [statistics.median(own) for own in seconds]


def median_peaks(peaks: Sequence[Peaks]) -> Peaks:
    """The median of each."""
    return Peaks(*(statistics.median(getattr(one, field.name) for one in peaks) for field in fields(Peaks)))


def report(rounds: Sequence[tuple[Speeds, Speeds]], made: MidModel, gguf: Path, same: str, bounds: Bounds) -> Report:
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    size = f"{made.shape.layers} layers in K3's layout, {gguf.stat().st_size / 1e9:.1f} GB as GGUF"
    if crashes_with_amx():
        crash = f"release {PINNED} crashes in its AMX ones on this architecture"
        size += f", llama.cpp with AMX and repacked layouts both off ({crash}), serai with its own"
    else:
        size += ", llama.cpp with nothing switched off"
    held = "on both sides 8-bit projections, MXFP4 experts, bfloat16 gates"
    where = f"{size}; {held}; {threads()} threads, {load}"
    built = f"llama.cpp's build: {system_info()}"
    kinds = {
        "decode_vs_llama": ("decode", 1, f"one session after {PREFILL_TOKENS} tokens"),
        "prefill_vs_llama": ("prefill", PREFILL_TOKENS, f"{PREFILL_TOKENS} tokens"),
        "sessions8_vs_llama": ("sessions8", SESSIONS, f"{SESSIONS} sessions together"),
    }
    claims = []
    for name, least in LLAMA_CLAIMS:
        field, tokens, what = kinds[name]
        ratio = statistics.median(getattr(ours, field) / getattr(theirs, field) for ours, theirs in rounds)
        ours, theirs = (statistics.median(getattr(pair[side], field) for pair in rounds) for side in (0, 1))
        speeds = f"{what}: {ours:.1f} tok/s against {theirs:.1f}, median of {len(rounds)} rounds"
        detail = f"{speeds}; {bounds.sentence(field, tokens, ours, theirs)}; {where}; {same}; {built}"
        claims.append(Claim.at_least(name, ratio, "ratio", least, detail))
    rows: list[dict[str, object]] = [
        {"round": number + 1, "side": side, "prefill": one.prefill, "decode": one.decode, "8 sessions": one.sessions8}
        for number, pair in enumerate(rounds)
        for side, one in zip(("serai", "llama.cpp"), pair, strict=True)
    ]
    return Report("model", tuple(claims), tuple(rows))
