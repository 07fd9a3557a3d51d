"""Where sessions' states are: hot in memory or cold in the store, and which idle one is moved out when memory is short.

The choice is a pure function over frozen values; moving is done by the sessions themselves.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from serai.checkpoints.errors import SeraiError

log = logging.getLogger(__name__)


class Tier(Enum):
    """Where a session's state is."""

    HOT = "hot"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Idle:
    """A hot session that nobody is using. `own_bytes` is what moving it out would free; `idle_s` for how long it has
    rested; `returns_in_s` when it is expected back, if somebody said so."""

    key: str
    own_bytes: int
    idle_s: float
    returns_in_s: float | None = None


def value_of_moving(one: Idle) -> float:
    """Bytes freed times the seconds they will stay free.

    Without a word about its return, a session is expected to rest for as long again as it has rested so far.
    """
    rest_s = one.idle_s if one.returns_in_s is None else one.returns_in_s
    return one.own_bytes * max(rest_s, 0.0)


def victims(idle: Sequence[Idle], needed_bytes: int) -> tuple[str, ...]:
    """The sessions to move out, most valuable first, until they free `needed_bytes` (or all there are)."""
    chosen: list[str] = []
    freed = 0
    for one in sorted(idle, key=lambda one: (-value_of_moving(one), one.key)):
        if freed >= needed_bytes:
            break
        if one.own_bytes > 0:
            chosen.append(one.key)
            freed += one.own_bytes
    return tuple(chosen)


class Movable(Protocol):
    """What residency needs of a live session."""

    @property
    def id(self) -> str: ...

    def idle(self, now_s: float) -> Idle | None:
        """What moving it out would bring; None while it is in use, cold or empty."""
        ...

    async def demote(self) -> bool:
        """Move the state out; False when somebody began to use it meanwhile."""
        ...


async def reclaim(sessions: Iterable[Movable], needed_bytes: int, now_s: float) -> bool:
    """Move idle sessions out until about `needed_bytes` are free; whether any was moved."""
    by_key = {session.id: session for session in sessions}
    idle = [found for session in by_key.values() if (found := session.idle(now_s)) is not None]
    moved = False
    for key in victims(idle, needed_bytes):
        try:
            moved = await by_key[key].demote() or moved
        except SeraiError as error:
            # It keeps its memory, and whoever asked for some is not the one to be told of another's trouble.
            log.warning("session %s could not be moved out of memory: %s", key, error)
    return moved
