"""Which expert is in which slot: the bookkeeping of the expert cache, without its memory.

The simulator runs this very code on recorded traces. One thread owns a table (the engine thread); nobody else touches
it, so it has no lock. An expert is named by its layer (as config.json counts them, from 0) and its id in the layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serai.runtime.experts.policy import DEFAULT_POLICY, Policy, SlotState, SlotsView, choose_victims, fading

NOT_HELD = -1

# Plain numbers: looking a member up in its class costs more than the array operations here.
_EMPTY, _LOADING, _READY, _IN_USE = (int(state) for state in SlotState)


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """What the cache has done. `picks` counts the choices of all rows, of which each distinct expert of a visit is
    wanted once: a hit when it was there, `late` when its read was under way, else a miss. `guessed` experts were read
    ahead, and `guesses_used` of them were wanted when their layer came."""

    picks: int = 0
    hits: int = 0
    late: int = 0
    misses: int = 0
    loads: int = 0
    failed_loads: int = 0
    cancelled_loads: int = 0
    evictions: int = 0
    guessed: int = 0
    guesses_used: int = 0

    @property
    def wanted(self) -> int:
        """Distinct experts wanted, summed over visits."""
        return self.hits + self.late + self.misses

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were resident; 0 before any was wanted."""
        return self.hits / self.wanted if self.wanted else 0.0

    @property
    def sharing(self) -> float:
        """Distinct experts for each choice of a row: the less, the more rows share a read; 1 before any was made."""
        return self.wanted / self.picks if self.picks else 1.0

    @property
    def guess_rate(self) -> float:
        """Share of the experts read ahead that were then wanted."""
        return self.guesses_used / self.guessed if self.guessed else 0.0


class SlotTable:
    """`slots` places for the experts of `layers`, `experts` in each layer."""

    def __init__(self, layers: Sequence[int], experts: int, slots: int, policy: Policy = DEFAULT_POLICY) -> None:
        if slots < 1:
            raise ValueError(f"an expert cache needs at least one slot, not {slots}")
        self.layers = tuple(layers)
        self.experts = experts
        self.slots = slots
        self.policy = policy
        self.counters = CacheCounters()
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        keys = len(self.layers) * experts
        self._slot_of = np.full(keys, NOT_HELD, dtype=np.int64)
        self._key_of = np.full(slots, NOT_HELD, dtype=np.int64)
        self._states = np.full(slots, _EMPTY, dtype=np.uint8)
        self._pins = np.zeros(slots, dtype=np.int64)
        self._guessed = np.zeros(slots, dtype=np.bool_)
        self._last_used = np.zeros(keys, dtype=np.int64)
        self._frequency = np.zeros(keys, dtype=np.float64)
        self._layer_hits = np.zeros(len(self.layers), dtype=np.int64)
        self._layer_misses = np.zeros(len(self.layers), dtype=np.int64)
        self._now = 0
        self._at_place = 0

    def lookup(self, layer: int, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """The slot of each expert, or `NOT_HELD`; a slot found may still be loading."""
        return self._slot_of[self._keys(layer, ids)]

    def states(self, slots: NDArray[np.int64]) -> NDArray[np.uint8]:
        """`SlotState` values of these slots."""
        return self._states[slots]

    def want(self, layer: int, ids: NDArray[np.int32], picks: int) -> NDArray[np.int64]:
        """A step has come to `layer` and needs these distinct experts, which its rows picked `picks` times in all:
        counts them, and gives what `lookup` gives."""
        keys = self._keys(layer, ids)
        slots = self._slot_of[keys]
        held = slots != NOT_HELD
        loading = held & (self._states[np.where(held, slots, 0)] == _LOADING)
        used = int(self._guessed[slots[held]].sum())
        self._now += 1
        self._at_place = self._place[layer]
        # Guesses of this layer are over, right or wrong: the wrong ones are worth no more than their frequency. What is
        # pinned was read ahead by a wide pass, for which it has yet to turn out.
        over = (self._key_of // self.experts == self._at_place) & (self._pins == 0)
        self._guessed[(self._key_of != NOT_HELD) & over] = False
        self._guessed[slots[held]] = False
        age = self._now - self._last_used[keys]
        self._frequency[keys] = self._frequency[keys] * fading(age, len(self.layers)) + 1.0
        self._last_used[keys] = self._now
        counters, late, found = self.counters, int(loading.sum()), int(held.sum())
        self._layer_hits[self._at_place] += found
        self._layer_misses[self._at_place] += len(ids) - found
        self.counters = replace(
            counters,
            picks=counters.picks + picks,
            hits=counters.hits + found - late,
            late=counters.late + late,
            misses=counters.misses + len(ids) - found,
            guesses_used=counters.guesses_used + used,
        )
        return slots

    def begin_load(self, layer: int, ids: NDArray[np.int32], *, guess: bool = False) -> NDArray[np.int64]:
        """Take a slot for each of these experts, none of which is held; a read must now fill it.

        Slots are given to the first of `ids`, fewer than asked when no more may be taken. With `guess` they are for a
        layer that has not come yet.
        """
        keys = self._keys(layer, ids)
        if (self._slot_of[keys] != NOT_HELD).any():
            raise ValueError(
                f"experts {ids[self._slot_of[keys] != NOT_HELD].tolist()} of layer {layer} are held already"
            )
        slots = choose_victims(self.view(), self.policy, len(ids), for_guess=guess)
        before = self._key_of[slots]
        self._slot_of[before[before != NOT_HELD]] = NOT_HELD
        taken = keys[: len(slots)]
        self._key_of[slots] = taken
        self._slot_of[taken] = slots
        self._states[slots] = _LOADING
        self._guessed[slots] = guess
        counters = self.counters
        self.counters = replace(
            counters,
            loads=counters.loads + len(slots),
            evictions=counters.evictions + int((before != NOT_HELD).sum()),
            guessed=counters.guessed + (len(slots) if guess else 0),
        )
        return slots

    def finish_load(self, slot: int) -> None:
        """The read has filled the slot."""
        self._require_loading(slot)
        self._states[slot] = _IN_USE if self._pins[slot] else _READY

    def fail_load(self, slot: int) -> None:
        """The read failed: the slot is empty again, and whoever had pinned it has nothing to unpin."""
        self._drop_load(slot)
        self.counters = replace(self.counters, failed_loads=self.counters.failed_loads + 1)

    def cancel_load(self, slot: int) -> None:
        """The read never began and is no longer wanted; the slot is empty again."""
        if self._pins[slot]:
            raise ValueError(f"slot {slot} is waited for, so its read can't be cancelled")
        self._drop_load(slot)
        self.counters = replace(self.counters, cancelled_loads=self.counters.cancelled_loads + 1)

    def pin(self, slots: NDArray[np.int64]) -> None:
        """Keep these slots, distinct and held, until as many `unpin`s; those loading become `IN_USE` when filled."""
        if not len(slots):
            return
        if (self._states[slots] == _EMPTY).any():
            raise ValueError(f"slots {slots.tolist()} can't all be pinned: some are empty")
        self._pins[slots] += 1
        ready = slots[self._states[slots] == _READY]
        self._states[ready] = _IN_USE

    def unpin(self, slots: NDArray[np.int64]) -> None:
        """Undo one `pin` of each of these distinct slots."""
        if not len(slots):
            return
        if (self._pins[slots] < 1).any():
            raise ValueError(f"slots {slots.tolist()} are not all pinned")
        self._pins[slots] -= 1
        free = slots[(self._pins[slots] == 0) & (self._states[slots] == _IN_USE)]
        self._states[free] = _READY

    def is_pinned(self, slot: int) -> bool:
        """Whether somebody uses the slot or waits for it."""
        return bool(self._pins[slot])

    def loading_guesses(self, layer: int) -> NDArray[np.int64]:
        """Slots being filled on a guess that `layer` will need them, for which nobody waits yet."""
        loading = self._guessed & (self._states == _LOADING) & (self._pins == 0)
        return np.flatnonzero(loading & (self._key_of // self.experts == self._place[layer]))

    def expert_in(self, slot: int) -> tuple[int, int] | None:
        """The layer and id of the expert a slot holds or is loading."""
        key = int(self._key_of[slot])
        return None if key == NOT_HELD else (self.layers[key // self.experts], key % self.experts)

    def view(self) -> SlotsView:
        """What the policy sees now."""
        keys = self._key_of
        held = keys != NOT_HELD
        safe = np.where(held, keys, 0)
        rounds = len(self.layers)
        ahead = (safe // self.experts - self._at_place - 1) % rounds + 1
        return SlotsView(
            states=self._states.copy(),
            last_used=np.where(held, self._last_used[safe], 0),
            frequency=np.where(held, self._frequency[safe], 0.0),
            visits_ahead=ahead,
            guessed=self._guessed.copy(),
            now=self._now,
            round_visits=rounds,
        )

    def usage(self) -> NDArray[np.float64]:
        """How often each expert was wanted, old uses faded, cached or not; float64 `[layers, experts]`."""
        left = fading(self._now - self._last_used, len(self.layers))
        return (self._frequency * left).reshape(len(self.layers), self.experts)

    def layer_lookups(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Experts wanted that had a slot, and that had none; each int64 `[layers]`."""
        return self._layer_hits.copy(), self._layer_misses.copy()

    def held(self) -> NDArray[np.int64]:
        """How many experts of each layer have a slot, int64 `[layers]`."""
        held: NDArray[np.int64] = (self._slot_of != NOT_HELD).reshape(len(self.layers), self.experts).sum(axis=1)
        return held

    def remember(self, usage: NDArray[np.float64]) -> None:
        """Start from the `usage` of an earlier table; only before anything was wanted."""
        if self._now or usage.shape != (len(self.layers), self.experts):
            raise ValueError("usage can be given once, before the first visit, as [layers, experts]")
        self._frequency[:] = usage.reshape(-1)

    def count(self, state: SlotState) -> int:
        """Slots in that state."""
        return int(np.count_nonzero(self._states == state))

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        held = np.flatnonzero(self._slot_of != NOT_HELD)
        full = np.flatnonzero(self._key_of != NOT_HELD)
        _require(len(held) == len(full), "as many experts are held as slots are taken")
        _require(bool((self._key_of[self._slot_of[held]] == held).all()), "each expert's slot holds that expert")
        _require(bool((self._states[full] != _EMPTY).all()), "a taken slot is not empty")
        _require(self.count(SlotState.EMPTY) == self.slots - len(full), "every other slot is empty")
        _require(bool((self._pins >= 0).all()), "no slot is unpinned more often than pinned")
        in_use = self._states == _IN_USE
        _require(bool((self._pins[in_use] > 0).all()), "a slot in use is pinned")
        idle = (self._states == _READY) | (self._states == _EMPTY)
        _require(not self._pins[idle].any(), "a pinned slot is in use or loading")
        _require(not self._guessed[self._states == _EMPTY].any(), "an empty slot holds no guess")
        counters = self.counters
        ended = counters.failed_loads + counters.cancelled_loads + counters.evictions
        _require(counters.loads - ended == len(full), "every load is held, or was evicted, cancelled or failed")

    def _keys(self, layer: int, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        return ids.astype(np.int64) + self._place[layer] * self.experts

    def _require_loading(self, slot: int) -> None:
        if self._states[slot] != _LOADING:
            raise ValueError(f"slot {slot} is {SlotState(self._states[slot]).name}, not LOADING")

    def _drop_load(self, slot: int) -> None:
        self._require_loading(slot)
        self._slot_of[self._key_of[slot]] = NOT_HELD
        self._key_of[slot] = NOT_HELD
        self._states[slot] = _EMPTY
        self._pins[slot] = 0
        self._guessed[slot] = False


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"expert cache: it does not hold that {what}")
