"""Snapshots in the background, so that a restart replays little. Token ids are durable before; a snapshot may lag.

A session's newest state replaces one of its own that still waits, and each session is written at most once in
`min_interval_s`: no session can write-storm a disk. The end of a session's first append, which others may share, and
states on the way through a long one are never replaced. What a session has thinned out in memory goes from the store
too.
"""

import logging
import math
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
    number: int


class Saver:
    """Writes the states it is offered, one after the other, in order of when they are due.

    What is offered, and what is to be thinned, is numbered; a state keeps the number of the one that it replaces.
    """

    def __init__(
        self, journal: Journal, prefixes: Prefixes, *, reuse: bool = True, min_interval_s: float = 5.0
    ) -> None:
        self._journal = journal
        self._prefixes = prefixes
        self._reuse = reuse  # whether others may begin from what is written
        self._min_interval_s = min_interval_s
        self._jobs: dict[tuple[str, str | None], _Job] = {}
        self._surplus: dict[str, int] = {}
        self._written_s: dict[str, float] = {}
        self._offered = anyio.Event()
        self._latest = 0  # number that was given
        self._hurried = 0  # what has a number up to this is written without regard to intervals
        self._under_way: int | None = None  # number of what is being written or thinned
        self._writing: str | None = None  # id of the node whose state is being written
        self._done = anyio.Event()  # set when something pending is so no longer
        # A state that is being written can't be moved out, so whoever waits for memory must look again.
        self.on_written: Callable[[], None] = _nobody_waits
        self.saved = 0
        self.failed = 0
        journal.on_saved = self._saved

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot is on its way to the store at this moment."""
        return self._under_way is not None

    def states(self) -> Iterator[State]:
        """The states that wait to be written."""
        return (job.state for job in self._jobs.values())

    async def settle(self) -> None:
        """Wait until everything offered so far, or what took its place, has been written, without regard to intervals.

        What is offered meanwhile keeps nobody waiting.
        """
        latest = self._hurried = self._latest
        self._offered.set()
        while self._oldest() <= latest:
            await self._done.wait()

    def _oldest(self) -> float:
        """The least number of what is pending."""
        numbers = [*(job.number for job in self._jobs.values()), *self._surplus.values()]
        return min(numbers if self._under_way is None else [*numbers, self._under_way], default=math.inf)

    def _number(self) -> int:
        self._latest += 1
        return self._latest

    def _tell(self) -> None:
        """Have whoever settles look again."""
        self._done.set()
        self._done = anyio.Event()

    def offer(self, node: NodeRecord, state: State, digest: bytes, *, first: bool, replaces: bool = True) -> None:
        """The state at a durable node may be written when it is due; the reference stays the caller's.

        The `first` one at once. One that `replaces` takes the place of the session's last such that still waits.
        """
        now_s = anyio.current_time()
        due_s = now_s if first else max(now_s, self._written_s.get(node.session_id, 0.0) + self._min_interval_s)
        self._wait(None if replaces and not first else node.id, node, state, digest, due_s)

    def offer_replayed(self, node: NodeRecord, state: State, digest: bytes) -> None:
        """The state at a durable node was rebuilt and may be written there, once, as others will want it.

        Not at once: whoever rebuilt it may be about to store it there, or to go on and want the disk and the cores.
        """
        if node.id not in (self._writing, *(job.node.id for job in self._jobs.values())):
            self._wait(node.id, node, state, digest, anyio.current_time() + self._min_interval_s)

    def _wait(self, place: str | None, node: NodeRecord, state: State, digest: bytes, due_s: float) -> None:
        """Have a state wait, in the place of what waited in the same `place` of its session."""
        if not self._journal.is_durable:
            return
        replaced = self._jobs.pop((node.session_id, place), None)
        if replaced is not None:
            replaced.state.release()
        number = self._number() if replaced is None else replaced.number
        self._jobs[node.session_id, place] = _Job(node, state.retain(), digest, due_s, number)
        self._offered.set()

    def _saved(self, node_id: str) -> None:
        """A state was stored under a node: one that waits for that needn't be."""
        for key in [key for key, job in self._jobs.items() if job.node.id == node_id]:
            job = self._jobs.pop(key)
            self._note_stored(job)
            job.state.release()
        self._offered.set()

    def _note_stored(self, job: _Job) -> None:
        """Others may begin from it, where they may at all and it isn't to be erased again."""
        if self._reuse and job.node.id not in self._surplus:
            self._prefixes.stored(job.node.namespace, job.digest, job.node.position, job.node.id)

    def thin(self, node_id: str) -> None:
        """The snapshot under a node is not needed any more, waiting or written."""
        if not self._journal.is_durable:
            return
        for key in [key for key, job in self._jobs.items() if job.node.id == node_id]:
            self._jobs.pop(key).state.release()
        self._surplus.setdefault(node_id, self._number())
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
                self._offered = anyio.Event()
                for node_id in list(self._surplus):
                    await self._thin(node_id, self._surplus.pop(node_id))
                self._tell()
                key = min(self._jobs, key=self._turn, default=None)
                if key is None:
                    await self._offered.wait()
                    continue
                job = self._jobs[key]
                wait_s = job.due_s - anyio.current_time()
                if wait_s > 0 and job.number > self._hurried:
                    with anyio.move_on_after(wait_s):
                        await self._offered.wait()
                    continue
                await self._write(self._jobs.pop(key))
        finally:
            self.let_go()
            self._surplus.clear()
            self._tell()

    def _turn(self, key: tuple[str, str | None]) -> tuple[bool, float]:
        """Orders what waits."""
        job = self._jobs[key]
        return job.number > self._hurried, job.due_s

    async def _thin(self, node_id: str, number: int) -> None:
        self._under_way = number
        try:
            await self._journal.thin(node_id)
        except SeraiError as error:
            log.warning("a snapshot that is not needed was not erased: %s", error)
        finally:
            self._under_way = None

    async def _write(self, job: _Job) -> None:
        self._under_way, self._writing = job.number, job.node.id
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
            self._note_stored(job)
        finally:
            self._under_way = self._writing = None
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
