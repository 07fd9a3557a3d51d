"""Bars add up, small parts stay visible, and no number breaks a drawing."""

import math

from hypothesis import given
from hypothesis import strategies as st

from serai.runtime.monitor.figures import (
    Share,
    bar,
    duration_text,
    plot,
    rate_text,
    share_cells,
    sparkline,
    stacked_bar,
)
from serai.runtime.monitor.text import Tone, text_of

AMOUNTS = st.lists(st.integers(-5, 10**15), min_size=1, max_size=8)


def shares(amounts: list[int]) -> list[Share]:
    return [Share(f"part{number}", amount, Tone.LIVE) for number, amount in enumerate(amounts)]


@given(AMOUNTS, st.integers(0, 200))
def test_the_parts_of_a_bar_fill_it_and_none_is_lost(amounts: list[int], cells: int) -> None:
    given_cells = share_cells(shares(amounts), cells)
    some = [amount for amount in amounts if amount > 0]
    assert sum(given_cells) == (cells if some else 0)
    if cells >= len(some):
        assert all(width >= 1 for amount, width in zip(amounts, given_cells, strict=True) if amount > 0)
    assert len(text_of(stacked_bar(shares(amounts), cells))) == sum(given_cells)


def test_a_bar_reads_without_colour() -> None:
    drawn = stacked_bar(
        [Share("trunk", 50, Tone.TRUNK), Share("live", 10, Tone.LIVE), Share("free", 40, Tone.FREE)], 20
    )
    assert text_of(drawn) == "|trunk    |l|free   "


@given(st.lists(st.floats(-1e300, 1e300), max_size=40), st.integers(0, 30), st.integers(1, 6))
def test_sparklines_and_plots_are_as_large_as_asked(values: list[float], cells: int, rows: int) -> None:
    assert len(sparkline(values, cells)) == cells
    drawn = plot(values, cells, rows, top=max(values, default=0.0))
    assert [len(row) for row in drawn] == [cells] * rows


def test_a_plot_grows_from_below() -> None:
    assert plot([0, 1, 4, 8], 4, 2, top=8) == ["   █", " ▂██"]
    assert sparkline([0, 1, 8], 4) == "  ▂█"
    assert (bar(1, 1000, 10), bar(10, 10, 10), bar(0, 10, 10), bar(5, 0, 10)) == ("█", "█" * 10, "", "")


def test_durations_and_rates_are_short() -> None:
    told = [duration_text(seconds) for seconds in (0, 59.9, 60, 7_300, 90_000, 1e18, -1, math.nan, math.inf)]
    assert told == ["0 s", "59 s", "1 min", "2 h", "1 d", "9999 d", "?", "?", "?"]
    assert [rate_text(rate) for rate in (0.0, 9.96, 240.4, 12_345.0)] == ["·", "10.0", "240", "12,345"]
