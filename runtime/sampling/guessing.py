"""Guessing the next tokens from what was read before: agents copy a lot.

When the last few tokens have occurred earlier, what followed them then is guessed to follow now. A guess costs rows of
a step and nothing else: the tokens drawn are the same, right or wrong (contract, h). `Guesser` says what may come next,
`Worth` whether a session has found that to pay, by the clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serai.kernels.repeats import SHORTEST, most_alike, telling_pattern

LEAST_GUESSES, MOST_GUESSES = 2, 32
LEAST_PATTERN, LONGEST_PATTERN = SHORTEST, 96
"""How many tokens must have occurred earlier. Shorter patterns occur by chance. Each try that loses time asks for one
twice as long the next time: a text that only seems to repeat itself pays for a handful of tries in all, while one that
copies a page soon has a pattern of any length."""

CHECKED, CHECKED_WITHIN = 24, 2048
"""How many of a text's last tokens tell whether it can be guessed by itself, and how far back each is looked for."""

PLACES = 16
"""Earlier places that are looked at, the latest first."""

FIRST_CREDIT, MOST_CREDIT, LEAST_CREDIT = 0.5, 4.0, -1.5
EARNED = 0.003
"""What guessing may lose, in steps of one row: so much at first, and 0.3 % of what is generated after that.
What it has won may be risked again up to `MOST_CREDIT`; after any loss it is tried again within 500 tokens."""

FORGET = 0.8
"""What a try leaves of the weight of those before it."""

_NOTHING = -1
"""Stands between the texts; it is no token."""


class Guesser:
    """Watches one generation's tokens and proposes what may come next.

    `ids` are those of the timeline, int32 `[n]`; `others` are texts that it may well repeat besides, such as what was
    said from here on before it was taken back.
    """

    def __init__(self, ids: NDArray[np.int32], others: Sequence[NDArray[np.int32]] = ()) -> None:
        between = np.array([_NOTHING], dtype=np.int32)
        texts = [part for other in others for part in (other, between)]
        length = sum(map(len, texts)) + len(ids)
        self._ids = np.empty(max(2 * length, 64), dtype=np.int32)
        self._ids[:length] = np.concatenate([*texts, ids])
        self._start = length - len(ids)
        self._length = length

    def push(self, token: int) -> None:
        """The next token of the timeline."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(self._length, dtype=np.int32)])
        self._ids[self._length] = token
        self._length += 1

    def guess(self, most: int, *, pattern: int = LEAST_PATTERN) -> list[int]:
        """Up to `most` tokens that may follow; none unless the last `pattern` tokens occurred before.

        They are those that followed the place that has most in common with the end (up to `LONGEST_PATTERN` tokens),
        the latest of several. What repeats itself up to the end is guessed to go on repeating itself.
        """
        if most < 1 or self._length - self._start < pattern:
            return []
        place = most_alike(self._ids, self._length, self._length - self._start, pattern, LONGEST_PATTERN, PLACES)
        if place == 0:
            return []
        followed = self._ids[place : min(place + most, self._length)]
        if (ends := np.flatnonzero(followed == _NOTHING)).size:
            followed = followed[: ends[0]]
            most = len(followed)
        repeated: list[int] = np.resize(followed, most).tolist()
        return repeated

    def least_pattern(self) -> int:
        """How many tokens have to have occurred before for what followed to be likely to follow again, in this text.

        Its own last tokens say it: how often each would have been guessed right from those before it.
        """
        start = max(self._start, self._length - CHECKED_WITHIN)
        return telling_pattern(self._ids, start, self._length, CHECKED, LONGEST_PATTERN)


@dataclass(slots=True)
class Worth:
    """What guessing has won and lost a session, measured in the time that one token takes it without.

    `credit` is what may still be lost, in such tokens. `step_s` is the time of a step of one row, `row` that of every
    further row as a part of it; `right` and `wrong` count guesses, the older the less. `pays` is how many guesses a try
    should have by all that.
    """

    credit: float = FIRST_CREDIT
    step_s: float = 0.0
    row: float = 0.2
    right: float = 2.0
    wrong: float = 1.0
    pattern: int = LEAST_PATTERN
    pays: int = field(init=False)

    def __post_init__(self) -> None:
        self.pays = self._what_pays()

    def fork(self) -> "Worth":
        """A copy that goes its own way, for a session that goes on from the same text."""
        return Worth(self.credit, self.step_s, self.row, self.right, self.wrong, self.pattern)

    def begin(self, least_pattern: int = LEAST_PATTERN) -> None:
        """Another generation begins, and may be of another kind of text (`Guesser.least_pattern`)."""
        self.pattern = least_pattern

    @property
    def guesses(self) -> int:
        """How many tokens to guess now, 0 for none."""
        return self.pays if self.credit > 0.0 and self.step_s > 0.0 else 0

    def plain(self, seconds: float) -> None:
        """A step of one row and no guesses took so long."""
        # What had to wait for somebody else's step says nothing; what grows slowly is followed.
        quicker = seconds < self.step_s
        self.step_s += (0.5 if quicker else 0.1) * (min(seconds, 2 * self.step_s) - self.step_s)
        self.step_s = self.step_s or seconds
        self.credit = min(self.credit + EARNED, MOST_CREDIT)

    def tried(self, guesses: int, right: int, tokens: int, seconds: float, *, first_s: float) -> None:
        """A try: so many guesses, of which so many were right, and `tokens` read back in `seconds` for it all.

        `first_s` of them were the step with the guesses.
        """
        # No step is quicker than one of one row, and no row costs more than that: what says otherwise had other causes.
        after_s = seconds - first_s
        self.step_s = min(self.step_s, first_s, after_s or first_s)
        won = min(max(tokens - seconds / self.step_s, -float(guesses + 1)), float(right))
        self.credit = min(max(self.credit + won, LEAST_CREDIT), MOST_CREDIT)
        row = min(max((first_s / self.step_s - 1.0) / guesses, 0.0), 1.0)
        self.row += (1.0 - FORGET) * (row - self.row)
        self.right = FORGET * self.right + right
        self.wrong = FORGET * self.wrong + (right < guesses) + 0.01  # never quite certain
        self.pattern = LEAST_PATTERN if won > 0 else min(2 * self.pattern, LONGEST_PATTERN)
        self.pays = self._what_pays()

    def _what_pays(self) -> int:
        """One more guess pays while the chance that it and all before it are right is over what a row costs."""
        chance = self.right / (self.right + self.wrong)
        pays = math.log(min(max(self.row, 1e-3), 0.99)) / math.log(chance)
        return int(min(max(pays, LEAST_GUESSES), MOST_GUESSES))


def tail_beyond(other: NDArray[np.int32], ids: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """What `other` goes on to say where it leaves `ids`, at most so many tokens, and what leads up to that."""
    common = min(len(other), len(ids))
    differ = np.flatnonzero(other[:common] != ids[:common])
    leaves = int(differ[0]) if differ.size else common
    return other[max(leaves - LONGEST_PATTERN, 0) : leaves + most] if leaves < len(other) else other[:0]
