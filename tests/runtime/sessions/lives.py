"""Sessions against plain lists of token ids: whatever is done to them, in whatever order, each is its ids and no more.

Every example is a random life of a runtime over the scripted model: sessions are opened, appended to, read from half
way, forked, rewound, edited, moved out, paused, cancelled, and the process is "killed" by going on from a copy of its
store. The model beside it is one list a session. Logits are a function of those ids alone, so comparing them compares
every bit a session has.
"""

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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from serai.runtime import Generation, Runtime, SamplingParams, Session
from serai.runtime.errors import OutOfBudget, SessionBusy
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


class Sessions(RuleBasedStateMachine):
    """Without a store: nothing can be moved out or survive, and examples are cheap."""

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

    # Rules

    @precondition(lambda self: len(self.life.sessions) < MOST_SESSIONS)
    @rule(namespace=st.sampled_from(["", "other"]))
    def open_one(self, namespace: str) -> None:
        self.add(self.do(self.life.rt.session(namespace=namespace)), [], 0)

    @rule(place=places, ids=tokens)
    def append(self, place: int, ids: list[int]) -> None:
        known = self.pick(place)
        if known is None or len(known.ids) + len(ids) > MOST_TOKENS:
            return
        used = self.do(known.session.append(ids))
        assert used.prefilled + used.reused == len(ids)
        self.happened["an append"] += 1
        self.happened["an append of what was known"] += used.reused > 0
        known.ids += ids
        known.durable = len(known.ids)
        assert used.position == len(known.ids)

    @precondition(lambda self: len(self.life.sessions) < MOST_SESSIONS)
    @rule(place=places, cut=places, more=tokens, namespace=st.sampled_from(["", "other"]))
    def begin_like_another(self, place: int, cut: int, more: list[int], namespace: str) -> None:
        """A new session that starts with what one of the others has read."""
        known = self.pick(place)
        if known is None or not known.ids:
            return
        ids = (known.ids[: cut % len(known.ids) + 1] + more)[:MOST_TOKENS]
        session = self.do(self.life.rt.session(namespace=namespace))
        used = self.do(session.append(ids))
        assert used.prefilled + used.reused == len(ids)
        self.happened["a beginning that was known"] += used.reused > 0
        self.happened["a beginning that another namespace has"] += namespace != known.session.namespace
        self.compare(self.add(session, ids, len(ids)))

    @precondition(lambda self: len(self.life.sessions) + 3 <= MOST_SESSIONS)
    @rule(ids=tokens, tails=st.lists(tokens, min_size=2, max_size=3))
    def arrive_together(self, ids: list[int], tails: list[list[int]]) -> None:
        """Several at once with the same beginning."""

        async def one(tail: list[int]) -> Session:
            session = await self.life.rt.session()
            await session.append(ids)
            await session.append(tail)
            return session

        async def all_of_them() -> list[Session]:
            return await asyncio.gather(*(one(tail) for tail in tails))

        for session, tail in zip(self.do(all_of_them()), tails, strict=True):
            self.add(session, ids + tail, len(ids + tail))
        self.happened["arrivals together"] += 1

    @rule(place=places, most=st.integers(1, 12), read=st.integers(1, 12), stays=st.booleans())
    def generate(self, place: int, most: int, read: int, stays: bool) -> None:
        """Read some tokens; then read on later, or leave."""
        known = self.pick(place)
        if known is None or not known.ids or len(known.ids) + most > MOST_TOKENS:
            return
        if sum(not one.is_free for one in self.life.sessions) >= MOST_READERS:
            return
        known.reader = known.session.generate(SamplingParams(temperature=0, max_tokens=most))
        self.read(known, min(read, most))
        if read >= most or not stays:
            self.leave(known)

    def read(self, known: Known, count: int) -> None:
        reader = known.reader
        assert reader is not None
        for expected in self.continued(known.ids, count):
            token = self.do(_next(reader))
            if token is None:
                self.leave(known)
                return
            assert token == expected
            known.ids.append(token)
        if known.durable is None:
            known.durable = 0

    @rule(place=places, count=st.integers(1, 5))
    def read_on(self, place: int, count: int) -> None:
        readers = [known for known in self.life.sessions if known.reader is not None]
        if readers:
            self.read(readers[place % len(readers)], count)

    @rule(place=places, dropped=st.booleans())
    def leave_one(self, place: int, dropped: bool) -> None:
        readers = [known for known in self.life.sessions if known.reader is not None]
        if not readers:
            return
        known = readers[place % len(readers)]
        if dropped:
            known.reader = None  # without a word: the session is free, and its tokens are written later
        else:
            self.leave(known)

    def leave(self, known: Known) -> None:
        if known.reader is None:
            return
        self.do(known.reader.aclose())
        known.reader = None
        known.durable = len(known.ids)

    @rule(place=places)
    def a_second_call_is_refused(self, place: int) -> None:
        readers = [known for known in self.life.sessions if known.reader is not None]
        if not readers:
            return
        known = readers[place % len(readers)]
        for call in (known.session.append([1]), known.session.pause(), known.session.rewind(position=0)):
            try:
                self.do(call)
            except SessionBusy:
                continue
            raise AssertionError("a session did two things at once")

    @precondition(lambda self: len(self.life.sessions) < MOST_SESSIONS)
    @rule(place=places)
    def fork(self, place: int) -> None:
        """From the present, which is allowed while somebody reads."""
        if not self.life.sessions:
            return
        known = self.life.sessions[place % len(self.life.sessions)]
        self.add(self.do(known.session.fork()), known.ids, None)

    @precondition(lambda self: len(self.life.sessions) < MOST_SESSIONS)
    @rule(place=places, cut=places)
    def fork_at(self, place: int, cut: int) -> None:
        if not self.life.sessions:
            return
        known = self.life.sessions[place % len(self.life.sessions)]
        position = cut % (len(known.ids) + 1)
        self.happened["a fork far back"] += position < len(known.ids)
        self.happened["a fork far back that replays"] += self.do(_would_replay(known.session, position))
        self.happened["a fork far back while somebody reads"] += position < len(known.ids) and not known.is_free
        child = self.do(_forked_at(known.session, position))
        self.compare(self.add(child, known.ids[:position], None))

    @precondition(lambda self: len(self.life.sessions) < MOST_SESSIONS)
    @rule(place=places, which=places)
    def fork_at_a_node(self, place: int, which: int) -> None:
        if not self.life.sessions:
            return
        known = self.life.sessions[place % len(self.life.sessions)]
        nodes = known.session.record.nodes()
        node = nodes[which % len(nodes)]
        self.happened["a fork at a node"] += 1
        child = self.do(known.session.fork(node=node.id))
        self.compare(self.add(child, known.ids[: node.position], None))

    @rule(place=places, cut=places)
    def rewind(self, place: int, cut: int) -> None:
        known = self.pick(place)
        if known is None:
            return
        position = cut % (len(known.ids) + 1)
        moved = position < len(known.ids)
        self.happened["a rewind"] += moved
        self.happened["a rewind that replays"] += self.do(_would_replay(known.session, position))
        self.do(known.session.rewind(position=position))
        del known.ids[position:]
        if moved:
            known.durable = position

    @rule(place=places, turn=places, ids=tokens)
    def edit(self, place: int, turn: int, ids: list[int]) -> None:
        known = self.pick(place)
        if known is None:
            return
        turn = turn % (known.session.turn + 1)
        start = 0 if turn == 0 else known.session.timeline.end_of(turn - 1)
        self.happened["an edit"] += 1
        self.happened["an edit of an earlier turn"] += turn < known.session.turn
        self.do(known.session.edit(turn, ids))
        known.ids[start:] = ids
        known.durable = len(known.ids)

    @rule(place=places, ids=tokens, turns=st.integers(0, 12))
    def cancel_an_append(self, place: int, ids: list[int], turns: int) -> None:
        """All of it or nothing."""
        known = self.pick(place)
        if known is None or len(known.ids) + len(ids) > MOST_TOKENS:
            return
        self.do(cancelled(known.session.append(ids), turns))
        if known.session.position != len(known.ids):
            known.ids += ids
        self.compare(known)

    @rule(place=places, turns=st.integers(0, 12))
    def cancel_a_read(self, place: int, turns: int) -> None:
        """The token is in the session or it isn't; the next read says which."""
        readers = [known for known in self.life.sessions if known.reader is not None]
        if not readers:
            return
        known = readers[place % len(readers)]
        assert known.reader is not None
        self.do(cancelled(_next(known.reader), turns))
        known.ids = known.ids + self.continued(known.ids, known.session.position - len(known.ids))
        assert known.session.tokens().tolist() == known.ids
        if known.reader.finish_reason is not None:
            self.leave(known)

    @rule(place=places, cut=places, turns=st.integers(0, 12))
    def cancel_a_rewind(self, place: int, cut: int, turns: int) -> None:
        known = self.pick(place)
        if known is None:
            return
        position = cut % (len(known.ids) + 1)
        self.do(cancelled(known.session.rewind(position=position), turns))
        if known.session.position != len(known.ids):
            assert known.session.position == position
            del known.ids[position:]
            known.durable = min(known.durable or 0, position)
        self.compare(known)

    @rule(place=places)
    def close(self, place: int) -> None:
        known = self.pick(place)
        if known is not None:
            self.do(known.session.close())
            self.life.sessions.remove(known)

    @rule(place=places)
    def look(self, place: int) -> None:
        known = self.pick(place)
        if known is not None:
            self.compare(known)

    @rule(place=places)
    def what_can_never_fit_changes_nothing(self, place: int) -> None:
        known = self.pick(place)
        if known is None or not self.stored:
            return
        try:
            self.do(known.session.append([1] * LIMIT_BYTES))
        except OutOfBudget:
            return
        raise AssertionError("more than the budget was taken")

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


async def _next(reader: Generation) -> int | None:
    async for token in reader:
        return token.id
    return None


async def _would_replay(session: Session, position: int) -> bool:
    return session.replay_tokens(position=position) > 0


async def _forked_at(session: Session, position: int) -> Session:
    before = session.replay_tokens(position=position)
    assert 0 <= before <= position
    return await session.fork(position=position)


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
