"""Guessing the next tokens from what was read before: agents copy a lot.

When the last few tokens have occurred earlier, what followed them then is guessed to follow now. A guess costs rows of
a step and nothing else: the tokens drawn are the same, right or wrong (contract, h). `Guesser` says what may come next,
`Worth` whether a session has found that to pay, by the clock.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_GUESSES, MOST_GUESSES = 2, 32
LEAST_PATTERN, LONGEST_PATTERN = 3, 96
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
        self._in_vain = (0, 0)  # no pattern so long can have occurred before there are so many tokens

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
        place = self._place(pattern)
        if place is None:
            return []
        followed = self._ids[place : min(place + most, self._length)]
        if (ends := np.flatnonzero(followed == _NOTHING)).size:
            followed = followed[: ends[0]]
            most = len(followed)
        repeated: list[int] = np.resize(followed, most).tolist()
        return repeated

    def least_pattern(self) -> int:
        """How many tokens have to have occurred before for what followed to be likely to follow again, in this text.

        Its own last tokens say it: how often each would have been guessed right from those before it. Where patterns of
        one length were mostly wrong, those of twice the length are asked for, or if there were none, of twice that.
        """
        ids = self._ids[max(self._start, self._length - CHECKED_WITHIN) : self._length]
        ends = np.arange(max(len(ids) - CHECKED, LEAST_PATTERN + 1), len(ids))
        # Each pair of an end and a place before it that have a pattern in common: those with a last token in common are
        # few already, and all of this is done while the event loop waits.
        which, place = np.nonzero(ids[LEAST_PATTERN - 1 : -1] == ids[ends - 1][:, None])
        place += LEAST_PATTERN
        alike = place < ends[which]
        for back in range(2, LEAST_PATTERN + 1):
            alike &= ids[place - back] == ids[ends[which] - back]
        which, place = which[alike], place[alike]
        pattern = LEAST_PATTERN
        while pattern < LONGEST_PATTERN:
            latest = np.zeros(len(ends), np.intp)
            latest[which] = place  # they ascend, and the last one stays
            found = latest > 0
            tried, right = np.count_nonzero(found), np.count_nonzero(ids[latest[found]] == ids[ends[found]])
            if 2 * right > tried + 1 or (tried == 0 and pattern == LEAST_PATTERN):
                break
            if tried == 0:
                return 2 * pattern
            for back in range(pattern + 1, 2 * pattern + 1):
                enough = place >= back
                which, place = which[enough], place[enough]
                same = ids[place - back] == ids[ends[which] - back]
                which, place = which[same], place[same]
            pattern *= 2
        return pattern

    def _place(self, pattern: int) -> int | None:
        """Where the earlier occurrence ends that has most in common with the last tokens, at least `pattern`."""
        ids, own = self._ids[: self._length], self._length - self._start
        vain_pattern, until = self._in_vain
        if pattern >= vain_pattern and self._length < until:
            return None
        places, at_most = _places(ids, pattern)
        if not places.size:
            self._in_vain = pattern, self._length + pattern - at_most
        best, longest = None, 0
        for end in places[: -PLACES - 1 : -1].tolist():
            most = min(end, own, LONGEST_PATTERN)
            differ = np.flatnonzero(ids[end - most : end] != ids[len(ids) - most :])
            alike = most if differ.size == 0 else most - 1 - int(differ[-1])
            if alike > longest:
                best, longest = end, alike
            if longest == LONGEST_PATTERN:
                break
        return best


def _places(ids: NDArray[np.int32], pattern: int) -> tuple[NDArray[np.intp], int]:
    """Where the last `pattern` tokens of `ids` have occurred before: the positions behind them, ascending. Where there
    are none, also the most of those last tokens that may have: each further token makes that at most one more."""
    # A pass over all ids, tens of microseconds for 128 Ki of them; few places are left of it.
    found = ids[LEAST_PATTERN - 1 : -1] == ids[-1]
    for back in range(2, LEAST_PATTERN + 1):
        found &= ids[LEAST_PATTERN - back : -back] == ids[-back]
    places = np.flatnonzero(found) + LEAST_PATTERN
    most = LEAST_PATTERN
    while places.size and most < pattern:
        places = places[places > most]
        places = places[ids[places - most - 1] == ids[-most - 1]]
        most += 1
    return places, most if places.size else most - 1


@dataclass(slots=True)
class Worth:
    """What guessing has won and lost a session, measured in the time that one token takes it without.

    `credit` is what may still be lost, in such tokens. `step_s` is the time of a step of one row, `row` that of every
    further row as a part of it; `right` and `wrong` count guesses, the older the less.
    """

    credit: float = FIRST_CREDIT
    step_s: float = 0.0
    row: float = 0.2
    right: float = 2.0
    wrong: float = 1.0
    pattern: int = LEAST_PATTERN

    def fork(self) -> "Worth":
        """A copy that goes its own way, for a session that goes on from the same text."""
        return Worth(self.credit, self.step_s, self.row, self.right, self.wrong, self.pattern)

    def begin(self, least_pattern: int = LEAST_PATTERN) -> None:
        """Another generation begins, and may be of another kind of text (`Guesser.least_pattern`)."""
        self.pattern = least_pattern

    @property
    def guesses(self) -> int:
        """How many tokens to guess now, 0 for none.

        One more guess pays while the chance that it and all before it are right is over what a row costs.
        """
        if self.step_s == 0.0 or self.credit <= 0.0:
            return 0
        chance = self.right / (self.right + self.wrong)
        pays = math.log(min(max(self.row, 1e-3), 0.99)) / math.log(chance)
        return int(min(max(pays, LEAST_GUESSES), MOST_GUESSES))

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


def tail_beyond(other: NDArray[np.int32], ids: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """What `other` goes on to say where it leaves `ids`, at most so many tokens, and what leads up to that."""
    common = min(len(other), len(ids))
    differ = np.flatnonzero(other[:common] != ids[:common])
    leaves = int(differ[0]) if differ.size else common
    return other[max(leaves - LONGEST_PATTERN, 0) : leaves + most] if leaves < len(other) else other[:0]
