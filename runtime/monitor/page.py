"""A page: what a view reads at a given size, as lines of text. Pages are made by pure functions of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serai.runtime.monitor.text import Line


@dataclass(frozen=True, slots=True)
class Page:
    """`head` stays in place, the body scrolls below it. `line_at(index)` makes line `index` of `count` when it is
    looked at, so a list of a thousand costs what is seen of it. `keys` name the body's lines, where they can be
    selected."""

    head: tuple[Line, ...]
    count: int
    line_at: Callable[[int], Line]
    keys: tuple[str, ...] | None = None
    follows_end: bool = False


def page_of(head: Sequence[Line], body: Sequence[Line], *, follows_end: bool = False) -> Page:
    """A page of ready lines."""
    return Page(tuple(head), len(body), body.__getitem__, follows_end=follows_end)
