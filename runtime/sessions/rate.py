"""Tokens a second over the last few seconds."""

from collections import deque

WINDOW_S = 5.0


class Rate:
    """Counts things as they happen and forgets what is older than the window."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._total = 0

    def count(self, amount: int, now_s: float) -> None:
        self._counts.append((now_s, amount))
        self._total += amount
        self._forget(now_s)

    def per_second(self, now_s: float) -> float:
        self._forget(now_s)
        return self._total / WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._counts and self._counts[0][0] < now_s - WINDOW_S:
            self._total -= self._counts.popleft()[1]
