"""Snapshots in the background, so that a restart replays little. Token ids are durable before; a snapshot may lag.

A session's newest state replaces one of its own that still waits, and each session is written at most once in
`min_interval_s`: no session can write-storm a disk. The end of a session's first append, which others may share, and
states on the way through a long one are never replaced. What a session has thinned out in memory goes from the store
too.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio

from serai.checkpoints.nodes import NodeRecord
from serai.checkpoints.reports import IN_BACKGROUND
from serai.runtime.errors import SeraiError, SessionGone
from serai.runtime.sessions.journal import Journal
from serai.runtime.sessions.prefixes import Prefixes
from serai.runtime.state import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    node: NodeRecord
    state: State
    digest: bytes
    due_s: float


class Saver:
    """Writes the states it is offered, one after the other, in order of when they are due."""

    def __init__(self, journal: Journal, prefixes: Prefixes, *, min_interval_s: float = 5.0) -> None:
        self._journal = journal
        self._prefixes = prefixes
        self._min_interval_s = min_interval_s
        self._jobs: dict[tuple[str, int | None], _Job] = {}
        self._surplus: list[str] = []
        self._written_s: dict[str, float] = {}
        self._offered = anyio.Event()
        self._idle = anyio.Event()
        self._idle.set()
        self._hurry = False
        self._writing = False
        # A state that is being written can't be moved out, so whoever waits for memory must look again.
        self.on_written: Callable[[], None] = _nobody_waits
        self.saved = 0
        self.failed = 0

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is on its way to the store at this moment."""
        return self._writing

    def states(self) -> Iterator[State]:
        """The states that wait to be written."""
        return (job.state for job in self._jobs.values())

    async def settle(self) -> None:
        """Wait until everything offered so far has been written, without regard to intervals."""
        self._hurry = True
        self._offered.set()
        await self._idle.wait()

    def offer(self, node: NodeRecord, state: State, digest: bytes, *, first: bool, replaces: bool = True) -> None:
        """The state at a durable node may be written when it is due; the reference stays the caller's.

        The `first` one at once. One that `replaces` takes the place of the session's last such that still waits.
        """
        if not self._journal.is_durable:
            return
        key = (node.session_id, None if replaces and not first else node.position)
        replaced = self._jobs.pop(key, None)
        if replaced is not None:
            replaced.state.release()
        now_s = anyio.current_time()
        due_s = now_s if first else max(now_s, self._written_s.get(node.session_id, 0.0) + self._min_interval_s)
        self._jobs[key] = _Job(node, state.retain(), digest, due_s)
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._offered.set()

    def thin(self, node_id: str) -> None:
        """The snapshot under a node is not needed any more, waiting or written."""
        if not self._journal.is_durable:
            return
        for key in [key for key, job in self._jobs.items() if job.node.id == node_id]:
            self._jobs.pop(key).state.release()
        self._surplus.append(node_id)
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._offered.set()

    def let_go(self, namespace: str | None = None) -> bool:
        """Give up what waits to be written, of one namespace or of all, when memory is needed more; whether there was
        anything."""
        jobs = {key: job for key, job in self._jobs.items() if namespace in (None, job.node.namespace)}
        self._offered.set()
        for key, job in jobs.items():
            del self._jobs[key]
            job.state.release()
        return bool(jobs)

    def drop(self, session_id: str) -> None:
        """The session will be deleted: nothing of it need be written."""
        for key in [one for one in self._jobs if one[0] == session_id]:
            self._jobs.pop(key).state.release()
        self._offered.set()

    async def run(self) -> None:
        """Write until cancelled; what still waits then is let go of."""
        try:
            while True:
                while self._surplus:
                    await self._thin(self._surplus.pop())
                if not self._jobs:
                    self._idle.set()
                    self._hurry = False
                    self._offered = anyio.Event()
                    await self._offered.wait()
                if not self._jobs or self._surplus:
                    continue
                key = min(self._jobs, key=lambda key: self._jobs[key].due_s)
                wait_s = self._jobs[key].due_s - anyio.current_time()
                if wait_s > 0 and not self._hurry:
                    with anyio.move_on_after(wait_s):
                        self._offered = anyio.Event()
                        await self._offered.wait()
                    continue
                await self._write(self._jobs.pop(key))
        finally:
            self.let_go()

    async def _thin(self, node_id: str) -> None:
        self._writing = True
        try:
            await self._journal.thin(node_id)
        except SeraiError as error:
            log.warning("a snapshot that is not needed was not erased: %s", error)
        finally:
            self._writing = False

    async def _write(self, job: _Job) -> None:
        self._writing = True
        try:
            await self._journal.save(job.node, job.state, IN_BACKGROUND)
        except SessionGone:
            self.failed += 1
            log.debug("session %s was deleted while a state of it was written", job.node.session_id)
        except SeraiError as error:
            # The session itself is well: its ids are durable, so only time is lost if it must be rebuilt.
            self.failed += 1
            log.warning("a background snapshot was not written: %s", error)
        else:
            self.saved += 1
            self._note_written(job.node.session_id, anyio.current_time())
            if job.node.id not in self._surplus:
                self._prefixes.stored(job.node.namespace, job.digest, job.node.position, job.node.id)
        finally:
            self._writing = False
            job.state.release()
            self.on_written()

    def _note_written(self, session_id: str, now_s: float) -> None:
        """Only as long as it keeps the session's next one waiting: sessions end, some with a state still to be
        written."""
        self._written_s.pop(session_id, None)
        self._written_s[session_id] = now_s
        for one, written_s in list(self._written_s.items()):  # in the order of their times
            if now_s - written_s < self._min_interval_s:
                break
            del self._written_s[one]


def _nobody_waits() -> None:
    """Nobody is to be told that a state was written."""
