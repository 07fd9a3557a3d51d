"""Which expert leaves the cache."""

from dataclasses import replace

import numpy as np
import pytest

from serai.runtime.experts.policy import POLICIES, Lfru, Lru, NextUse, Policy, SlotState, SlotsView, choose_victims

E, L, R, U = SlotState.EMPTY, SlotState.LOADING, SlotState.READY, SlotState.IN_USE


def view(
    states: list[SlotState],
    last_used: list[int] | None = None,
    frequency: list[float] | None = None,
    ahead: list[int] | None = None,
    guessed: list[bool] | None = None,
) -> SlotsView:
    count = len(states)
    return SlotsView(
        states=np.array(states, np.uint8),
        last_used=np.array(last_used or [0] * count, np.int64),
        frequency=np.array(frequency or [1.0] * count, np.float64),
        visits_ahead=np.array(ahead or [1] * count, np.int64),
        guessed=np.array(guessed or [False] * count, np.bool_),
        now=100,
        round_visits=10,
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_loading_and_used_slots_are_never_victims(policy: Policy) -> None:
    """B12."""
    slots = view([L, U, R, U, L], last_used=[1, 2, 99, 3, 4])
    assert choose_victims(slots, policy, 5).tolist() == [2]
    assert choose_victims(view([L, U, U]), policy, 2).tolist() == []


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_empty_slots_go_first_and_equal_ones_in_their_order(policy: Policy) -> None:
    assert choose_victims(view([R, E, R, E]), policy, 3).tolist() == [1, 3, 0]
    assert choose_victims(view([R, E, R, E]), policy, 1).tolist() == [1]


def test_the_choice_depends_on_nothing_but_its_arguments() -> None:
    slots = view([R] * 6, last_used=[5, 3, 9, 1, 7, 2])
    before = (slots.states.tolist(), slots.last_used.tolist(), slots.frequency.tolist())
    first = choose_victims(slots, Lru(), 3)
    assert first.tolist() == choose_victims(slots, Lru(), 3).tolist()
    assert before == (slots.states.tolist(), slots.last_used.tolist(), slots.frequency.tolist())


def test_lru_lets_the_longest_unused_go() -> None:
    assert choose_victims(view([R] * 3, last_used=[9, 4, 7]), Lru(), 2).tolist() == [1, 2]


def test_lfru_keeps_what_is_often_used_until_that_fades() -> None:
    slots = view([R, R], last_used=[95, 100], frequency=[5.0, 1.0])
    assert choose_victims(slots, Lfru(), 1).tolist() == [1]
    assert choose_victims(replace(slots, now=995, last_used=np.array([95, 990])), Lfru(), 1).tolist() == [0]


def test_next_use_lets_the_layer_go_that_comes_round_last() -> None:
    slots = view([R, R, R], frequency=[5.0, 5.0, 5.0], last_used=[100] * 3, ahead=[2, 9, 4])
    assert choose_victims(slots, NextUse(), 1).tolist() == [1]
    rare_but_near = view([R, R], frequency=[1.0, 6.0], last_used=[100] * 2, ahead=[1, 10])
    assert choose_victims(rare_but_near, NextUse(), 1).tolist() == [0]


def test_what_was_read_ahead_goes_last_and_never_for_another_guess() -> None:
    slots = view([R, R, R], last_used=[9, 1, 7], guessed=[False, True, False])
    assert choose_victims(slots, Lru(), 3).tolist() == [2, 0, 1]
    assert choose_victims(slots, Lru(), 3, for_guess=True).tolist() == [2, 0]
