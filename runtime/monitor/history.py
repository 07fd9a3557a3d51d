"""What a monitor remembers of the statuses it was given: short series for sparklines and plots.

The clock in a status is the runtime's own. Nothing here assumes that it moves evenly, or forwards.
"""

from collections import deque
from dataclasses import dataclass, field

from serai.runtime.status import SessionStatus, Status

KEPT_SAMPLES = 300
"""Five minutes at a status a second."""


@dataclass(slots=True)
class SessionHistory:
    """One session's series, a sample a status."""

    tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    own_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))


@dataclass(frozen=True, slots=True)
class Sample:
    """The runtime's figures at one status."""

    live_bytes: int
    kept_bytes: int
    used_bytes: int
    tokens_s: float
    lookups: int
    hits: int
    read_bytes: int
    seconds: float


class History:
    """Fed with every status by `add`."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self.sessions: dict[str, SessionHistory] = {}
        self._last: Status | None = None

    def add(self, status: Status) -> bool:
        """Take a status in; whether it is of a runtime that started anew, which empties the series."""
        restarted = self._last is not None and _is_another_run(self._last, status)
        if restarted:
            self.samples.clear()
            self.sessions.clear()
            self._last = None
        self._take_sample(status)
        self.sessions = {one.id: self._take_session(one) for one in status.sessions}
        self._last = status
        return restarted

    def of(self, session_id: str) -> SessionHistory:
        """The series of a session; empty ones when there are none."""
        return self.sessions.get(session_id) or SessionHistory()

    def _take_session(self, status: SessionStatus) -> SessionHistory:
        series = self.sessions.get(status.id) or SessionHistory()
        series.tokens_s.append(status.tokens_s)
        series.own_bytes.append(status.own_bytes)
        return series

    def _take_sample(self, status: Status) -> None:
        last, experts = self._last, status.experts
        before = None if last is None else last.experts
        seconds = 0.0 if last is None else max(status.now_s - last.now_s, 0.0)
        hits = reads = lookups = 0
        if experts is not None and before is not None:
            hits = experts.hits - before.hits
            lookups = hits + experts.misses - before.misses
            reads = experts.read_bytes - before.read_bytes
        self.samples.append(
            Sample(
                live_bytes=status.budget.live_bytes,
                kept_bytes=status.budget.kept_bytes,
                used_bytes=status.budget.used_bytes,
                tokens_s=sum(one.tokens_s for one in status.sessions),
                lookups=max(lookups, 0),
                hits=max(hits, 0),
                read_bytes=max(reads, 0),
                seconds=seconds,
            )
        )


def _is_another_run(before: Status, now: Status) -> bool:
    """Counters only grow while a runtime lives; the loop's clock is the machine's and says nothing by itself."""
    counted = [
        (before.work.steps, now.work.steps),
        (before.work.prefilled_tokens, now.work.prefilled_tokens),
        (before.work.decoded_tokens, now.work.decoded_tokens),
    ]
    return before.model != now.model or any(after < earlier for earlier, after in counted)
