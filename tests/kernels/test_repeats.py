"""The search for what was said before, against the same in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serai.kernels.repeats import SHORTEST, most_alike, telling_pattern

LONGEST = 12


def alike(ids: list[int], place: int, end: int) -> int:
    """How many tokens before both are the same."""
    return next((n for n in range(place) if ids[place - 1 - n] != ids[end - 1 - n]), place)


def expected(ids: list[int], own: int, pattern: int, places: int) -> int:
    end = len(ids)
    found = [place for place in range(pattern, end) if alike(ids, place, end) >= pattern][-places:]
    return max(found, key=lambda place: (min(alike(ids, place, end), own, LONGEST), place), default=0)


def search(ids: list[int], own: int, pattern: int, places: int) -> int:
    """In an array that goes on, with what must not be read as part of the text."""
    longer = np.array([*ids, *ids[-SHORTEST:], 1, 1], np.int32)
    return most_alike(longer, len(ids), own, pattern, LONGEST, places)


@given(
    st.lists(st.integers(0, 2), min_size=3, max_size=90),
    st.integers(3, 90),
    st.integers(SHORTEST, 2 * LONGEST),
    st.integers(1, 5),
)
def test_the_place_most_like_the_end_is_found(ids: list[int], own: int, pattern: int, places: int) -> None:
    own = min(own, len(ids))
    pattern = min(pattern, own)
    assert search(ids, own, pattern, places) == expected(ids, own, pattern, places)


@pytest.mark.parametrize("between", [0, 1, 12, 13, 14, 15, 16, 17, 29, 30, 31, 32, 33, 1000])
@pytest.mark.parametrize("before", [0, 1, 15, 16, 17])
def test_it_is_found_wherever_it_lies_among_sixteen(before: int, between: int) -> None:
    pattern = [2**31 - 1, 0, 163_839]
    others = list(range(1, before + between + 1))
    text = [*others[:before], *pattern, *others[before:], *pattern]
    assert search(text, len(text), SHORTEST, 16) == before + len(pattern)
    assert search(text, len(text), SHORTEST + 1, 16) == 0


def test_a_pattern_never_begins_before_the_text_that_is_looked_at() -> None:
    """Of texts one after the other, the last one alone says how much of it can be guessed."""
    told = np.array([7, 8, 9, 1, 7, 8, 9, 2, 7, 8, 9, 3, 7, 8, 9, 4], np.int32)
    silent = np.array([1, 2, 3, 4, 5, 6], np.int32)
    both = np.concatenate([told, silent])
    assert telling_pattern(both, 0, len(told), 24, LONGEST) > SHORTEST
    assert telling_pattern(both, len(told), len(both), 24, LONGEST) == SHORTEST
