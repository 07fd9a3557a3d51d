"""A session's timeline as numbers: its token ids, the spans they were read or generated in, and what follows from them.

Turns, what a generation continues, penalty counts and stop-string tails are derived from these on demand and never kept
as running state (contract, g). So two generates of ten tokens are one of twenty, across forks and restarts too.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter, PositionUnavailable
from serai.runtime.sampling.random import child_branch


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens from `start` on that were appended, or generated with `seed`, in turn `turn`."""

    start: int
    turn: int
    generated: bool
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the current turn stands.

    `index` counts from 0; `generation_start` is the position at which its generation starts (the end of the last
    append); `generating` says whether a generation has begun since; `seed` is the one in force then.
    """

    index: int = 0
    generation_start: int = 0
    generating: bool = False
    seed: int | None = None


class Timeline:
    """Token ids up to the present, the spans they fall into, and the random branch this timeline draws from."""

    __slots__ = ("_hasher", "_ids", "_spans", "branch", "forks")

    def __init__(
        self,
        ids: "array[int] | None" = None,
        spans: Iterable[Span] = (),
        *,
        branch: int = 0,
        hasher: blake3 | None = None,
    ) -> None:
        self._ids = array("i") if ids is None else ids
        self._hasher = blake3(self._ids.tobytes()) if hasher is None else hasher
        self._spans = list(spans)
        self.branch = branch
        self.forks = 0

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def turn(self) -> Turn:
        """The present turn."""
        if not self._spans:
            return Turn()
        last = self._spans[-1]
        if last.generated:
            return Turn(last.turn, last.start, generating=True, seed=last.seed)
        return Turn(last.turn, len(self._ids))

    def digest(self) -> bytes:
        """Tells this prefix of token ids from any other: BLAKE3 of the ids as little-endian int32."""
        return self._hasher.digest()

    def ids(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """The token ids from `start` to `end`, int32, as an array of the caller's own."""
        # Through the buffer: numpy would copy an array.array number by number, a millisecond for 128 Ki of them.
        return np.frombuffer(self._ids, dtype=np.int32)[start:end].copy() if self._ids else np.zeros(0, np.int32)

    def end_of(self, turn: int) -> int:
        """The position at which a turn ends. Raises `PositionUnavailable` for a turn that isn't there."""
        if not 0 <= turn <= self.turn.index:
            raise PositionUnavailable(what="turn", asked=turn, last=self.turn.index)
        later = [span.start for span in self._spans if span.turn > turn]
        return later[0] if later else len(self._ids)

    def position_of(self, turn: int | None, position: int | None) -> int:
        """The position that a turn's end, a position, or neither (the present) names.

        Raises `PositionUnavailable` for one that isn't there, `BadParameter` for both at once.
        """
        if turn is not None and position is not None:
            raise BadParameter("give a turn or a position, not both")
        if turn is not None:
            return self.end_of(turn)
        if position is None:
            return len(self._ids)
        if not 0 <= position <= len(self._ids):
            raise PositionUnavailable(what="position", asked=position, last=len(self._ids))
        return position

    def appended(self, ids: NDArray[np.int32]) -> None:
        """An append was read: after a generation this begins the next turn, otherwise it adds to the present one."""
        turn = self.turn
        if turn.generating or not self._spans:
            self._spans.append(Span(len(self._ids), turn.index + turn.generating, generated=False))
        self._extend(ids.astype(np.int32).tobytes())

    def generates(self, seed: int | None) -> None:
        """A generation begins, or goes on, with this seed; None for one that nobody draws from."""
        if self.turn.generating:
            self._spans[-1] = replace(self._spans[-1], seed=seed)
        else:
            self._spans.append(Span(len(self._ids), self.turn.index, generated=True, seed=seed))

    def generated(self, token: int) -> None:
        """A drawn token was read back."""
        self._extend(np.int32(token).tobytes())

    def at(self, position: int, *, branch: int) -> "Timeline":
        """This timeline as it was at `position`. Raises `PositionUnavailable` outside 0 to the present."""
        if not 0 <= position <= len(self._ids):
            raise PositionUnavailable(what="position", asked=position, last=len(self._ids))
        # A span that begins exactly there has not begun, unless this is the present, where nothing is cut off.
        count = bisect_right([span.start for span in self._spans], position)
        if position < len(self._ids):
            count = len([span for span in self._spans if span.start < position])
        # Hashing 128 Ki tokens again would be most of what a fork from the present takes.
        hasher = self._hasher.copy() if position == len(self._ids) else None
        return Timeline(self._ids[:position], self._spans[:count], branch=branch, hasher=hasher)

    def fork(self, position: int | None = None, *, choice: int | None = None) -> "Timeline":
        """A copy that goes on from `position` (the present) with a random branch of its own: that of the next fork, or
        of a choice by its number, which counts as no fork."""
        where = len(self._ids) if position is None else position
        child = self.at(where, branch=child_branch(self.branch, self.forks if choice is None else choice))
        self.forks += choice is None
        return child

    def twin(self) -> "Timeline":
        """A copy that goes on from the present just as this one would."""
        twin = self.at(len(self._ids), branch=self.branch)
        twin.forks = self.forks
        return twin

    def _extend(self, data: bytes) -> None:
        self._ids.frombytes(data)
        self._hasher.update(data)
