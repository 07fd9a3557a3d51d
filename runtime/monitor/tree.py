"""Which sessions are shown, and in which order: forks below what they were forked from, or one sorted list."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serai.runtime.status import SessionStatus

PAUSED = "paused"
"""The tier this monitor gives to sessions it saw being paused: durable, but no longer part of the runtime's status."""


class Order(Enum):
    """How sessions are sorted. TREE keeps forks under their parents."""

    TREE = "tree"
    RATE = "tok/s"
    OWN = "own bytes"
    POSITION = "position"
    IDLE = "idle time"
    LABEL = "label"


class Showing(Enum):
    """Which sessions are shown."""

    ALL = "all"
    BUSY = "busy"
    IDLE = "idle"
    TOOL = "waiting for a tool"
    HOT = "hot"
    COLD = "cold"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class Row:
    """A session with its place in the tree. `guide` is drawn before its label; `hidden` counts the forks folded in."""

    status: SessionStatus
    guide: str = ""
    hidden: int = 0


_KEYS: dict[Order, Callable[[SessionStatus], Any]] = {
    Order.RATE: lambda one: -one.tokens_s,
    Order.OWN: lambda one: -one.own_bytes,
    Order.POSITION: lambda one: -one.position,
    Order.IDLE: lambda one: -one.idle_s,
    Order.LABEL: lambda one: (one.label.casefold(), one.id),
}

_TESTS: dict[Showing, Callable[[SessionStatus], bool]] = {
    Showing.ALL: lambda one: True,
    Showing.BUSY: lambda one: one.doing is not None,
    Showing.IDLE: lambda one: one.doing is None and one.returns_in_s is None and one.tier != PAUSED,
    Showing.TOOL: lambda one: one.returns_in_s is not None,
    Showing.HOT: lambda one: one.tier == "hot",
    Showing.COLD: lambda one: one.tier == "cold",
    Showing.PAUSED: lambda one: one.tier == PAUSED,
}


def rows(
    sessions: Iterable[SessionStatus],
    *,
    order: Order = Order.TREE,
    reverse: bool = False,
    showing: Showing = Showing.ALL,
    query: str = "",
    folded: Collection[str] = (),
) -> tuple[Row, ...]:
    """The sessions to show, in order. `query` is looked for in label and namespace, and at the beginning of the id,
    whatever the case.

    A session that is filtered out leaves its forks where they are, one step further left. Whatever the parents say
    (one that is gone, itself, a circle), every session comes exactly once.
    """
    needle = query.casefold()
    shown = [
        one
        for one in sessions
        if _TESTS[showing](one)
        and (
            needle in one.label.casefold() or needle in one.namespace.casefold() or one.id.casefold().startswith(needle)
        )
    ]
    if order is not Order.TREE:
        return tuple(Row(one) for one in sorted(shown, key=_KEYS[order], reverse=reverse))
    return _tree(shown[::-1] if reverse else shown, folded)


def _tree(shown: list[SessionStatus], folded: Collection[str]) -> tuple[Row, ...]:
    by_id = {one.id: one for one in shown}
    children: dict[str, list[SessionStatus]] = {}
    roots = []
    for one in shown:
        if one.parent is not None and one.parent in by_id:
            children.setdefault(one.parent, []).append(one)
        else:
            roots.append(one)
    made: list[Row] = []
    seen: set[str] = set()
    _walk(roots, children, folded, made, seen)
    # What is left hangs together in circles, which no runtime makes but a status may claim.
    for one in shown:
        if one.id not in seen:
            _walk([one], children, folded, made, seen)
    return tuple(made)


def _walk(
    roots: list[SessionStatus],
    children: dict[str, list[SessionStatus]],
    folded: Collection[str],
    made: list[Row],
    seen: set[str],
) -> None:
    """Depth first without recursion: a chain of a thousand forks is allowed."""
    stack = [(one, "", "") for one in reversed(roots)]
    while stack:
        one, own, below = stack.pop()
        if one.id in seen:
            continue
        seen.add(one.id)
        forks = [fork for fork in children.get(one.id, ()) if fork.id not in seen]
        if one.id in folded:
            made.append(Row(one, own, _hide(forks, children, seen)))
            continue
        made.append(Row(one, own))
        for number, fork in enumerate(reversed(forks)):
            last = number == 0
            stack.append((fork, below + ("└─" if last else "├─"), below + ("  " if last else "│ ")))


def _hide(forks: list[SessionStatus], children: dict[str, list[SessionStatus]], seen: set[str]) -> int:
    count, stack = 0, list(forks)
    while stack:
        one = stack.pop()
        if one.id not in seen:
            seen.add(one.id)
            count += 1
            stack.extend(children.get(one.id, ()))
    return count
