"""What random lives of sessions (`lives`) happen in: a runtime over the scripted model, and beside it one list of token
ids a session, which says what that session must be."""

import asyncio
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from numpy.typing import NDArray

from serai.runtime import Generation, Runtime, Session
from serai.runtime.scheduler import Limits
from serai.runtime.services import Policy
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.scripted import VOCAB, ScriptedModel, count_on, hash_of, logits_of

T = TypeVar("T")

POLICY = Policy(reuse=True, guess=True, snapshot_every=8, save_after_tokens=4)
LIMITS = Limits(step_rows=8, prefill_rows_beside_decode=3)
MOST_SESSIONS = 8
MOST_READERS = 2
MOST_TOKENS = 60
LIMIT_BYTES = 3_000
"""Room for the states of a few sessions, two of them half read: the others have to be moved out and come back."""

HANGS_AFTER_S = 30.0

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where stores lie: what a disk does is tested elsewhere, and waiting for one makes examples a hundred times dearer."""

tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14)
places = st.integers(0, 10_000)
"""Taken modulo whatever there is to choose from."""


@dataclass(eq=False)
class Known:
    """What a session must be. `durable` ids survive a crash; `None` when not even the session has to."""

    session: Session
    ids: list[int]
    durable: int | None
    reader: Generation | None = None

    @property
    def is_free(self) -> bool:
        return self.reader is None


@dataclass
class Rested:
    """A paused session: where to resume it from, and what it must be then."""

    point: str
    ids: list[int]


@dataclass
class Life:
    """One process: an event loop with a runtime in it. The loop only turns while a rule waits for something."""

    loop: asyncio.AbstractEventLoop
    rt: Runtime
    living: "asyncio.Task[None]"
    stop: asyncio.Event
    sessions: list[Known] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """One process at a time, its sessions and what they must be. The rules are in `lives`."""

    stored = False
    happened: ClassVar[Counter[str]] = Counter()
    """What rules did that may as well not come about: nothing is tested by lives in which it never does."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="serai-states-", dir=MEMORY)) if self.stored else None
        self.lives = 0
        self.rested: list[Rested] = []
        self.counting = False

    @initialize(counting=st.booleans())
    def begin(self, counting: bool) -> None:
        self.counting = counting
        self._open()

    def teardown(self) -> None:
        try:
            if hasattr(self, "life"):
                for known in self.life.sessions:
                    self.leave(known)
                    self.compare(known)
                self._close()
        finally:
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)

    # The world

    def _open(self) -> None:
        loop = asyncio.new_event_loop()
        ready: asyncio.Future[Runtime] = loop.create_future()
        stop = asyncio.Event()

        async def live() -> None:
            model = ScriptedModel(counting=self.counting)
            limit = LIMIT_BYTES if self.stored else None
            async with fake_runtime(
                model, store=self._store(), limits=LIMITS, policy=POLICY, limit_bytes=limit
            ) as runtime:
                ready.set_result(runtime)
                await stop.wait()

        living = loop.create_task(live())
        self.life = Life(loop, loop.run_until_complete(asyncio.wait_for(ready, HANGS_AFTER_S)), living, stop)
        self._count_thinning(self.life.rt)

    def _count_thinning(self, rt: Runtime) -> None:
        """Nothing else tells that a snapshot was let go of because others lie close to it."""
        saver = rt._services.saver
        thin = saver.thin

        def counted(node_id: str) -> None:
            self.happened["a snapshot thinned out"] += 1
            thin(node_id)

        if self.stored:
            saver.thin = counted  # type: ignore[method-assign]

    def _store(self) -> Path | None:
        return None if self.folder is None else self.folder / f"life{self.lives}"

    def _close(self) -> None:
        life = self.life
        life.stop.set()
        try:
            life.loop.run_until_complete(asyncio.wait_for(life.living, HANGS_AFTER_S))
            life.loop.run_until_complete(life.loop.shutdown_asyncgens())
        finally:
            life.loop.close()

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return self.life.loop.run_until_complete(asyncio.wait_for(what, HANGS_AFTER_S))

    def pick(self, place: int) -> Known | None:
        """One of the sessions that nobody is reading from."""
        free = [known for known in self.life.sessions if known.is_free]
        return free[place % len(free)] if free else None

    def add(self, session: Session, ids: list[int], durable: int | None) -> Known:
        known = Known(session, list(ids), durable)
        self.life.sessions.append(known)
        return known

    def has_room(self, more: int = 1) -> bool:
        """Whether so many may be added. A rule asks when it runs, and is never left out for it: how far a cancelled
        call came is for threads to say, and with it how many sessions there are, and an example that is run again must
        draw alike."""
        return len(self.life.sessions) + more <= MOST_SESSIONS

    # What the model must say

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        return count_on(ids[-1]) if self.counting else logits_of(hash_of(ids))

    def continued(self, ids: list[int], count: int) -> list[int]:
        whole = list(ids)
        for _ in range(count):
            whole.append(int(np.argmax(self.logits(whole))))
        return whole[len(ids) :]

    def compare(self, known: Known) -> None:
        assert known.session.tokens().tolist() == known.ids
        if known.ids:
            np.testing.assert_array_equal(self.do(known.session.logits()), self.logits(known.ids))

    def read(self, known: Known, count: int) -> None:
        reader = known.reader
        assert reader is not None
        for expected in self.continued(known.ids, count):
            token = self.do(next_of(reader))
            if token is None:
                self.leave(known)
                return
            assert token == expected
            known.ids.append(token)
        if reader.finish_reason is not None:  # the last token says so, and the session is free with it
            self.leave(known)
        if known.durable is None:
            known.durable = 0

    def leave(self, known: Known) -> None:
        if known.reader is None:
            return
        self.do(known.reader.aclose())
        known.reader = None
        known.durable = len(known.ids)

    @invariant()
    def every_session_is_its_ids(self) -> None:
        if hasattr(self, "life"):
            for known in self.life.sessions:
                assert known.session.position == len(known.ids)
                assert known.session.tokens().tolist() == known.ids

    @invariant()
    def the_ledger_is_right(self) -> None:
        if hasattr(self, "life"):
            self.do(self._look_at_the_ledger(self.life.rt))

    async def _look_at_the_ledger(self, rt: Runtime) -> None:
        budget = rt.status().budget
        if self.stored:
            assert budget.used_bytes + budget.reserved_bytes <= budget.budget_bytes
        assert budget.reserved_bytes == 0, "nobody is under way"
        await until_idle(rt)  # a step whose callers have left goes on to the next layer
        rt.check()


async def next_of(reader: Generation) -> int | None:
    async for token in reader:
        return token.id
    return None


async def cancelled(what: Coroutine[Any, Any, T], turns: int) -> T | None:
    """Begin, let the loop turn a few times, cancel, and wait for the end; the result if it was too late."""
    task = asyncio.ensure_future(what)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def until_idle(rt: Runtime) -> None:
    while rt.is_working:  # noqa: ASYNC110  # two threads end at moments of their own, and nobody else waits for both
        await asyncio.sleep(0.0005)
