"""Where a text has said before what it says now: the search behind guessing (:mod:`serai.runtime.sampling.guessing`).

It is done for every token that is drawn, beside steps that may take less than a millisecond, so it reads the ids with
vectors and makes no arrays. A place is the number of tokens before it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels.compile import inline, kernel
from serai.kernels.memory import load16_n
from serai.kernels.simd import any_of, splat_i32

SHORTEST = 3
"""The fewest tokens that count as having occurred before. Of so many, sixteen places are compared at a time."""


@inline
def _alike(ids: Any, place: int, end: int, most: int) -> int:
    """How many tokens before ``place`` and ``end`` are the same, up to ``most``."""
    count = 0
    while count < most and ids[place - 1 - count] == ids[end - 1 - count]:
        count += 1
    return count


@inline
def _latest(ids: Any, start: int, end: int, pattern: int, below: int) -> int:
    """The latest place below ``below`` that the same ``pattern`` tokens lead to as to ``end``, all of them from
    ``start`` on; 0 if there is none."""
    last, second, third = splat_i32(ids[end - 1]), splat_i32(ids[end - 2]), splat_i32(ids[end - 3])
    while below > start + pattern:
        first = max(below - 16, start + pattern)
        places = below - first
        one = load16_n(ids, first - 1, places) == last
        two = load16_n(ids, first - 2, places) == second
        three = load16_n(ids, first - 3, places) == third
        if any_of(one & two & three):
            for place in range(below - 1, first - 1, -1):
                if _alike(ids, place, end, pattern) == pattern:
                    return place
        below = first
    return 0


@kernel("i64(i32[::1], i64, i64, i64, i64, i64)")
def most_alike(ids: NDArray[np.int32], end: int, own: int, pattern: int, longest: int, places: int) -> int:
    """The place before ``end`` that has most in common with it, 0 if there is none that has ``pattern`` tokens.

    Of ``ids``, int32 ``[n]``, the first ``end`` are searched. Likeness counts up to ``longest`` tokens and not beyond
    the ``own`` last ones, where ``SHORTEST`` <= ``pattern`` <= ``own``; equal ones go to the latest place. No more than
    ``places`` are looked at, the latest first.
    """
    best, most, place = 0, 0, end
    for _ in range(places):
        place = _latest(ids, 0, end, pattern, place)
        if place == 0:
            break
        alike = _alike(ids, place, end, min(place, own, longest))
        if alike > most:
            best, most = place, alike
        if most == longest:
            break
    return best


@kernel("i64(i32[::1], i64, i64, i64, i64)")
def telling_pattern(ids: NDArray[np.int32], start: int, end: int, checked: int, longest: int) -> int:
    """How many tokens have to have occurred before for what followed them to be likely to follow again.

    Each of the last ``checked`` tokens of ``ids[start:end]``, int32, is looked at as if it were to be guessed from
    what followed the latest place alike. Where patterns of one length, ``SHORTEST`` at first, were mostly wrong, those
    of twice the length are asked for, up to ``longest``, or if there were none, of twice that.
    """
    pattern = SHORTEST
    while pattern < longest:
        tried = right = 0
        for at in range(max(end - checked, start + pattern + 1), end):
            place = _latest(ids, start, at, pattern, at)
            if place > 0:
                tried += 1
                right += ids[place] == ids[at]
        if 2 * right > tried + 1 or (tried == 0 and pattern == SHORTEST):
            break
        pattern *= 2
        if tried == 0:
            break
    return pattern
