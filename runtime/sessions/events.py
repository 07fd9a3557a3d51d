"""A stream of what happens to sessions, for those who watch. Nobody who watches can hold anything up."""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import anyio


class EventKind(Enum):
    """What happened to a session."""

    OPENED = "opened"
    APPENDED = "appended"
    TURN_ENDED = "turn ended"
    FORKED = "forked"
    DEMOTED = "demoted"
    PROMOTED = "promoted"
    REWOUND = "rewound"
    PAUSED = "paused"
    CLOSED = "closed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """Something that happened to a session at `time_s` of the loop's clock; `detail` is one line for a person.

    `missed` counts the events before it that this watcher was too slow to be given.
    """

    kind: EventKind
    session_id: str
    time_s: float
    detail: str = ""
    missed: int = 0


class Watcher:
    """One watcher's queue, bounded: when it is full the oldest events go, and the next one says how many.

    With a `namespace` it is given that one's alone: those of others neither reach it nor take its room.
    """

    def __init__(self, most: int, namespace: str | None = None) -> None:
        self.namespace = namespace
        self._events: deque[SessionEvent] = deque(maxlen=most)
        self._missed = 0
        self._arrived = anyio.Event()

    def put(self, event: SessionEvent) -> None:
        if len(self._events) == self._events.maxlen:
            self._missed += 1
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> SessionEvent:
        """The next event; waits for one."""
        while not self._events:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        event = self._events.popleft()
        missed, self._missed = self._missed, 0
        return SessionEvent(event.kind, event.session_id, event.time_s, event.detail, missed)

    async def __aiter__(self) -> AsyncIterator[SessionEvent]:
        while True:
            yield await self.get()


class EventFeed:
    """Hands events to whoever watches at the moment."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()

    @contextmanager
    def watch(self, most: int = 1_000, namespace: str | None = None) -> Iterator[Watcher]:
        """A watcher for the length of the block, who is kept the last `most` events, of one namespace or of all."""
        watcher = Watcher(most, namespace)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def tell(self, kind: EventKind, session_id: str, namespace: str, detail: str = "") -> None:
        for watcher in self._watchers:
            if watcher.namespace in (None, namespace):
                watcher.put(SessionEvent(kind, session_id, anyio.current_time(), detail))
