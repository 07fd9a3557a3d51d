"""Which expert leaves the cache: one pure function over frozen values, and the rules of worth it can be given.

A slot is `EMPTY`, `LOADING` (a read is filling it), `READY`, or `IN_USE` (a step computes with it or is about to).
Only `EMPTY` and `READY` slots are ever given away.

The rules were compared on routing traces, at cache sizes from one layer's experts to most of the model; the command
that prints the table, and the figures it gave, are in `simulate.py`. `DEFAULT_POLICY` is the winner.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SlotState(IntEnum):
    """What is in a slot of the expert cache."""

    EMPTY = 0
    LOADING = 1
    READY = 2
    IN_USE = 3


@dataclass(frozen=True, slots=True)
class SlotsView:
    """Everything a choice may depend on; each array has one entry a slot.

    `states` are `SlotState` values. `last_used` is the layer visit at which the slot's expert was last wanted and
    `frequency` how often it was wanted up to then, older uses counting for less (`FREQUENCY_HALF_LIFE`); both remember
    an expert through times it was not cached. `visits_ahead` is how many layer visits pass until the expert's layer
    comes round again. `guessed` marks experts read ahead for a layer that has not come yet. `now` is the current visit,
    `round_visits` the layers of one pass through the model.
    """

    states: NDArray[np.uint8]
    last_used: NDArray[np.int64]
    frequency: NDArray[np.float64]
    visits_ahead: NDArray[np.int64]
    guessed: NDArray[np.bool_]
    now: int
    round_visits: int


class Policy(Protocol):
    """A rule of worth."""

    @property
    def name(self) -> str: ...

    def worth(self, slots: SlotsView) -> NDArray[np.float64]:
        """How much keeping each slot's expert is worth, float64 `[slots]`; the least worthy goes first."""
        ...


FREQUENCY_HALF_LIFE = 4
"""Passes through the model after which a use counts half. Longer ones tell popular experts apart better (16: one point
more hits where popularity rules), shorter ones see better what a session is about just now (16: seven points fewer hits
where a token's experts are mostly those of the token before); `simulate.py` has the figures."""


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used."""

    name: str = "lru"

    def worth(self, slots: SlotsView) -> NDArray[np.float64]:
        return slots.last_used.astype(np.float64)


@dataclass(frozen=True, slots=True)
class Lfru:
    """Least frequently, and among equals least recently, used; old uses fade."""

    name: str = "lfru"

    def worth(self, slots: SlotsView) -> NDArray[np.float64]:
        return faded(slots)


@dataclass(frozen=True, slots=True)
class NextUse:
    """Latest expected next use: the visits until the expert's layer comes round, and then one round for each time it
    is likely to be passed over."""

    name: str = "next-use"

    def worth(self, slots: SlotsView) -> NDArray[np.float64]:
        # A use in every round adds up to `most`; so this is the share of its layer's visits an expert is wanted in.
        most = 1.0 / (1.0 - 2.0 ** (-1.0 / FREQUENCY_HALF_LIFE))
        share = np.clip(faded(slots) / most, 1e-9, 1.0)
        worth: NDArray[np.float64] = -(slots.visits_ahead + slots.round_visits * (1.0 / share - 1.0))
        return worth


def faded(slots: SlotsView) -> NDArray[np.float64]:
    """Each expert's frequency as of now."""
    return slots.frequency * fading(slots.now - slots.last_used, slots.round_visits)


def fading(visits: NDArray[np.int64], round_visits: int) -> NDArray[np.float64]:
    """What is left of a use's weight after so many layer visits."""
    left: NDArray[np.float64] = np.exp2(-visits / (FREQUENCY_HALF_LIFE * round_visits))
    return left


POLICIES: tuple[Policy, ...] = (Lru(), Lfru(), NextUse())
DEFAULT_POLICY: Policy = NextUse()


def choose_victims(slots: SlotsView, policy: Policy, count: int, *, for_guess: bool = False) -> NDArray[np.int64]:
    """Up to `count` slots to load into, int64, in the order they should be taken.

    Empty slots first, then ready ones by ascending worth, the lower slot where worths are equal. Experts read ahead
    go last, and never for another guess (`for_guess`). Fewer are given when no more may be taken.
    """
    empty = np.flatnonzero(slots.states == SlotState.EMPTY)[:count]
    if len(empty) == count:
        return empty
    ready = np.flatnonzero((slots.states == SlotState.READY) & ~(slots.guessed & for_guess))
    worth = policy.worth(slots)[ready]
    order = np.lexsort((ready, worth, slots.guessed[ready]))
    return np.concatenate([empty, ready[order[: count - len(empty)]]])
