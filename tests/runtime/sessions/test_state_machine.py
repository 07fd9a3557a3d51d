"""Random lives of sessions (`lives`), and of such as are moved out, paused and survive the death of their process."""

import shutil
from collections import Counter
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from serai.runtime import Runtime
from serai.runtime.errors import SessionGone
from tests.runtime.sessions.lives import Sessions
from tests.runtime.sessions.world import Rested, cancelled, places, until_idle

COMMON = settings(
    deadline=None,
    stateful_step_count=12,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


class StoredSessions(Sessions):
    """With a store and little memory: sessions are moved out and come back, are paused, and survive a crash."""

    stored = True
    happened: ClassVar[Counter[str]] = Counter()

    @rule(place=places)
    def demote(self, place: int) -> None:
        known = self.pick(place)
        if known is not None:
            self.happened["a demotion"] += self.do(known.session.demote())

    @rule(place=places, turns=st.integers(0, 12))
    def cancel_a_demotion(self, place: int, turns: int) -> None:
        known = self.pick(place)
        if known is not None:
            self.do(cancelled(known.session.demote(), turns))

    @rule(place=places)
    def pause(self, place: int) -> None:
        known = self.pick(place)
        if known is not None:
            point = self.do(known.session.pause())
            assert not known.session.is_open
            self.life.sessions.remove(known)
            self.rested.append(Rested(str(point), known.ids))
            self.happened["a pause"] += 1

    @rule(place=places, turns=st.integers(0, 12))
    def cancel_a_pause(self, place: int, turns: int) -> None:
        known = self.pick(place)
        if known is None:
            return
        self.do(cancelled(known.session.pause(), turns))
        if known.session.is_open:
            self.compare(known)
            self.do(known.session.close())
        self.life.sessions.remove(known)

    @rule(place=places, background=st.booleans())
    def resume(self, place: int, background: bool) -> None:
        """Any number of times: the second one branches off."""
        if not self.rested or not self.has_room():
            return
        rested = self.rested[place % len(self.rested)]
        self.happened["a resume that replays"] += self.do(self.life.rt.replay_tokens(rested.point)) > 0
        self.happened["a resume"] += 1
        session = self.do(self.life.rt.resume(rested.point, background=background))
        self.compare(self.add(session, rested.ids, len(rested.ids)))

    @rule(place=places, turns=st.integers(0, 12))
    def cancel_a_resume(self, place: int, turns: int) -> None:
        if not self.rested or not self.has_room():
            return
        rested = self.rested[place % len(self.rested)]
        session = self.do(cancelled(self.life.rt.resume(rested.point), turns))
        if session is not None:
            self.compare(self.add(session, rested.ids, len(rested.ids)))
            self.do(session.close())
            self.life.sessions.pop()

    @rule(place=places)
    def lose_a_snapshot(self, place: int) -> None:
        """Whoever resumes there reads the tokens once more."""
        store = self.life.rt.store
        assert store is not None
        snapshots = store.snapshots()
        if snapshots:
            store.drop_snapshot(snapshots[place % len(snapshots)].node_id)
            self.happened["a lost snapshot"] += 1

    @rule(place=places, background=st.booleans())
    def lose_what_it_is_resumed_from(self, place: int, background: bool) -> None:
        known = self.pick(place)
        store = self.life.rt.store
        assert store is not None
        if known is None or not known.ids:
            return
        point = str(self.do(known.session.pause()))
        self.life.sessions.remove(known)
        store.drop_snapshot(point)
        self.happened["a resume that replays"] += self.do(self.life.rt.replay_tokens(point)) > 0
        session = self.do(self.life.rt.resume(point, background=background))
        self.compare(self.add(session, known.ids, len(known.ids)))

    @rule()
    def settle(self) -> None:
        self.do(self.life.rt.settle())

    @rule(settled=st.booleans())
    def crash(self, settled: bool) -> None:
        """Go on from a copy of the store as it is at this moment; the old process only ends after that."""
        if settled:
            self.do(self.life.rt.settle())
        else:
            self.do(_write_no_more(self.life.rt))
        old, before = self.life, self._store()
        self.lives += 1
        self.happened["a crash"] += 1
        after = self._store()
        assert before is not None and after is not None  # noqa: PT018  # one question to the type checker
        shutil.copytree(before, after)
        self._close()
        self._open()
        for known in old.sessions:
            try:
                session = self.do(self.life.rt.resume(known.session.id))
            except SessionGone:
                assert known.durable is None, "a durable session is gone"
                self.add(self.do(self.life.rt.session()), [], 0)  # examples go on alike, however far a call came
                continue
            ids = session.tokens().tolist()
            assert known.ids[: len(ids)] == ids
            assert len(ids) >= (known.durable or 0), "what was durable is there"
            self.compare(self.add(session, ids, len(ids)))


async def _write_no_more(rt: Runtime) -> None:
    """Drop what waits to be written in the background, and let what is being written end."""
    rt._services.saver.let_go()
    await until_idle(rt)


EXAMPLES = settings().max_examples
"""100 unless another profile is chosen (`--hypothesis-profile`), which so makes both searches longer or shorter."""


class TestSessions(Sessions.TestCase):  # type: ignore[misc, valid-type]  # made at run time
    settings = settings(COMMON, max_examples=14 * EXAMPLES)

    def runTest(self) -> None:  # noqa: N802  # unittest's name
        super().runTest()
        everything_came_about(Sessions.happened)


class TestStoredSessions(StoredSessions.TestCase):  # type: ignore[misc, valid-type]  # made at run time
    settings = settings(COMMON, max_examples=6 * EXAMPLES)

    def runTest(self) -> None:  # noqa: N802  # unittest's name
        super().runTest()
        everything_came_about(StoredSessions.happened)


def everything_came_about(happened: Counter[str]) -> None:
    never = [what for what, times in happened.items() if not times]
    assert not never, f"in all those lives there never was {', '.join(never)}"
    print(*(f"{times:6} {what}" for what, times in happened.most_common()), sep="\n")
