"""The runtime without `async`: the same tokens, the same errors, and nothing left when a loop is left early."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serai.runtime import SamplingParams, blocking
from serai.runtime.errors import SessionBusy, SessionClosed

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def rt(tmp_path: Path) -> Iterator[blocking.Runtime]:
    with blocking.open_runtime("nano", budget="512MiB", store=tmp_path / "store", precision="exact") as runtime:
        yield runtime


def test_a_session_is_read_from_in_a_plain_loop(rt: blocking.Runtime) -> None:
    with rt.session(label="plain") as session:
        used = session.append("In the morning")
        assert (used.position, session.turn) == (session.position, 0)
        ids = [token.id for token in session.generate(GREEDY)]
        assert session.tokens()[used.position :].tolist() == ids
        assert len(rt.status().sessions) == 1
    with pytest.raises(SessionClosed):
        session.append([1])


def test_leaving_the_loop_early_frees_the_session(rt: blocking.Runtime) -> None:
    session = rt.session()
    session.append([1, 2, 3])
    stream = session.generate(GREEDY)
    tokens = iter(stream)
    next(tokens)
    with pytest.raises(SessionBusy):
        session.append([1])
    del tokens
    assert stream.finish_reason is not None
    session.append([1])
    assert session.position == 5
    for _ in session.generate(GREEDY):
        break
    session.rewind(position=5)
    assert session.position == 5


def test_trees_pauses_and_tools(rt: blocking.Runtime) -> None:
    session = rt.session()
    session.append([1, 2, 3, 4])
    left, right = session.fork_many(2)
    assert left.generate(GREEDY).collect().tokens == right.generate(GREEDY).collect().tokens
    assert session.fork(position=2).position == 2
    assert session.replay_tokens() == 0
    with session.waiting_for_tool(expected_s=0):
        pass
    point = session.pause()
    again = rt.resume(point)
    assert again.id == session.id
    assert again.edit(0, [7]).position == 1
    rt.settle()


def test_a_chat_gives_events_and_whole_replies(rt: blocking.Runtime) -> None:
    with rt.chat(thinking=False) as chat:
        events = list(chat.send("Hello", params=GREEDY))
        assert events
        reply = chat.fork().send("Again", params=GREEDY).collect()
        assert reply.message is not None
        assert chat.session.position > 0
        point = chat.pause()
    with rt.resume_chat(point) as chat:
        assert chat.session.position > 0
