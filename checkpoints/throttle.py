"""When a snapshot may be written, so that no session can storm a disk. Pure: the clock is an argument.

Token ids are recorded at once and are not throttled; a snapshot that waits, or never comes, costs a replay and nothing
else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThrottlePolicy:
    """At least `min_interval_s` between two snapshots of one session, at most `bytes_per_s` over all, on average.

    After a quiet time up to `burst_bytes` go at once.
    """

    min_interval_s: float = 30.0
    bytes_per_s: float = 200e6
    burst_bytes: float = 5e9


@dataclass(frozen=True, slots=True)
class Wish:
    """A snapshot somebody wants: of `node_id`, about `size_bytes` to write, wished for at `since_s`."""

    session_id: str
    node_id: str
    size_bytes: int
    since_s: float


class Throttle:
    """Wishes that wait, at most one a session: a later one takes an earlier one's place, and its turn."""

    def __init__(self, policy: ThrottlePolicy) -> None:
        self._policy = policy
        self._wishes: dict[str, Wish] = {}
        self._last_s: dict[str, float] = {}
        self._credit_bytes = policy.burst_bytes
        self._credited_s: float | None = None

    def wish(self, wish: Wish) -> Wish | None:
        """Have a snapshot written when it is time; the wish of the same session that it replaces, if any."""
        before = self._wishes.get(wish.session_id)
        since_s = wish.since_s if before is None else before.since_s
        self._wishes[wish.session_id] = Wish(wish.session_id, wish.node_id, wish.size_bytes, since_s)
        return before

    def forget(self, session_id: str) -> None:
        """Drop a session's wish, because it was paused (with a snapshot), closed or erased."""
        self._wishes.pop(session_id, None)
        self._last_s.pop(session_id, None)

    def due(self, now_s: float) -> list[Wish]:
        """The wishes to fulfil now, longest waiting first; they are taken off the list and count as written."""
        self._earn(now_s)
        ready = [wish for wish in self._wishes.values() if self._ready_s(wish) <= now_s]
        chosen = []
        for wish in sorted(ready, key=lambda wish: (wish.since_s, wish.session_id)):
            if self._credit_bytes <= 0:
                break
            self._credit_bytes -= (
                wish.size_bytes
            )  # into debt, so that a snapshot larger than the burst has its turn too
            self._last_s[wish.session_id] = now_s
            chosen.append(self._wishes.pop(wish.session_id))
        return chosen

    def next_due_s(self, now_s: float) -> float | None:
        """The earliest time at which `due` can return something; None while nothing is wished for."""
        self._earn(now_s)
        if not self._wishes:
            return None
        debt_s = max(0.0, -self._credit_bytes) / self._policy.bytes_per_s
        # Credit must be above zero, hence the step beyond the moment at which the debt is paid.
        paid_s = now_s if self._credit_bytes > 0 else now_s + debt_s + 1e-3
        return max(min(self._ready_s(wish) for wish in self._wishes.values()), paid_s)

    def _ready_s(self, wish: Wish) -> float:
        last_s = self._last_s.get(wish.session_id)
        return wish.since_s if last_s is None else max(wish.since_s, last_s + self._policy.min_interval_s)

    def _earn(self, now_s: float) -> None:
        if self._credited_s is not None and now_s > self._credited_s:
            earned = (now_s - self._credited_s) * self._policy.bytes_per_s
            self._credit_bytes = min(self._policy.burst_bytes, self._credit_bytes + earned)
        self._credited_s = now_s if self._credited_s is None else max(now_s, self._credited_s)
