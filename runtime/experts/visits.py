"""Visits to experts that are read into a cache: what one layer of one step holds, waits for and gives back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import SeraiError
from serai.runtime.experts.access import Batch
from serai.runtime.experts.policy import SlotState
from serai.runtime.experts.reader import Rank
from serai.runtime.experts.slots import NOT_HELD

if TYPE_CHECKING:
    from serai.runtime.experts.streamed import StreamedExperts


class StreamedVisit:
    """Hands experts out as they arrive. Holds every slot it found or had filled until that is used."""

    rank = Rank.WANTED

    def __init__(self, experts: "StreamedExperts", layer: int, ids: NDArray[np.int32]) -> None:
        self.layer = layer
        self._experts = experts
        self._ids = ids
        self._slots = np.full(len(ids), NOT_HELD, dtype=np.int64)
        self._open = np.ones(len(ids), dtype=np.bool_)  # neither handed out nor failed
        self._given = np.empty(0, dtype=np.int64)
        self._failures: dict[int, SeraiError] = {}
        self._seen = -1

    @property
    def finished(self) -> bool:
        return not self._open.any()

    @property
    def is_draining(self) -> bool:
        return not (self._slots[self._open] == NOT_HELD).any() and not self._experts.reader.has_wanted

    @property
    def failures(self) -> Mapping[int, SeraiError]:
        return self._failures

    def take(self) -> Batch | None:
        self._give_back()
        self._experts.collect()
        self._seen = self._experts.changes
        self._begin_all()
        held = np.flatnonzero(self._open & (self._slots != NOT_HELD))
        which = self._next(held[self._experts.cache.states(self._slots[held]) != SlotState.LOADING])
        if not len(which):
            return None
        self._open[which] = False
        self._given = self._slots[which]
        return Batch(which, self._experts.cache.addresses(self._given))

    def wait(self, timeout_s: float) -> None:
        # What another visit collected or gave back since this one looked may be what this one waits for.
        if self._seen == self._experts.changes:
            self._experts.reader.wait(timeout_s)

    def close(self) -> None:
        if self not in self._experts.visits:
            return
        self._experts.visits.remove(self)
        self._give_back()
        self._let_go(self._open.copy())
        self._experts.changes += 1

    def fail(self, slot: int, error: SeraiError) -> None:
        """The slot's read failed; the cache has let go of it."""
        for which in np.flatnonzero(self._open & (self._slots == slot)):
            self._open[which] = False
            self._failures[int(which)] = error

    def begin_missing(self) -> None:
        """Have read what is still missing, as far as there are slots; another visit may have begun some of it."""
        missing = np.flatnonzero(self._open & (self._slots == NOT_HELD))[: self._room()]
        if not len(missing):
            return
        cache = self._experts.cache
        self._slots[missing] = cache.lookup(self.layer, self._ids[missing])
        held = missing[self._slots[missing] != NOT_HELD]
        cache.pin(self._slots[held])
        self._experts.reader.promote(self._slots[held].tolist(), self.rank)
        missing = missing[self._slots[missing] == NOT_HELD]
        slots = self._experts.begin(self.layer, self._ids[missing], self.rank, guess=self._is_guess)
        self._slots[missing[: len(slots)]] = slots
        cache.pin(slots)

    _is_guess = False

    def _begin_all(self) -> None:
        self.begin_missing()

    def _room(self) -> int:
        """How many more slots it may hold."""
        return len(self._ids)

    def _next(self, ready: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of those that are ready are handed out now."""
        return ready

    def _give_back(self) -> None:
        if len(self._given):
            self._experts.changes += 1
        self._experts.cache.unpin(self._given)
        self._given = self._given[:0]

    def _let_go(self, which: NDArray[np.bool_]) -> None:
        """Hold these open ones no longer; reads of them that nobody else waits for and that have not begun are
        dropped."""
        held = self._slots[which & (self._slots != NOT_HELD)]
        self._open[which] = False
        cache = self._experts.cache
        cache.unpin(held)
        unwanted = [int(slot) for slot in held if not cache.is_pinned(int(slot))]
        for slot in self._experts.reader.cancel(unwanted):
            cache.cancel_load(slot)


MOST_IN_ORDER = 8
"""Experts that an ordered visit hands out at once: their slots are given back together, and new reads begin then."""


class OrderedVisit(StreamedVisit):
    """A wide pass's: a layer's experts in ascending id, a few at a time, read ahead from before it is known which of
    them are wanted.

    What was read stays until it is used, whatever other steps are run meanwhile; those have half of the slots.
    """

    rank = Rank.LATER

    def __init__(self, experts: "StreamedExperts", layer: int) -> None:
        super().__init__(experts, layer, np.arange(experts.cache.experts, dtype=np.int32))
        self._is_guess = True

    @property
    def holding(self) -> int:
        """Slots that it holds."""
        return len(self._given) + int(np.count_nonzero(self._open & (self._slots != NOT_HELD)))

    @property
    def lacks(self) -> bool:
        """Whether something it may be asked for has no slot yet."""
        return bool((self._slots[self._open] == NOT_HELD).any())

    def choose(self, ids: NDArray[np.int32], picks: int) -> None:
        """Its layer has come and wants these, ascending, which its rows picked `picks` times in all."""
        others = self._open.copy()
        others[ids] = False
        self._let_go(others)
        self._experts.cache.want(self.layer, ids, picks)
        self._slots, self._open, self._ids = self._slots[ids], self._open[ids], ids
        failures = self._failures
        self._failures = {place: failures[expert] for place, expert in enumerate(ids.tolist()) if expert in failures}
        self._is_guess = False
        self.begin_missing()

    def _begin_all(self) -> None:
        # What this one has used up, the next one fills.
        for visit in self._experts.ordered:
            visit.begin_missing()

    def _room(self) -> int:
        ordered = self._experts.ordered
        if any(visit.lacks for visit in ordered[: ordered.index(self)]):
            return 0  # the slots that a later layer took would be missing in the one that is computed first
        return self._experts.cache.slots // 2 - sum(visit.holding for visit in ordered)

    def _next(self, ready: NDArray[np.int64]) -> NDArray[np.int64]:
        run = np.flatnonzero(self._open)[:MOST_IN_ORDER]
        return run[: int(np.cumprod(np.isin(run, ready)).sum())]
