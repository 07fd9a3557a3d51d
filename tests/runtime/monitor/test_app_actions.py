"""What keys do to sessions: each action, its question, its answer, and its refusal."""

from pathlib import Path

import pytest
from textual.widgets import Input

from serai.runtime.monitor.source import Action, ActionKind
from tests.runtime.monitor.scripted import Scripted, done, screen, session, status, watching

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("key", "kind"), [("f", ActionKind.FORK), ("r", ActionKind.RESUME)])
async def test_harmless_actions_are_done_at_once(key: str, kind: ActionKind) -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("down", key)
        await done(app, pilot)
        assert source.actions == [Action(kind, "planner")]
        assert f"{kind.value}: {kind.value} done" in screen(app)[-1]
        assert app.model.log[-1].what == "asked"


@pytest.mark.parametrize(("key", "kind"), [("p", ActionKind.PAUSE), ("c", ActionKind.CANCEL), ("d", ActionKind.DELETE)])
async def test_actions_with_consequences_ask_first_and_take_no_for_an_answer(key: str, kind: ActionKind) -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        for answer in ("n", "escape", "enter"):
            await pilot.press(key)
            await pilot.pause()
            assert "“reader”" in "\n".join(screen(app))
            await pilot.press(answer)
            await done(app, pilot)
        assert source.actions == []
        await pilot.press(key)
        await pilot.pause()
        await pilot.press("y")
        await done(app, pilot)
        assert source.actions == [Action(kind, "reader")]


async def test_the_mouse_can_say_yes() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("d")
        await pilot.pause()
        await pilot.click("#yes")
        await done(app, pilot)
        assert source.actions == [Action(ActionKind.DELETE, "reader")]


@pytest.mark.parametrize(("key", "kind", "first"), [("t", ActionKind.TAG, ""), ("l", ActionKind.LABEL, "reader")])
async def test_actions_with_a_text_ask_for_it(key: str, kind: ActionKind, first: str) -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press(key)
        await pilot.pause()
        await pilot.press(*"[b]", "enter")
        await done(app, pilot)
        await pilot.press(key)
        await pilot.pause()
        await pilot.press("escape")
        await done(app, pilot)
        (action,) = source.actions
        assert action.kind is kind
        assert action.value in (f"{first}[b]", "[b]")


async def test_exporting_asks_for_a_file_of_this_machine() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("x")
        await pilot.pause()
        await pilot.press("enter")
        await done(app, pilot)
        assert source.exported == [("reader", Path("reader.serai"))]
        assert "export: written to reader.serai" in screen(app)[-1]


async def test_any_point_can_be_resumed_by_name() -> None:
    source = Scripted(status([]))
    async with watching(source) as (app, pilot):
        await pilot.press("R")
        await pilot.pause()
        await pilot.press(*"v1", "enter")
        await done(app, pilot)
        assert source.actions == [Action(ActionKind.RESUME, "v1")]


async def test_a_paused_session_stays_in_the_list_and_can_be_resumed() -> None:
    source = Scripted(status([session("a"), session("b")]), status([session("b")]))
    async with watching(source) as (app, pilot):
        await pilot.press("p")
        await pilot.pause()
        await pilot.press("y")
        await done(app, pilot)
        (row,) = (text for text in screen(app) if text.startswith("▶ a"))
        assert "paused" in row
        assert "resumable" in row
        source.statuses = [status([session("a"), session("b")])]
        await pilot.press("r")
        await done(app, pilot)
        assert source.actions[-1] == Action(ActionKind.RESUME, "a")
        assert app.model.paused == {}


async def test_a_refusal_is_said_and_logged() -> None:
    source = Scripted(refusal="it wants a key (--key or SERAI_API_KEY)")
    async with watching(source) as (app, pilot):
        await pilot.press("f")
        await done(app, pilot)
        assert "fork: it wants a key" in screen(app)[-1]
        assert app.model.log[-1].what == "refused"


async def test_an_action_over_a_lost_connection_is_said_too() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        source.down = "connection refused"
        await pilot.press("f")
        await done(app, pilot)
        assert "fork: scripted can't be watched: connection refused" in screen(app)[-1]


async def test_an_action_without_a_session_says_what_to_do() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("4", "f", "t", "x")
        await done(app, pilot)
        assert source.actions == []
        assert "select a session first" in screen(app)[-1]


async def test_actions_work_on_the_session_in_detail() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("down", "down", "enter", "f")
        await done(app, pilot)
        assert source.actions == [Action(ActionKind.FORK, "docs")]


async def test_a_notice_goes_after_a_while() -> None:
    async with watching(Scripted()) as (app, pilot):
        await pilot.press("f")
        await done(app, pilot)
        for _ in range(8):
            await app.poll()
        await pilot.pause()
        assert "fork done" in screen(app)[-1]
        await app.poll()
        await app.poll()
        await pilot.pause()
        assert "? help" in screen(app)[-1]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("1", [Action(ActionKind.FORK, "reader", turn=1)]),
        ("@9,000", [Action(ActionKind.FORK, "reader", position=9_000)]),
        ("soon", []),
        ("", []),
        ("²", []),
    ],
)
async def test_a_fork_can_start_earlier(typed: str, expected: list[Action]) -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("F")
        await pilot.pause()
        app.screen.query_one(Input).value = typed
        await pilot.press("enter")
        await done(app, pilot)
        assert source.actions == expected
        assert expected or "name a turn such as 2" in screen(app)[-1]


async def test_a_fork_at_a_node_starts_where_the_node_stands() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("n")
        await done(app, pilot)
        await pilot.press("down", "f")
        await done(app, pilot)
        assert source.actions == [Action(ActionKind.FORK, "reader", position=23_000)]
        await pilot.press("escape", "f")
        await done(app, pilot)
        assert source.actions[-1] == Action(ActionKind.FORK, "reader"), "outside the nodes it is the session itself"


async def test_a_monitor_that_only_looks_on_acts_on_nothing_and_says_so() -> None:
    source = Scripted()
    source.may_act = False
    async with watching(source) as (app, pilot):
        assert "read-only" in screen(app)[0]
        for key in "fFapctlxdr":
            await pilot.press(key)
            await done(app, pilot)
            assert "only looks on" in screen(app)[-1]
        await pilot.press("R", *"v1", "enter")
        await done(app, pilot)
        await pilot.press("enter")
        await done(app, pilot)
        assert "its own key only" in "\n".join(screen(app))
        assert (source.actions, source.exported, source.looked_into) == ([], [], [])
