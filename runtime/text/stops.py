"""Finding stop strings in text that arrives in pieces, showing every character as early as is safe.

The result doesn't depend on how the text was cut: the stop string whose last character comes first ends the text, and
if several end at the same character, the longest does, so that nothing of any of them is shown.
"""

from collections.abc import Sequence
from copy import copy

from serai.runtime.errors import BadParameter


class StopMatcher:
    """Watches one text for `stops`; without any it passes everything through.

    Text is held back only while it is the beginning of a stop string. A matcher carries no state worth saving: pushing
    the same text again rebuilds it.
    """

    __slots__ = ("_fallbacks", "_matched", "_shown_of_tail", "_stopped_by", "_stops", "_tail", "_visible_chars")

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise BadParameter("a stop string must have at least one character")
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallback_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._tail = ""  # the end of the text that may begin a stop string
        self._shown_of_tail = 0
        self._stopped_by: str | None = None
        self._visible_chars = 0

    @property
    def held(self) -> str:
        """The text that was pushed and not shown, because it may begin a stop string."""
        return self._tail[self._shown_of_tail :]

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stopped_by

    @property
    def visible_chars(self) -> int:
        """How many characters `push` and `finish` have returned."""
        return self._visible_chars

    def twin(self) -> "StopMatcher":
        """A second one of the same text so far."""
        twin = copy(self)
        twin._matched = self._matched.copy()
        return twin

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return what may be shown now, and whether a stop string has been completed.

        Once stopped, the rest of the text is nobody's: every further push returns `("", True)`.
        """
        if self._stopped_by is not None:
            return "", True
        pending = self._tail + text
        for used, char in enumerate(text, start=len(self._tail) + 1):
            found = self._advance(char)
            if found is not None:
                self._stopped_by = found
                return self._show(pending, used - len(found), ""), True
        hold = max(self._matched, default=0)
        safe = len(pending) - hold
        return self._show(pending, safe, pending[safe:]), False

    def finish(self) -> str:
        """Nothing follows for now: return what was held back.

        If the text does go on later, pushing continues it: nothing is shown twice, and a stop string may still span
        the break, though what this returned of it has been seen.
        """
        held = self.held
        self._shown_of_tail = len(self._tail)
        self._visible_chars += len(held)
        return held

    def _show(self, pending: str, end: int, tail: str) -> str:
        """The part of `pending` up to `end` that wasn't shown yet; `tail` is what is kept after it."""
        visible = pending[self._shown_of_tail : end]
        self._shown_of_tail = max(self._shown_of_tail - end, 0)
        self._tail = tail
        self._visible_chars += len(visible)
        return visible

    def _advance(self, char: str) -> str | None:
        """Move every stop string on by one character (Knuth, Morris and Pratt); return the longest completed one."""
        found: str | None = None
        for index, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = fallback[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop) and (found is None or len(stop) > len(found)):
                found = stop
        return found


def _fallback_table(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper suffix that is also a prefix of `stop`."""
    table = [0] * len(stop)
    matched = 0
    for index in range(1, len(stop)):
        while matched and stop[index] != stop[matched]:
            matched = table[matched - 1]
        if stop[index] == stop[matched]:
            matched += 1
        table[index] = matched
    return tuple(table)
