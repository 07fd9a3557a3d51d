"""A session's timeline as numbers: its token ids, its turns, and what a generation continues.

Penalty counts, `min_tokens` and stop-string tails are derived from these on demand and never stored (DESIGN §6g), so
two generates of ten tokens are one of twenty, across forks and restarts too.
"""

from array import array
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serai.runtime.random import child_branch


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the current turn stands.

    `index` counts from 0; `generation_start` is the position at which its generation starts (the end of the last
    append); `generating` says whether a token was generated since; `seed` is the one in force, drawn at the turn's
    first generate when none was given.
    """

    index: int = 0
    generation_start: int = 0
    generating: bool = False
    seed: int | None = None


class Timeline:
    """Token ids up to the present, the turns they fall into, and the random branch this timeline draws from."""

    __slots__ = ("_ids", "branch", "forks", "turn", "turn_ends")

    def __init__(self, ids: "array[int] | None" = None, *, branch: int = 0) -> None:
        self._ids = array("i") if ids is None else ids
        self.branch = branch
        self.forks = 0
        self.turn = Turn()
        self.turn_ends: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """The token ids from `start` to `end`, int32, as an array of the caller's own."""
        return np.array(self._ids[start:end], dtype=np.int32)

    def appended(self, ids: NDArray[np.int32]) -> None:
        """An append was read: after a generation this begins the next turn, otherwise it adds to the present one."""
        if self.turn.generating:
            self.turn_ends = (*self.turn_ends, len(self._ids))
            self.turn = Turn(index=self.turn.index + 1)
        self._ids.frombytes(ids.astype(np.int32).tobytes())
        self.turn = replace(self.turn, generation_start=len(self._ids), seed=None)

    def generated(self, token: int) -> None:
        """A drawn token was read back."""
        self._ids.append(token)
        self.turn = replace(self.turn, generating=True)

    def fork(self) -> "Timeline":
        """A copy that goes on from here with a random branch of its own."""
        child = Timeline(self._ids[:], branch=child_branch(self.branch, self.forks))
        self.forks += 1
        child.turn = self.turn
        child.turn_ends = self.turn_ends
        return child
