"""What is said elsewhere in a session's tree, to guess from: a text that is tried again, or by several, is often much
like what was said before."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.runtime.sampling.guessing import tail_beyond
from serai.runtime.sessions.turns import Timeline

MOST_ELSEWHERE, MOST_ELSEWHERE_TOKENS = 4, 8_192
"""So many other texts are searched for guesses, and so much of each: a search takes tens of microseconds."""


class OfATree(Protocol):
    """What is needed of a session and its relatives; `taken_back` is what it said last and went back from."""

    id: str
    workflow: str
    parent: str | None
    taken_back: NDArray[np.int32]

    @property
    def timeline(self) -> Timeline: ...


def said_elsewhere(session: OfATree, live: Iterable[OfATree], ids: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """What its tree says that its own timeline, `ids`, doesn't: what it took back last, and its parent and forks among
    the `live` sessions. int32 each."""
    tree = [one for one in live if one.workflow == session.workflow and one is not session]
    tree.sort(key=lambda one: one.id != session.parent)
    tails = [other_than(one.timeline.ids(), ids) for one in tree[:MOST_ELSEWHERE]]
    return [tail for tail in (session.taken_back, *tails) if len(tail)]


def other_than(said: NDArray[np.int32], ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The part of what was `said` that goes another way than `ids`, as far as it is searched."""
    return tail_beyond(said, ids, MOST_ELSEWHERE_TOKENS)
