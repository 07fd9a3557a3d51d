"""The simulation is repeatable, plausible, and obeys."""

from pathlib import Path

import pytest

from serai.runtime.monitor.demo import Demo
from serai.runtime.monitor.reading import status_from_json
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused

pytestmark = pytest.mark.anyio


async def test_the_same_seed_tells_the_same_story() -> None:
    first, second = Demo(seed=3), Demo(seed=3)
    for _ in range(40):
        told = await first.status()
        assert told == await second.status()
        assert status_from_json(told.to_json()) == told
    assert told.work.decoded_tokens > 0
    assert {one.tier for one in told.sessions} <= {"hot", "cold"}


async def test_actions_change_the_story() -> None:
    demo = Demo(sessions=2)
    root = (await demo.status()).sessions[0]
    fork = (await demo.act(Action(ActionKind.FORK, root.id, "copy"))).session_id
    await demo.act(Action(ActionKind.LABEL, root.id, "first"))
    await demo.act(Action(ActionKind.TAG, root.id, "v1"))
    labels = {one.id: one.label for one in (await demo.status()).sessions}
    assert labels[root.id] == "first"
    assert labels[fork or ""] == "copy"
    await demo.act(Action(ActionKind.PAUSE, root.id))
    assert root.id not in {one.id for one in (await demo.status()).sessions}
    await demo.act(Action(ActionKind.RESUME, root.id))
    await demo.act(Action(ActionKind.RESUME, root.id))
    await demo.act(Action(ActionKind.DELETE, fork or ""))
    assert {one.id for one in (await demo.status()).sessions} >= {root.id}
    with pytest.raises(ActionRefused, match="not live"):
        await demo.act(Action(ActionKind.FORK, fork or ""))
    with pytest.raises(ActionRefused, match="nothing to write"):
        await demo.export(root.id, Path("x"))


async def test_a_call_can_be_cancelled_while_there_is_one() -> None:
    demo = Demo()
    busy = next(one for one in (await demo.status()).sessions if one.doing is not None)
    await demo.act(Action(ActionKind.CANCEL, busy.id))
    with pytest.raises(ActionRefused, match="no call under way"):
        await demo.act(Action(ActionKind.CANCEL, busy.id))


async def test_events_are_told_from_the_first_session_on() -> None:
    demo = Demo(sessions=3)
    events = demo.events()
    assert [(await anext(events)).kind.value for _ in range(3)] == ["opened", "forked", "forked"]
    await events.aclose()
    await demo.close()
