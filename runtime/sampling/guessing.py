"""Guessing the next tokens from what the session has read before: agents copy a lot.

When the last few tokens have occurred earlier, what followed them then is guessed to follow now. A guess costs rows of
a step and nothing else: the tokens drawn are the same, right or wrong (DESIGN §6h).
"""

import numpy as np
from numpy.typing import NDArray

MOST_GUESSES = 8
PATTERN_TOKENS = 3
"""Shorter patterns occur by chance; longer ones find copies later."""

SCORE_TO_GO_ON = 1.0
"""Right guesses a try that make trying worth its rows and, when wrong, its repeated step."""

FIRST_SCORE = 2.0
"""Two tries that find nothing are enough to doubt a text."""

REST_TOKENS, LONGEST_REST_TOKENS = 32, 512
"""How long guessing rests when it did not pay, before one try more. Each time that fails too the rest is twice as long,
so that a text without repetition pays for next to nothing."""


class Guesser:
    """Watches one generation's tokens and proposes what may come next; rests while that doesn't pay."""

    def __init__(self, ids: NDArray[np.int32]) -> None:
        self._ids = np.empty(max(2 * len(ids), 64), dtype=np.int32)
        self._ids[: len(ids)] = ids
        self._length = len(ids)
        self._score = FIRST_SCORE
        self._rest = 0
        self._next_rest = REST_TOKENS

    def push(self, token: int) -> None:
        """The next token of the timeline."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(self._length, dtype=np.int32)])
        self._ids[self._length] = token
        self._length += 1
        self._rest = max(self._rest - 1, 0)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may follow; none while resting, or when nothing like this was read before."""
        length, size = self._length, PATTERN_TOKENS
        most = min(most, MOST_GUESSES)
        if self._rest or most < 1 or length <= size:
            return []
        ids = self._ids[:length]
        last = ids[length - size :]
        matches = ids[size - 1 : length - 1] == last[-1]
        for back in range(1, size):
            matches &= ids[size - 1 - back : length - 1 - back] == last[-1 - back]
        places = np.flatnonzero(matches)
        if len(places) == 0:
            return []
        start = int(places[-1]) + size
        return [int(token) for token in ids[start : start + most]]

    def was_right(self, count: int) -> None:
        """How many guesses of a try were right."""
        self._score += 0.3 * (count - self._score)
        if self._score < SCORE_TO_GO_ON:
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST_TOKENS)
            self._score = SCORE_TO_GO_ON
        elif count >= FIRST_SCORE:
            self._next_rest = REST_TOKENS
