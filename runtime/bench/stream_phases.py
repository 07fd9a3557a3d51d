"""What a phase of `bench experts` took, and the two bounds it stands against: the disk's and the processor's."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.bench.aliased import AliasedExperts
from serai.runtime.checks.stepping import Stepper
from serai.runtime.engine import Engine
from serai.runtime.experts.cache import aligned_records
from serai.runtime.experts.slots import CacheCounters
from serai.runtime.experts.source import ExpertSource, open_source
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.models.kimi import KimiModel
from serai.runtime.models.open_model import LoadedModel, find_model
from serai.runtime.runtime import Runtime
from serai.runtime.state import State, StatePool

Tokens = NDArray[np.int32]

RAW_TRIED = (4, 8, 16)
"""Plain reads in flight; the best of them is what the disk can give."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing measured: tokens in seconds, what it asked of cache and disk, and what computing alone took."""

    name: str
    tokens: int
    seconds: float
    cache: CacheCounters
    read_bytes: int
    reading_s: float
    raw_rate: float
    compute_s: float
    record_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What was not in memory and had to be: wrong guesses are not among it."""
        return (self.cache.misses + self.cache.guesses_used) * self.record_bytes

    @property
    def disk_s(self) -> float:
        return self.needed_bytes / self.raw_rate

    @property
    def bound_s(self) -> float:
        return max(self.disk_s, self.compute_s)

    def row(self) -> dict[str, object]:
        return {
            "phase": self.name,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tok/s": self.tokens / self.seconds,
            "disk_s": self.disk_s,
            "compute_s": self.compute_s,
            "read_bytes": self.read_bytes,
            "needed_bytes": self.needed_bytes,
            "reading_s": self.reading_s,
            "raw_bytes_s": self.raw_rate,
            "distinct": self.cache.wanted,
            "routed": self.cache.picks,
            "hit_rate": self.cache.hit_rate,
            "guessed": self.cache.guessed,
            "guess_rate": self.cache.guess_rate,
        }


class NotedReads:
    """A source that notes which experts are read, in the order in which their reads begin."""

    def __init__(self, source: ExpertSource) -> None:
        self.source = source
        self.reads: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        self.reads.append((layer, expert))
        return self.source.read(layer, expert, record, scratch)


class RawDisk:
    """Plain direct reads of the records that a phase has read, in its order; a context manager."""

    def __init__(self, folder: Path, try_s: float) -> None:
        """Touches all the memory it will use, so that what is opened afterwards isn't charged with it."""
        found = find_model(folder)
        with found.files:
            self._source = open_source(found.config, found.files, found.prefix)
        self._memory = aligned_records(max(RAW_TRIED), self._source.record_bytes)
        self._memory.fill(0)
        self._try_s = try_s

    def rate(self, reads: Sequence[tuple[int, int]]) -> float:
        """Bytes a second of reading these experts again, with as many reads in flight as give most."""
        return max(self._rate(reads, count) for count in RAW_TRIED)

    def _rate(self, reads: Sequence[tuple[int, int]], in_flight: int) -> float:
        left = iter(reads)  # an iterator over a sequence hands each item to one thread
        until_s = time.monotonic() + self._try_s

        def work(record: NDArray[np.uint8]) -> int:
            taken = 0
            for layer, expert in left:
                for span in self._source.spans(layer, expert):
                    self._source.read_span(span, record[: span.page_bytes])
                    taken += span.page_bytes
                if time.monotonic() >= until_s:
                    break
            return taken

        began_s = time.monotonic()
        with ThreadPoolExecutor(in_flight) as pool:
            taken = sum(pool.map(work, self._memory[:in_flight]))
        return taken / (time.monotonic() - began_s)

    def __enter__(self) -> "RawDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()


class PhaseClock:
    """Starts when made; `stop` gives the phase. The disk's rate is measured after it, by its own reads."""

    def __init__(self, rt: Runtime, disk: RawDisk) -> None:
        self._disk = disk
        self._streamed = streamed_in(rt)
        self._noted = NotedReads(self._streamed.source)
        self._streamed.reader._source = self._noted
        self._before = self._streamed.status
        self._began_s = time.perf_counter()

    def stop(self, name: str, tokens: int) -> Phase:
        seconds = time.perf_counter() - self._began_s
        self._streamed.reader._source = self._streamed.source
        after, before = self._streamed.status, self._before
        counters = {
            field: getattr(after.cache, field) - getattr(before.cache, field)
            for field in CacheCounters.__dataclass_fields__
        }
        return Phase(
            name=name,
            tokens=tokens,
            seconds=seconds,
            cache=CacheCounters(**counters),
            read_bytes=after.reads.read_bytes - before.reads.read_bytes,
            reading_s=after.reads.reading_s - before.reads.reading_s,
            raw_rate=self._disk.rate(self._noted.reads),
            compute_s=0.0,
            record_bytes=after.slot_bytes,
        )


class Computing:
    """The model of an idle runtime without its disk: every expert's id stands for a record in memory."""

    def __init__(self, rt: Runtime) -> None:
        streamed, model = streamed_in(rt), model_in(rt)
        places = streamed.cache.addresses(np.arange(streamed.cache.slots))
        self.experts = AliasedExperts(streamed.layout, streamed.cache.experts, places)
        aliased = KimiModel(
            model.config,
            model.weights,
            self.experts,
            model.layout,
            max_rows=model.max_rows,
            wide_rows=model.wide_rows,
            fast=True,
        )
        self._layout = model.layout
        self._loaded = LoadedModel(aliased, model.layout, rt._services.journal._fingerprint)

    def answers(self, prompts: Sequence[Tokens], said: Sequence[Tokens], first: int) -> float:
        """Seconds of feeding what the sessions said, one token of each a step, from the `first` of them on."""
        stepper = Stepper(self._loaded, StatePool(self._layout))
        states = [stepper.run(prompt) for prompt in prompts]
        began_s = 0.0
        for number in range(len(said[0])):
            if number == first:
                began_s = time.perf_counter()
            states, _ = stepper.feed(
                [(state, one[number : number + 1]) for state, one in zip(states, said, strict=True)]
            )
        took_s = time.perf_counter() - began_s
        for state in states:
            state.release()
        return took_s

    def prompts(self, prompts: Sequence[Tokens]) -> float:
        """Seconds of reading all prompts side by side, in steps as large as they may be."""
        stepper = Stepper(self._loaded, StatePool(self._layout))
        stepper.max_rows = max(stepper.max_rows, self._loaded.model.wide_rows)
        states: list[State] = [stepper.pool.empty() for _ in prompts]
        share = stepper.max_rows // len(prompts)
        began_s = time.perf_counter()
        for start in range(0, len(prompts[0]), share):
            parts = [prompt[start : start + share] for prompt in prompts]
            states, _ = stepper.feed(list(zip(states, parts, strict=True)))
        took_s = time.perf_counter() - began_s
        for state in states:
            state.release()
        return took_s


def model_in(rt: Runtime) -> KimiModel:
    """The model behind a runtime; for measuring only."""
    engine = rt._services.driver.engine
    if not isinstance(engine, Engine) or not isinstance(engine._model, KimiModel):
        raise AssertionError("open_runtime runs a KimiModel")
    return engine._model


def streamed_in(rt: Runtime) -> StreamedExperts:
    """Its experts, which the budget must have made streamed."""
    experts = model_in(rt).experts
    if not isinstance(experts, StreamedExperts):
        raise AssertionError("the budget of this bench holds a part of the experts")
    return experts
