"""`serai bench kernels`: every kernel against what this machine gives, measured in the same run on the same pool.

Three kinds of peaks: reading a buffer larger than any cache (at its best number of streams a thread), copying one past
the cache (bytes read and written), and multiply-adds that stay in registers: 8-bit, bfloat16, float32. A figure is the
median of several runs; a kernel that uses the tile unit (AMX) can exceed the peak of the 8-bit vector dot, which the
ratios refer to on every machine.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from serai.kernels import peaks
from serai.kernels.arrays import aligned
from serai.kernels.cpu import SimdPath, chosen_path
from serai.kernels.matrix import Format
from serai.kernels.threads import parallel_region, threads
from serai.runtime.bench.kernel_cases import (
    HEADS,
    LATENT,
    TOKEN_BYTES,
    TOKEN_OPERATIONS,
    Attention,
    Case,
    KdaLayers,
    fast_product,
    other_cases,
    weights,
)
from serai.runtime.bench.report import Claim, Report

RUNS = 7
STREAMS = (1, 2, 4)
_DOT_TASKS, _DOT_TURNS = 64, 20_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the bench is; `--quick` stays honest, but its buffers may fit a large last-level cache."""

    stream_bytes: int
    weight_bytes: int
    kda_layers: int
    context: int
    flat_positions: int


FULL = Scale(1 << 30, 1 << 30, 69, 32_768, 1_000_000)
QUICK = Scale(1 << 26, 1 << 26, 6, 8_192, 32_000)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes and operations a second that this machine gives at most."""

    read: float
    copy: float
    int8: float
    bfloat16: float
    float32: float

    def of(self, dot: str) -> float:
        return {"int8": self.int8, "bfloat16": self.bfloat16, "float32": self.float32}[dot]


def bench_kernels(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `tell` is called with what is being done."""
    scale = QUICK if quick else FULL
    with parallel_region():
        tell("streams and dots")
        streams = Streams(scale.stream_bytes)
        peak = measure_peaks(scale, streams)
        rows: list[dict[str, object]] = [
            {"kernel": "stream read", "GB/s": peak.read / 1e9},
            {"kernel": "stream copy", "GB/s": peak.copy / 1e9},
            {"kernel": "8-bit dots in registers", "GFLOP/s": peak.int8 / 1e9},
            {"kernel": "dots of bfloat16 pairs in registers", "GFLOP/s": peak.bfloat16 / 1e9},
            {"kernel": "float32 multiply-adds in registers", "GFLOP/s": peak.float32 / 1e9},
        ]

        def timed(case: Case) -> float:
            tell(case.name)
            seconds = median_s(case.run)
            rows.append(_row(case, seconds, peak))
            return seconds

        claims = [*_products(scale, peak, streams, timed), *_kda(scale, streams, timed), *_mla(scale, peak, timed)]
        rows.append(_prefill_row(scale, timed))
        for case in other_cases(scale.weight_bytes):
            timed(case)
    return Report("kernels", tuple(claims), tuple(rows))


def median_s(run: Callable[[], None], runs: int = RUNS) -> float:
    """Median wall time of a call, after one that does not count."""
    run()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Streams:
    """Two buffers to read and to copy, each way at any number of streams a thread."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._source, self._target = (aligned(nbytes // 4, np.float32) for _ in range(2))
        self._source[:], self._target[:] = 1, 0
        self._out = aligned(nbytes // peaks.TASK_BYTES * peaks.LINE_FLOATS, np.float32)

    def read_s(self, runs: int = RUNS) -> float:
        """Seconds that reading `nbytes` takes at the best number of streams."""
        return min(median_s(partial(peaks.read_stream, self._source, n, self._out), runs) for n in STREAMS)

    def copy_s(self, runs: int = RUNS) -> float:
        """Seconds that copying `nbytes`, so moving twice as many, takes at the best number of streams."""
        return min(median_s(partial(peaks.copy_stream, self._source, self._target, n), runs) for n in STREAMS)


def measure_peaks(scale: Scale, streams: Streams | None = None) -> Peaks:
    """What this machine gives now."""
    streams = streams or Streams(scale.stream_bytes)
    out = aligned(12 * _DOT_TASKS * peaks.LINE_FLOATS, np.float32)
    numbers = np.full(64, 0.5, np.float32)
    int8 = median_s(lambda: peaks.dot_peak(numbers, _DOT_TASKS, _DOT_TURNS, out))
    pairs = median_s(lambda: peaks.pair_peak(numbers, _DOT_TASKS, _DOT_TURNS, out))
    float32 = median_s(lambda: peaks.fma_peak(numbers, _DOT_TASKS, _DOT_TURNS, out))
    turns = _DOT_TASKS * _DOT_TURNS
    return Peaks(
        streams.nbytes / streams.read_s(),
        2 * streams.nbytes / streams.copy_s(),
        turns * peaks.DOT_OPERATIONS / int8,
        turns * peaks.PAIR_OPERATIONS / pairs,
        turns * peaks.FMA_OPERATIONS / float32,
    )


def _row(case: Case, seconds: float, peak: Peaks) -> dict[str, object]:
    row: dict[str, object] = {"kernel": case.name, "ms": seconds * 1e3}
    if case.nbytes:
        speed = case.nbytes / seconds
        row |= {"GB/s": speed / 1e9, "of stream read": speed / peak.read, "of stream copy": speed / peak.copy}
    if case.operations:
        speed = case.operations / seconds
        row |= {"GFLOP/s": speed / 1e9, "of register peak": speed / peak.of(case.dot)}
    return row


def _at_least(name: str, value: float, least: float, detail: str) -> Claim:
    return Claim(name, value, "ratio", f">= {least:g}", value >= least, _where(detail))


def _at_most(name: str, value: float, most: float, detail: str) -> Claim:
    return Claim(name, value, "ratio", f"<= {most:g}", value <= most, _where(detail))


def _where(detail: str) -> str:
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return f"{detail}; median of {RUNS}, {threads()} threads, {load}"


def _products(scale: Scale, peak: Peaks, streams: Streams, timed: Callable[[Case], float]) -> list[Claim]:
    claims = []
    for name, weight_format in (("mxfp4", Format.MXFP4), ("q8", Format.Q8)):
        w = weights(weight_format, scale.weight_bytes, LATENT)
        case = fast_product(f"{name} x 8-bit, 1 row", w, 1)
        detail = f"{w.nbytes / timed(case) / 1e9:.1f} GB/s of {w.nbytes >> 20} MiB of weights as stored, one row"
        ratio = _in_turns(case.run, w.nbytes, lambda: streams.nbytes / streams.read_s(1))
        claims.append(_at_least(f"{name}_gemv_vs_stream", ratio, 0.8, detail))
    ratios = {}
    for name, weight_format, nbytes in (("mxfp4", Format.MXFP4, 12 << 20), ("q8", Format.Q8, 24 << 20)):
        w = weights(weight_format, nbytes, LATENT)
        for rows in (64, 256):
            case = fast_product(f"{name} x 8-bit, {rows} rows", w, rows)
            ratios[case.name] = case.operations / timed(case) / peak.int8
    lowest = min(ratios, key=lambda name: ratios[name])
    how = "with the tile unit" if chosen_path() is SimdPath.AVX512_AMX else "with vector dots"
    detail = f"the lowest of {', '.join(ratios)}: {lowest}, {how}; the peak is that of 8-bit vector dots"
    claims.append(_at_least("prefill_vs_int8_peak", ratios[lowest], 0.5, detail))
    return claims


def _kda(scale: Scale, streams: Streams, timed: Callable[[Case], float]) -> list[Claim]:
    """The step against a copy, and whether it knows how long a session is.

    The step is decay, delta rule, update and read-out. The layer, which is what a session runs, has also the
    convolutions, norms and gates: 0.4 to 0.8 us a head of 128, a tenth to a seventh of the time that its state takes,
    and memory waits for most of that (`kernels/kda_pass.py` says why they can't be done meanwhile).
    """
    layers = KdaLayers(scale.kda_layers, HEADS, 1)
    name = f"kda step, {scale.kda_layers} layers"
    seconds = timed(Case(name, layers.recur_all, layers.state_bytes, layers.operations, "float32"))
    detail = (
        f"{layers.state_bytes / seconds / 1e9:.1f} GB/s of {layers.state_bytes >> 20} MiB of state read and written"
    )
    name = f"kda step with convolutions, norms and gates, {scale.kda_layers} layers"
    seconds = timed(Case(name, layers.step_all, layers.nbytes, layers.operations, "float32"))
    whole = f"{layers.nbytes / seconds / 1e9:.1f} GB/s, what a session runs: with the convolutions, norms and gates"
    early, late = _states_after(1_000, scale.flat_positions)
    before, after = (_layers_of(state, min(scale.kda_layers, 12)) for state in (early, late))
    # In turns, so that whatever else the machine does meets both alike.
    ratio = statistics.median(median_s(after.step_all, 1) / median_s(before.step_all, 1) for _ in range(3 * RUNS))
    flat = f"one token through {after.layers} layers of states after {scale.flat_positions:,} tokens, and after 1,000"

    def copy_speed() -> float:
        return 2 * streams.nbytes / streams.copy_s(1)

    of_copy = _in_turns(layers.recur_all, layers.state_bytes, copy_speed)
    whole_of_copy = _in_turns(layers.step_all, layers.nbytes, copy_speed)
    return [
        _at_least("kda_step_vs_copy", of_copy, 0.95, detail),
        _at_least("kda_layer_vs_copy", whole_of_copy, 0.8, whole),
        _at_most("kda_flat", ratio, 1.05, flat),
    ]


def _in_turns(run: Callable[[], None], nbytes: int, bytes_a_second: Callable[[], float]) -> float:
    """How near `run`, which moves `nbytes`, comes to a stream, in turns: memory's speed changes within seconds."""
    return statistics.median(nbytes / median_s(run, 1) / bytes_a_second() for _ in range(RUNS))


def _layers_of(state: NDArray[np.float32], layers: int) -> KdaLayers:
    """Layers whose heads hold copies of that state."""
    made = KdaLayers(layers, HEADS, 1)
    made.before[:] = np.resize(state, made.before.size)
    return made


def _states_after(few: int, many: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The state of a layer of two heads after so many tokens, in order of positions."""
    chunk = 1_000
    layer = KdaLayers(1, 2, chunk)
    layer.before[:] = 0
    kept = []
    for position in range(chunk, many + 1, chunk):
        layer.step(0)
        layer.swap()
        if position in (few, many):
            kept.append(layer.before[: layer.state_floats].copy())
    return kept[0], kept[-1]


def _mla(scale: Scale, peak: Peaks, timed: Callable[[Case], float]) -> list[Claim]:
    case = Attention(scale.context).case(f"mla, 1 row at {scale.context:,} tokens")
    seconds = timed(case)
    none = timed(Attention(1).case("mla, 1 row at 1 token"))
    coded_case = Attention(scale.context, coded=True).case(f"mla, 1 row at {scale.context:,} tokens, 8-bit latents")
    timed(coded_case)
    turns = [(median_s(coded_case.run, 1), median_s(case.run, 1)) for _ in range(RUNS)]  # what else goes on meets both
    of_codes = statistics.median(coded_s / plain_s for coded_s, plain_s in turns)
    token_s = max(TOKEN_BYTES / peak.read, TOKEN_OPERATIONS / peak.bfloat16)
    bound = "dots of bfloat16" if TOKEN_OPERATIONS / peak.bfloat16 > TOKEN_BYTES / peak.read else "stream read"
    detail = (
        f"{case.operations / seconds / 1e9:.0f} GFLOP/s at {scale.context:,} tokens, {HEADS} heads, bound by {bound}"
    )
    slope = (seconds - none) / (token_s * (scale.context - 1))
    return [
        _at_least("mla_decode_vs_bound", token_s * scale.context / seconds, 0.6, detail),
        _at_most("mla_slope_vs_bound", slope, 1.6, f"{detail}; the time at 1 token taken off"),
        Claim.measured("mla_q8_vs_bfloat16", of_codes, "of the time", _where(_of_codes(case, coded_case))),
    ]


def _of_codes(case: Case, coded: Case) -> str:
    return f"the same over 8-bit latents, {coded.nbytes / case.nbytes:.2f} of the bytes, multiplied in bfloat16"


def _prefill_row(scale: Scale, timed: Callable[[Case], float]) -> dict[str, object]:
    """What 64 rows of a prefill take at the end of a long context, beside the arithmetic of the other form."""
    attention = Attention(scale.context, 64)
    case = attention.case(f"mla, 64 rows at {scale.context:,} tokens")
    seconds = timed(case)
    return {
        "kernel": f"{case.name}: absorbed against expanded",
        "ms": seconds * 1e3,
        "GFLOP absorbed": case.operations / 1e9,
        "GFLOP expanded": attention.expanded_operations / 1e9,
    }
