"""The heat map of the expert cache: hits and misses a layer, and the wanted groups of its experts as digits."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.experts.heat import MOST_GROUPS, digits, grouped, layer_heat
from serai.runtime.experts.slots import SlotTable
from serai.runtime.status import LayerHeat
from tests.runtime.experts.test_cache import ids, load


def test_each_layer_counts_its_own_lookups_and_shows_what_is_wanted() -> None:
    table = SlotTable((1, 4), 4, 6)
    table.want(1, ids(0, 2), 2)
    load(table, 1, 0, 2)
    for _ in range(3):
        table.want(1, ids(0), 1)
    table.want(4, ids(3), 1)
    load(table, 4, 3)
    first, second = layer_heat(table)
    assert (first.layer, first.hits, first.misses, first.held) == (1, 3, 2, 2)
    assert first.heat[0] == "9"
    assert first.heat[1] == first.heat[3] == "0"
    assert "1" <= first.heat[2] < "9"
    assert (second.layer, second.hits, second.misses, second.held, second.heat[:3]) == (4, 0, 1, 1, "000")
    assert sum(one.hits for one in (first, second)) == table.counters.hits
    assert sum(one.misses for one in (first, second)) == table.counters.misses


def test_a_layer_nobody_came_to_is_cold() -> None:
    assert layer_heat(SlotTable((0,), 2, 1)) == (LayerHeat(0, 0, 0, 0, "00"),)


def test_a_halving_is_one_digit_less_and_anything_wanted_shows() -> None:
    assert digits(np.array([[1.0, 0.6, 0.3, 1e-9, 0.0]])) == ["99810"]


@given(st.integers(1, 900))
def test_groups_are_as_equal_as_can_be(experts: int) -> None:
    assert np.allclose(grouped(np.full((2, experts), 3.0)), 3.0)
    assert grouped(np.zeros((2, experts))).shape == (2, min(experts, MOST_GROUPS))


def test_k3s_heat_is_a_few_kilobytes() -> None:
    table = SlotTable(range(1, 93), 896, 8)
    assert sum(len(one.heat) for one in layer_heat(table)) == 92 * MOST_GROUPS
