"""Experts read into a cache of fixed size when a step needs them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import SeraiError
from serai.runtime.experts.access import Visit
from serai.runtime.experts.cache import ExpertCache
from serai.runtime.experts.disk import ReadMode
from serai.runtime.experts.policy import DEFAULT_POLICY, Policy, SlotState
from serai.runtime.experts.reader import ExpertReader, Rank, Read, ReadCounters
from serai.runtime.experts.slots import NOT_HELD, CacheCounters
from serai.runtime.experts.source import ExpertSource
from serai.runtime.experts.visits import OrderedVisit, StreamedVisit


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """How streaming goes; a snapshot. `degraded` says what could not be read, empty when all of it has been since."""

    slots: int
    slots_filled: int
    slot_bytes: int
    reads_in_flight: int
    mode: ReadMode
    cache: CacheCounters
    reads: ReadCounters
    degraded: str


class StreamedExperts:
    """A cache, its reader, and the visits under way. Owned by the engine thread."""

    def __init__(self, source: ExpertSource, slots: int, reads_in_flight: int, policy: Policy = DEFAULT_POLICY) -> None:
        """`slots` beyond the number of experts are not made. The source is closed with this."""
        self.layout = source.layout
        self.source = source
        self.cache = ExpertCache(
            source.layers,
            source.experts,
            min(slots, len(source.layers) * source.experts),
            source.record_bytes,
            policy,
        )
        self.reader = ExpertReader(source, reads_in_flight)
        self.visits: list[StreamedVisit] = []  # in the order in which they were opened
        self.degraded = ""
        self._unreadable: dict[tuple[int, int], str] = {}
        self.changes = 0  # goes up whenever a visit could take something it could not take before

    @property
    def ordered(self) -> list[OrderedVisit]:
        """The visits of wide passes."""
        return [visit for visit in self.visits if isinstance(visit, OrderedVisit)]

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.reader.scratch_bytes

    @property
    def status(self) -> StreamStatus:
        return StreamStatus(
            slots=self.cache.slots,
            slots_filled=self.cache.slots - self.cache.count(SlotState.EMPTY),
            slot_bytes=self.cache.record_bytes,
            reads_in_flight=self.reader.threads,
            mode=self.source.mode,
            cache=self.cache.counters,
            reads=self.reader.counters,
            degraded=self.degraded,
        )

    def expect(self, layer: int) -> OrderedVisit:
        if self.cache.slots < 2:
            raise ValueError("reading a layer's experts in order needs a cache of two slots or more")
        self.collect()
        visit = OrderedVisit(self, layer)
        self.visits.append(visit)
        visit.begin_missing()
        return visit

    def addresses(self, layer: int) -> None:
        """They come and go."""

    def visit(self, layer: int, ids: NDArray[np.int32], picks: int, *, expected: Visit | None = None) -> StreamedVisit:
        self.collect()
        self._drop_wrong_guesses(layer, ids)
        if isinstance(expected, OrderedVisit):
            expected.choose(ids, picks)
            return expected
        self.cache.want(layer, ids, picks)
        visit = StreamedVisit(self, layer, ids)
        self.visits.append(visit)
        visit.begin_missing()
        return visit

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        self.collect()
        self._drop_wrong_guesses(layer, ids)  # those of an earlier guess at it
        missing = ids[self.cache.lookup(layer, ids) == NOT_HELD]
        # Half of what is free to take: guesses must not leave the next layer's misses without slots.
        room = (self.cache.count(SlotState.EMPTY) + self.cache.count(SlotState.READY)) // 2
        self.begin(layer, missing[:room], Rank.GUESSED, guess=True)

    def warm(self, usage: NDArray[np.float64], progress: Callable[[int, int], None] | None = None) -> None:
        """Fill the cache with the experts most used before, float64 `[layers, experts]`, and wait for them.

        An expert that can't be read is left out here and reported when a step needs it.
        """
        self.cache.remember(usage)
        order = np.argsort(-usage, axis=None, kind="stable")[: self.cache.slots]
        order = order[usage.reshape(-1)[order] > 0]
        place, expert = np.divmod(order, self.cache.experts)
        for number, layer in enumerate(self.cache.layers):
            self.begin(layer, expert[place == number].astype(np.int32))
        while (loading := self.cache.count(SlotState.LOADING)) > 0:
            self.reader.wait(1.0)
            self.collect()
            if progress is not None:
                progress(len(order) - loading, len(order))

    def begin(
        self, layer: int, ids: NDArray[np.int32], rank: Rank = Rank.WANTED, *, guess: bool = False
    ) -> NDArray[np.int64]:
        """Take slots for the first of these experts, none of them held, and have them read; gives the slots. With
        `guess` it is not known yet whether they are wanted."""
        slots = self.cache.begin_load(layer, ids, guess=guess)
        reads = [
            Read(layer, int(expert), int(slot), self.cache.memory(int(slot)))
            for expert, slot in zip(ids, slots, strict=False)
        ]
        self.reader.post(reads, rank)
        return slots

    def close(self) -> None:
        """Stop reading. Every visit must have been closed."""
        self.reader.close()
        self.source.close()

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself; with no visit under way nothing is in use."""
        self.cache.check()
        if not self.visits and self.cache.count(SlotState.IN_USE):
            raise AssertionError("expert cache: slots are in use while no step is computing")

    def collect(self) -> None:
        """Take note of the reads that have ended."""
        for ended in self.reader.collect():
            self.changes += 1
            if ended.error is None:
                self.cache.finish_load(ended.read.slot)
                if self._unreadable.pop((ended.read.layer, ended.read.expert), None) is not None:
                    self.degraded = next(reversed(self._unreadable.values()), "")
                continue
            self.cache.fail_load(ended.read.slot)
            if not isinstance(ended.error, SeraiError):
                raise ended.error
            self.degraded = self._unreadable[ended.read.layer, ended.read.expert] = str(ended.error)
            for visit in self.visits:
                visit.fail(ended.read.slot, ended.error)

    def _drop_wrong_guesses(self, layer: int, ids: NDArray[np.int32]) -> None:
        """The layer has come: what was guessed for it, is not wanted and has not been begun need not be read."""
        guesses = self.cache.loading_guesses(layer)
        if not len(guesses):
            return
        wanted = set(self.cache.lookup(layer, ids).tolist())
        for slot in self.reader.cancel([slot for slot in guesses.tolist() if slot not in wanted]):
            self.cache.cancel_load(slot)
