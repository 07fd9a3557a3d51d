"""Those who watch hold nothing up, and what is kept for them is bounded."""

import anyio
import pytest

from serai.runtime.sessions.events import EventFeed, EventKind
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


async def test_a_watcher_that_takes_nothing_is_kept_the_last_events_and_told_how_many_it_missed() -> None:
    """B98: the same rule for monitors as for clients."""
    feed = EventFeed()
    with feed.watch(10) as slow, feed.watch(10) as fast:
        for number in range(50_000):
            feed.tell(EventKind.APPENDED, "s", "", str(number))
            assert (await fast.get()).detail == str(number)
        assert len(slow._events) == 10
        first = await slow.get()
        assert (first.detail, first.missed) == ("49990", 49_990)
        assert [(await slow.get()).missed for _ in range(9)] == [0] * 9
    feed.tell(EventKind.APPENDED, "s", "")
    assert not slow._events, "nobody is told after the block"


async def test_sessions_go_on_while_a_watcher_takes_nothing() -> None:
    """B98"""
    async with fake_runtime() as rt:
        with rt.watch(most=5) as watcher, anyio.fail_after(30):
            for _ in range(20):
                async with await rt.session() as session:
                    await session.append([1, 2, 3])
            assert len(watcher._events) == 5
            assert (await watcher.get()).missed == 20 * 3 - 5
