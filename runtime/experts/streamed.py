"""Experts read into a cache of fixed size when a step needs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import SeraiError
from serai.runtime.experts.access import Batch
from serai.runtime.experts.cache import ExpertCache
from serai.runtime.experts.disk import ReadMode
from serai.runtime.experts.policy import DEFAULT_POLICY, Policy, SlotState
from serai.runtime.experts.reader import ExpertReader, Read, ReadCounters
from serai.runtime.experts.slots import NOT_HELD, CacheCounters
from serai.runtime.experts.source import ExpertSource


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
        self._visits: list[StreamedVisit] = []
        self._degraded = ""
        self._unreadable: dict[tuple[int, int], str] = {}
        self._changes = 0  # goes up whenever a visit could take something it could not take before

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
            degraded=self._degraded,
        )

    def visit(self, layer: int, ids: NDArray[np.int32], picks: int, *, in_order: bool = False) -> "StreamedVisit":
        self._collect()
        self._drop_wrong_guesses(layer, ids)
        visit = StreamedVisit(self, layer, ids, picks, in_order)
        self._visits.append(visit)
        return visit

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        self._collect()
        missing = ids[self.cache.lookup(layer, ids) == NOT_HELD]
        # Half of what is free to take: guesses must not leave the next layer's misses without slots.
        room = (self.cache.count(SlotState.EMPTY) + self.cache.count(SlotState.READY)) // 2
        self.begin(layer, missing[:room], guess=True)

    def wait(self, timeout_s: float) -> None:
        # What one visit's `take` collected, or gave back, may be what another waits for.
        if all(visit.has_seen(self._changes) for visit in self._visits):
            self.reader.wait(timeout_s)

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
            self.wait(1.0)
            self._collect()
            if progress is not None:
                progress(len(order) - loading, len(order))

    def begin(self, layer: int, ids: NDArray[np.int32], *, guess: bool = False) -> NDArray[np.int64]:
        """Take slots for the first of these experts, none of them held, and have them read; gives the slots."""
        slots = self.cache.begin_load(layer, ids, guess=guess)
        reads = [
            Read(layer, int(expert), int(slot), self.cache.memory(int(slot)))
            for expert, slot in zip(ids, slots, strict=False)
        ]
        self.reader.post(reads, guess=guess)
        return slots

    def close(self) -> None:
        """Stop reading. Every visit must have been closed."""
        self.reader.close()
        self.source.close()

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself; with no visit under way nothing is in use."""
        self.cache.check()
        if not self._visits and self.cache.count(SlotState.IN_USE):
            raise AssertionError("expert cache: slots are in use while no step is computing")

    def _collect(self) -> None:
        """Take note of the reads that have ended."""
        for ended in self.reader.collect():
            self._changes += 1
            if ended.error is None:
                self.cache.finish_load(ended.read.slot)
                if self._unreadable.pop((ended.read.layer, ended.read.expert), None) is not None:
                    self._degraded = next(reversed(self._unreadable.values()), "")
                continue
            self.cache.fail_load(ended.read.slot)
            if not isinstance(ended.error, SeraiError):
                raise ended.error
            self._degraded = self._unreadable[ended.read.layer, ended.read.expert] = str(ended.error)
            for visit in self._visits:
                visit.fail(ended.read.slot, ended.error)

    def _drop_wrong_guesses(self, layer: int, ids: NDArray[np.int32]) -> None:
        """The layer has come: what was guessed for it, is not wanted and has not been begun need not be read."""
        guesses = self.cache.loading_guesses(layer)
        if not len(guesses):
            return
        wanted = set(self.cache.lookup(layer, ids).tolist())
        for slot in self.reader.cancel([slot for slot in guesses.tolist() if slot not in wanted]):
            self.cache.cancel_load(slot)


MOST_IN_ORDER = 8
"""Experts that an ordered visit hands out at once: their slots are given back together, and new reads begin then."""


class StreamedVisit:
    """One layer's experts for one step; made by `StreamedExperts.visit`."""

    def __init__(
        self, experts: StreamedExperts, layer: int, ids: NDArray[np.int32], picks: int, in_order: bool
    ) -> None:
        self._experts = experts
        self._layer = layer
        self._ids = ids
        self._slots = experts.cache.want(layer, ids, picks)
        self._open = np.ones(len(ids), dtype=np.bool_)  # neither handed out nor failed
        self._given = np.empty(0, dtype=np.int64)
        self._failures: dict[int, SeraiError] = {}
        self._seen = -1
        # A wide step's visit may be left standing while other steps are run: they have the other half of the slots.
        self._window = experts.cache.slots // 2 if in_order else len(ids)
        if self._window == 0 and len(ids):
            raise ValueError("a visit in order needs a cache of two slots or more")
        self._in_order = in_order
        if in_order:
            self._slots[:] = NOT_HELD  # held when its turn is near
        else:
            self._hold(np.flatnonzero(self._slots != NOT_HELD))
        self._begin_missing()

    @property
    def finished(self) -> bool:
        return not self._open.any()

    @property
    def failures(self) -> Mapping[int, SeraiError]:
        return self._failures

    def take(self) -> Batch | None:
        self._give_back()
        self._experts._collect()
        self._seen = self._experts._changes
        self._begin_missing()
        held = np.flatnonzero(self._open & (self._slots != NOT_HELD))
        ready = self._experts.cache.states(self._slots[held]) != SlotState.LOADING
        which = held[ready]
        if self._in_order:
            # Nothing before it may be missing: neither loading nor without a slot yet.
            run = np.flatnonzero(self._open)[:MOST_IN_ORDER]
            which = run[: int(np.cumprod(np.isin(run, which)).sum())]
        if not len(which):
            return None
        self._open[which] = False
        self._given = self._slots[which]
        return Batch(which, self._experts.cache.addresses(self._given))

    def wait(self, timeout_s: float) -> None:
        # What another visit collected or gave back since this one looked may be what this one waits for.
        if self._seen == self._experts._changes:
            self._experts.reader.wait(timeout_s)

    def close(self) -> None:
        if self not in self._experts._visits:
            return
        self._experts._visits.remove(self)
        self._give_back()
        held = self._slots[self._open & (self._slots != NOT_HELD)]
        self._open[:] = False
        cache = self._experts.cache
        cache.unpin(held)
        self._experts._changes += 1
        unwanted = [int(slot) for slot in held if not cache.is_pinned(int(slot))]
        for slot in self._experts.reader.cancel(unwanted):
            cache.cancel_load(slot)

    def fail(self, slot: int, error: SeraiError) -> None:
        """The slot's read failed; the cache has let go of it."""
        for which in np.flatnonzero(self._open & (self._slots == slot)):
            self._open[which] = False
            self._failures[int(which)] = error

    def has_seen(self, changes: int) -> bool:
        """Whether it can only wait: it has looked since the last of these changes, and holds nothing to give back."""
        return not self.finished and not len(self._given) and self._seen == changes

    def _give_back(self) -> None:
        if len(self._given):
            self._experts._changes += 1
        self._experts.cache.unpin(self._given)
        self._given = self._given[:0]

    def _begin_missing(self) -> None:
        """Have read what is still missing, as far as there are slots; another visit may have begun some of it."""
        missing = np.flatnonzero(self._open & (self._slots == NOT_HELD))
        missing = missing[: self._window - np.count_nonzero(self._open & (self._slots != NOT_HELD))]
        if not len(missing):
            return
        self._slots[missing] = self._experts.cache.lookup(self._layer, self._ids[missing])
        self._hold(missing[self._slots[missing] != NOT_HELD])
        missing = missing[self._slots[missing] == NOT_HELD]
        slots = self._experts.begin(self._layer, self._ids[missing])
        self._slots[missing[: len(slots)]] = slots
        self._experts.cache.pin(slots)

    def _hold(self, which: NDArray[np.int64]) -> None:
        """Keep these slots until they were used; reads that were only guessed at are wanted now."""
        if not len(which):
            return
        slots = self._slots[which]
        self._experts.cache.pin(slots)
        self._experts.reader.promote(slots.tolist())
