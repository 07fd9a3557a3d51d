"""Guessing the next tokens from what the session has read before: agents copy a lot.

When the last few tokens have occurred earlier, what followed them then is guessed to follow now. A guess costs rows of
a step and nothing else: the tokens drawn are the same, right or wrong (DESIGN §6h).
"""

import numpy as np
from numpy.typing import NDArray

MOST_GUESSES = 8
LEAST_PATTERN, LONGEST_PATTERN = 3, 96
"""How many tokens must have occurred earlier. Shorter patterns occur by chance. Each try that finds nothing asks for
one twice as long the next time: a text that only seems to repeat itself pays for a handful of tries in all, while one
that copies a page soon has a pattern of any length."""

PAYS = 2
"""Right guesses that make up for a try: with none, the rows and a step were for nothing."""

PLACES = 16
"""Earlier places that are looked at, the latest first."""


class Guesser:
    """Watches one generation's tokens and proposes what may come next; the more rarely, the less it pays."""

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self._ids = np.empty(max(2 * len(ids), 64), dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._length = len(ids)
        self._pattern = LEAST_PATTERN

    def push(self, token: int) -> None:
        """The next token of the timeline."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(self._length, dtype=np.int32)])
        self._ids[self._length] = token
        self._length += 1

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow; none when nothing like the last tokens was read before."""
        most = min(most, MOST_GUESSES)
        if most < 1 or self._length <= self._pattern:
            return []
        place = self._place()
        return [] if place is None else self._ids[place : min(place + most, self._length)].tolist()

    def was_right(self, count: int) -> None:
        """How many guesses of a try were right."""
        if count == 0:
            self._pattern = min(2 * self._pattern, LONGEST_PATTERN)
        elif count >= PAYS:
            self._pattern = LEAST_PATTERN

    def _place(self) -> int | None:
        """Where the latest earlier occurrence of the last tokens ends."""
        ids, size = self._ids[: self._length], self._pattern
        last = ids[-size:]
        # One pass over all ids, tens of microseconds for 128 Ki of them; the rest is compared at few places.
        ends = np.flatnonzero(ids[size - 1 : -1] == last[-1])
        ends = ends[ids[ends + size - 2] == last[-2]]
        for end in ends[: -PLACES - 1 : -1].tolist():
            if np.array_equal(ids[end : end + size], last):
                return int(end) + size
        return None
