"""All that a monitor knows and has been told to show. No terminal, no clock and no waiting in here."""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from serai.runtime.monitor.detail import SessionDetail
from serai.runtime.monitor.history import History
from serai.runtime.monitor.source import About
from serai.runtime.monitor.tree import PAUSED, Order, Row, Showing, rows
from serai.runtime.sessions.events import EventKind, SessionEvent
from serai.runtime.status import SessionStatus, Status

KEPT_LOG = 2_000
KEPT_PAUSED = 200
NOTICE_LOOKS = 10
"""How many statuses a notice outlasts: long enough to be read, short enough not to be taken for news."""


class View(Enum):
    """What fills the screen."""

    SESSIONS = "sessions"
    BUDGET = "budget"
    EXPERTS = "experts"
    LOG = "log"
    DETAIL = "detail"
    NODES = "nodes"
    HELP = "help"


INNER = (View.DETAIL, View.NODES, View.HELP)
"""Views that have no tab: one comes back from them to where one was."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A line of the log: when it arrived here, by the clock on the wall, and what happened to which session."""

    time: str
    what: str
    session_id: str = ""
    label: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Connection:
    """Whether statuses arrive. `lost_s` and `retry_s` are durations as of the last attempt."""

    problem: str | None = None
    lost_s: float = 0.0
    retry_s: float = 0.0

    @property
    def is_live(self) -> bool:
        return self.problem is None


@dataclass(slots=True)
class Model:
    """The monitor's state. Views read it; `saw`, `lost` and `happened` feed it."""

    source: str
    status: Status | None = None
    connection: Connection = Connection("connecting")
    history: History = field(default_factory=History)
    about: About = field(default_factory=About)
    detail: SessionDetail | None = None
    thoughts_shown: bool = False
    log: deque[LogEntry] = field(default_factory=lambda: deque(maxlen=KEPT_LOG))
    paused: dict[str, SessionStatus] = field(default_factory=dict)
    view: View = View.SESSIONS
    came_from: View = View.SESSIONS
    order: Order = Order.TREE
    reverse: bool = False
    showing: Showing = Showing.ALL
    query: str = ""
    folded: set[str] = field(default_factory=set)
    selected: str | None = None
    node: str | None = None
    notice: str = ""
    _notice_left: int = 0
    _departed: dict[str, SessionStatus] = field(default_factory=dict)

    def tell(self, notice: str) -> None:
        """Show a sentence for a while."""
        self.notice, self._notice_left = notice, NOTICE_LOOKS

    def saw(self, status: Status, time: str) -> bool:
        """A status arrived; whether it is the first one since the connection was lost or the runtime restarted."""
        was_lost = not self.connection.is_live
        self._notice_left -= 1
        if self._notice_left < 0:
            self.notice = ""
        restarted = self.history.add(status)
        live = {one.id for one in status.sessions}
        before = () if self.status is None else self.status.sessions
        self._departed = {one.id: one for one in before if one.id not in live}
        if restarted:
            self.log.append(LogEntry(time, "server restarted", detail=self.source))
        elif was_lost and self.status is not None:
            self.log.append(LogEntry(time, "connected again", detail=self.source))
        for session_id in live & self.paused.keys():
            del self.paused[session_id]
        self.status = status
        self.connection = Connection()
        return was_lost or restarted

    def lost(self, problem: str, *, lost_s: float, retry_s: float, time: str) -> None:
        """No status arrived; what was known before stays on the screen and is marked as old."""
        if self.connection.is_live:
            self.log.append(LogEntry(time, "connection lost", detail=problem))
        self.connection = Connection(problem, lost_s, retry_s)

    def happened(self, event: SessionEvent, time: str) -> None:
        """The runtime told of an event."""
        if event.missed:
            self.log.append(LogEntry(time, "missed", detail=f"{event.missed:,} events came too fast"))
        session = self.session(event.session_id) or self._departed.get(event.session_id)
        label = "" if session is None else session.label
        self.log.append(LogEntry(time, event.kind.value, event.session_id, label, event.detail))
        if event.kind is EventKind.PAUSED:
            self.was_paused(event.session_id)
        elif event.kind is EventKind.CLOSED:
            self.paused.pop(event.session_id, None)

    def was_paused(self, session_id: str) -> None:
        """Keep showing a session that the next status won't have, or the last one had no more."""
        session = self.session(session_id) or self._departed.get(session_id)
        if session is None:
            return
        self.paused[session_id] = replace(
            session, tier=PAUSED, doing=None, own_bytes=0, shared_bytes=0, tokens_s=0.0, returns_in_s=None
        )
        while len(self.paused) > KEPT_PAUSED:
            del self.paused[next(iter(self.paused))]

    def looked_into(self, detail: SessionDetail | None) -> None:
        """What the selected session says arrived, or that there is nothing to be had of it."""
        self.detail = detail if detail is not None and detail.session_id == self.selected else None

    def selected_detail(self) -> SessionDetail | None:
        """What is known of the selected session beyond its figures."""
        return self.detail if self.detail is not None and self.detail.session_id == self.selected else None

    def sessions(self) -> tuple[SessionStatus, ...]:
        """Live ones, then those seen being paused."""
        live = () if self.status is None else self.status.sessions
        known = {one.id for one in live}
        return (*live, *(one for one in self.paused.values() if one.id not in known))

    def session(self, session_id: str | None) -> SessionStatus | None:
        return next((one for one in self.sessions() if one.id == session_id), None)

    def rows(self) -> tuple[Row, ...]:
        """The sessions to show."""
        return rows(
            self.sessions(),
            order=self.order,
            reverse=self.reverse,
            showing=self.showing,
            query=self.query,
            folded=self.folded,
        )
