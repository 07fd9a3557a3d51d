"""Sessions against plain lists of token ids: whatever is done to them, in whatever order, each is its ids and no more.

Every example is a random life of a runtime over the scripted model: sessions are opened, appended to, read from half
way, forked, rewound, edited, moved out, paused, cancelled, and the process is "killed" by going on from a copy of its
store. The model beside it is one list a session. Logits are a function of those ids alone, so comparing them compares
every bit a session has.
"""

import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import rule

from serai.runtime import SamplingParams, Session
from serai.runtime.errors import OutOfBudget, SessionBusy
from tests.runtime.scripted import VOCAB
from tests.runtime.sessions.world import (
    LIMIT_BYTES,
    MOST_READERS,
    MOST_TOKENS,
    World,
    cancelled,
    next_of,
    places,
    tokens,
)


class Sessions(World):
    """Without a store: nothing can be moved out or survive, and examples are cheap."""

    @rule(namespace=st.sampled_from(["", "other"]))
    def open_one(self, namespace: str) -> None:
        if not self.has_room():
            return
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

    @rule(place=places, ids=st.lists(st.integers(0, VOCAB - 1), min_size=14, max_size=20))
    def append_one_by_one(self, place: int, ids: list[int]) -> None:
        """So many states close together that some of them are let go of, in memory and in the store."""
        known = self.pick(place)
        if known is None or len(known.ids) + len(ids) > MOST_TOKENS:
            return
        before = known.session.position
        for token in ids:
            self.do(known.session.append([token]))
        known.ids += ids
        known.durable = len(known.ids)
        if not self.stored:  # where there is little memory they may be gone for that
            kept = sum(before < position for position in known.session.kept_positions())
            self.happened["states thinned out"] += kept < len(ids)
        self.compare(known)

    @rule(place=places, cut=places, more=tokens)
    def begin_like_another(self, place: int, cut: int, more: list[int]) -> None:
        """New sessions, one in each namespace, that start with what one of the others has read, every other time with
        all of it: states are left at the ends of calls."""
        if not self.has_room(2):
            return
        known = self.pick(place)
        if known is None or not known.ids:
            return
        end = cut % len(known.ids) + 1 if cut % 2 else len(known.ids)
        ids = (known.ids[:end] + more)[:MOST_TOKENS]
        for namespace in ("", "other"):
            session = self.do(self.life.rt.session(namespace=namespace))
            used = self.do(session.append(ids))
            assert used.prefilled + used.reused == len(ids)
            self.happened["a beginning that was known"] += used.reused > 0
            self.happened["a beginning that another namespace has"] += namespace != known.session.namespace
            self.compare(self.add(session, ids, len(ids)))

    @rule(ids=tokens, tails=st.lists(tokens, min_size=2, max_size=3))
    def arrive_together(self, ids: list[int], tails: list[list[int]]) -> None:
        """Several at once with the same beginning."""
        if not self.has_room(3):
            return

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

    @rule(place=places, ids=tokens, more=tokens)
    def say_the_same_to_a_fork(self, place: int, ids: list[int], more: list[int]) -> None:
        if not self.has_room():
            return
        known = self.pick(place)
        if known is None or len(known.ids) + len(ids) + len(more) > MOST_TOKENS:
            return
        child = self.add(self.do(known.session.fork()), known.ids, None)
        for one, said in ((known, ids), (child, ids + more)):
            used = self.do(one.session.append(said))
            assert used.prefilled + used.reused == len(said)
            one.ids += said
            one.durable = len(one.ids)
        self.happened["an append of what was known"] += used.reused > 0
        self.compare(child)

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

    @rule(place=places)
    def fork(self, place: int) -> None:
        """From the present, which is allowed while somebody reads."""
        if not self.life.sessions or not self.has_room():
            return
        known = self.life.sessions[place % len(self.life.sessions)]
        self.add(self.do(known.session.fork()), known.ids, None)

    @rule(place=places, cut=places)
    def fork_at(self, place: int, cut: int) -> None:
        if not self.life.sessions or not self.has_room():
            return
        known = self.life.sessions[place % len(self.life.sessions)]
        position = cut % (len(known.ids) + 1)
        self.happened["a fork far back"] += position < len(known.ids)
        self.happened["a fork far back that replays"] += self.do(_would_replay(known.session, position))
        self.happened["a fork far back while somebody reads"] += position < len(known.ids) and not known.is_free
        child = self.do(_forked_at(known.session, position))
        self.compare(self.add(child, known.ids[:position], None))

    @rule(place=places, cut=places, read=st.integers(1, 4))
    def fork_far_back_under_a_reader(self, place: int, cut: int, read: int) -> None:
        if not self.has_room():
            return
        self.generate(place, 6, read, stays=True)
        readers = [known for known in self.life.sessions if not known.is_free]
        if readers:
            known = readers[place % len(readers)]
            self.fork_at(self.life.sessions.index(known), cut % len(known.ids))

    @rule(place=places, which=places)
    def fork_at_a_node(self, place: int, which: int) -> None:
        if not self.life.sessions or not self.has_room():
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

    @rule(place=places, turn=places, read=st.integers(1, 6), more=tokens, ids=tokens)
    def edit_an_earlier_turn(self, place: int, turn: int, read: int, more: list[int], ids: list[int]) -> None:
        """After an answer and another question."""
        known = self.pick(place)
        if known is None or not known.ids or len(known.ids) + read + len(more) > MOST_TOKENS:
            return
        if sum(not one.is_free for one in self.life.sessions) >= MOST_READERS:
            return
        index = [one for one in self.life.sessions if one.is_free].index(known)
        self.generate(index, read, read, stays=False)
        self.append(index, more)
        self.edit(index, turn % known.session.turn, ids)

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
        self.do(cancelled(next_of(known.reader), turns))
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


async def _would_replay(session: Session, position: int) -> bool:
    return session.replay_tokens(position=position) > 0


async def _forked_at(session: Session, position: int) -> Session:
    before = session.replay_tokens(position=position)
    assert 0 <= before <= position
    return await session.fork(position=position)
