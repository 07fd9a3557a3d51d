"""Calls that must be done by some time: what passes it is cancelled, and says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from serai.runtime.errors import BadParameter, DeadlineMissed


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s` of the event loop's clock, `allowed_s` after the call."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, allowed_s: float | None) -> "Deadline | None":
        """The deadline of a call made now. Raises `BadParameter` for what is no number of seconds."""
        if allowed_s is None:
            return None
        if not allowed_s >= 0:
            raise BadParameter(f"deadline_s is {allowed_s!r}, but must be a number of seconds, 0 or more")
        return cls(anyio.current_time() + allowed_s, allowed_s)

    @property
    def left_s(self) -> float:
        return self.at_s - anyio.current_time()

    def check(self, what: str, needed_s: float) -> None:
        """Raise `DeadlineMissed` when `needed_s` more seconds are more than there are."""
        if needed_s > self.left_s:
            raise DeadlineMissed(what=what, left_s=max(self.left_s, 0.0), needed_s=needed_s)


@contextmanager
def met(deadline: Deadline | None, what: str) -> Iterator[None]:
    """Cancel the block at the deadline and raise `DeadlineMissed`."""
    if deadline is None:
        yield
        return
    with anyio.CancelScope(deadline=deadline.at_s) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineMissed(what=what, left_s=deadline.allowed_s)
