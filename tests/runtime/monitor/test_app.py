"""The monitor's screen: views, moving, listing, and whatever may happen to the connection and the terminal."""

from dataclasses import replace
from pathlib import Path

import pytest

from serai.runtime.monitor.keys import ALL
from serai.runtime.monitor.model import View
from serai.runtime.monitor.transcript import Passage, Voice
from serai.runtime.sessions.events import EventKind
from serai.runtime.status import LayerHeat
from tests.runtime.monitor.scripted import (
    DETAIL,
    EXPERTS,
    Clock,
    Scripted,
    done,
    event,
    screen,
    session,
    status,
    watching,
)

pytestmark = pytest.mark.anyio

SCREENS = Path(__file__).parent / "screens"
SIZES = {"80x24": (80, 24), "160x50": (160, 50)}
VIEW_KEYS = {
    "sessions": ["1"],
    "budget": ["2"],
    "experts": ["3"],
    "log": ["4"],
    "detail": ["1", "enter"],
    "nodes": ["1", "enter", "n"],
    "help": ["?"],
}


async def draw(view: str, size: tuple[int, int]) -> str:
    """A view of the family after three statuses and two events."""
    source = Scripted(
        status(),
        status(now_s=1_001.0, live_bytes=2 * 10**9),
        status(now_s=1_002.0, live_bytes=3 * 10**9),
        events=[event(EventKind.FORKED, "docs", "from planner"), event(EventKind.FAILED, "tests", "out of budget")],
    )
    async with watching(source, size=size) as (app, pilot):
        await app.poll()
        await app.listen()
        await app.poll()
        await pilot.press(*VIEW_KEYS[view])
        await done(app, pilot)
        return "\n".join(screen(app)).rstrip() + "\n"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", VIEW_KEYS)
async def test_each_view_looks_as_it_did(view: str, size: str) -> None:
    """To accept a change: python -m tests.runtime.monitor.draw_screens, and read the difference."""
    expected = (SCREENS / f"{view}-{size}.txt").read_text(encoding="utf-8")
    assert await draw(view, SIZES[size]) == expected


async def test_the_cursor_stays_on_its_session_when_others_come_and_go() -> None:
    family = [session(name) for name in "abcd"]
    source = Scripted(status(family), status([session("new"), *family[1:]], now_s=1_001.0))
    async with watching(source) as (app, pilot):
        await pilot.press("down", "j")
        assert app.model.selected == "c"
        await app.poll()
        await pilot.pause()
        assert app.model.selected == "c"
        assert [text[:3] for text in screen(app)[4:8]] == ["  n", "  b", "▶ c", "  d"]


async def test_a_gone_session_leaves_the_cursor_on_its_line() -> None:
    source = Scripted(status([session(name) for name in "abc"]), status([session("a"), session("c")]))
    async with watching(source) as (app, pilot):
        await pilot.press("down")
        await app.poll()
        await pilot.pause()
        assert app.model.selected == "c"


async def test_searching_narrows_as_one_types_and_escape_shows_all_again() -> None:
    async with watching(Scripted()) as (app, pilot):
        await pilot.press("slash", *"pla")
        await pilot.pause()
        assert "1 of 5 sessions" in screen(app)[2]
        await pilot.press("enter", "down")
        assert app.model.selected == "planner"
        await pilot.press("escape")
        await pilot.pause()
        assert "5 sessions" in screen(app)[2]


async def test_letters_typed_into_the_search_are_no_keys() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("slash", *"fdqp")
        await done(app, pilot)
        assert app.model.query == "fdqp"
        assert source.actions == []
        assert "no session matches" in screen(app)[4]


async def test_order_filter_and_folding_change_what_is_listed() -> None:
    async with watching(Scripted()) as (app, pilot):
        await pilot.press("space")
        await pilot.pause()
        assert "reader (+3)" in screen(app)[4]
        await pilot.press("space", "o")
        await pilot.pause()
        assert "by tok/s" in screen(app)[2]
        assert screen(app)[4].startswith(("▶ planner", "  planner"))
        await pilot.press("O")
        await pilot.pause()
        assert "planner" in screen(app)[8]
        await pilot.press("v")
        await pilot.pause()
        assert "2 of 5 sessions · by tok/s, reversed · only busy" in screen(app)[2]


async def test_the_mouse_selects_opens_scrolls_and_turns_to_tabs() -> None:
    async with watching(Scripted()) as (app, pilot):
        await pilot.click("#page", offset=(5, 4))
        assert app.model.selected == "docs"
        await pilot.click("#page", offset=(5, 4), times=2)
        await pilot.pause()
        assert "› detail" in screen(app)[1]
        await pilot.click("#tabs", offset=(15, 0))
        await pilot.pause()
        assert app.model.view is View.BUDGET


async def test_a_view_of_experts_is_there_only_where_experts_are_read() -> None:
    async with watching(Scripted(status(experts=None))) as (app, pilot):
        assert "experts" not in screen(app)[1]
        await pilot.press("3")
        await pilot.pause()
        assert app.model.view is View.SESSIONS
        assert "experts are all in memory" in screen(app)[-1]


async def test_a_lost_connection_is_said_kept_at_bay_and_made_up_for() -> None:
    source, clock = Scripted(), Clock()
    async with watching(source, monotonic=clock) as (app, pilot):
        source.down = "connection refused"
        waits = [await app.poll() for _ in range(6)]
        await pilot.pause()
        assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
        clock.now_s += 90.0
        await app.poll()
        await pilot.pause()
        assert "✗ lost 1 min ago, again in 8 s" in screen(app)[0]
        assert "connection refused" in screen(app)[-1]
        assert "reader" in screen(app)[4], "what was known stays in sight"
        source.down = None
        assert await app.poll() == 1.0
        await pilot.press("4")
        await pilot.pause()
        assert "● live" in screen(app)[0]
        assert [entry.what for entry in app.model.log] == ["connection lost", "connected again"]


async def test_a_restarted_server_is_noticed_by_its_counters() -> None:
    source = Scripted(status(), status([session("fresh")], steps=2, now_s=1.0))
    async with watching(source) as (app, pilot):
        await app.poll()
        await pilot.press("4")
        await pilot.pause()
        assert "server restarted" in "\n".join(screen(app))
        assert len(app.model.history.samples) == 1


@pytest.mark.parametrize("now_s", [-1e9, 0.0, 1e15])
async def test_a_clock_that_jumps_changes_nothing_but_rates(now_s: float) -> None:
    source, clock = Scripted(status(), status(now_s=now_s), status(now_s=1_002.0)), Clock()
    async with watching(source, monotonic=clock) as (app, pilot):
        clock.now_s -= 1_000.0
        await app.poll()
        await app.poll()
        for key in "1234":
            await pilot.press(key)
            await pilot.pause()
        assert len(app.model.history.samples) == 3


async def test_events_are_logged_and_what_was_missed_is_counted() -> None:
    source = Scripted(
        events=[event(EventKind.DEMOTED, "search", missed=12), event(EventKind.PAUSED, "docs", "at 1,000")]
    )
    async with watching(source) as (app, pilot):
        assert await app.listen() is False
        await pilot.press("4")
        await pilot.pause()
        text = "\n".join(screen(app))
        assert "12 events came too fast" in text
        assert "demoted           search" in text
        assert "this server tells none" in text
        source.down = "gone"
        assert await app.listen() is True


async def test_a_log_stays_at_its_end_until_it_is_scrolled() -> None:
    source = Scripted(events=[event(EventKind.APPENDED, "docs", f"{number} tokens") for number in range(100)])
    async with watching(source) as (app, pilot):
        await pilot.press("4")
        await app.listen()
        await app.poll()
        await pilot.pause()
        assert "99 tokens" in "\n".join(screen(app))
        await pilot.press("home")
        await app.poll()
        await pilot.pause()
        assert " 0 tokens" in "\n".join(screen(app))


@pytest.mark.parametrize("count", [0, 1, 200])
async def test_any_size_of_terminal_is_survived_and_the_selection_kept(count: int) -> None:
    """B114: 80×24 → 1×1 → 20×5 → 300×80."""
    source = Scripted(status([session(f"s{number:03}") for number in range(count)]))
    async with watching(source) as (app, pilot):
        await pilot.press(*["down"] * min(count, 7))
        selected = app.model.selected
        for size in ((1, 1), (20, 5), (300, 80), (80, 24)):
            await pilot.resize_terminal(*size)
            await app.poll()
            await pilot.pause()
        assert app.model.selected == selected
        shown = f"▶ {selected}" if count else "  no session yet"
        assert any(text.startswith(shown) for text in screen(app))


@pytest.mark.parametrize("view", ["budget", "experts", "log", "detail", "help"])
async def test_every_view_fits_in_one_character(view: str) -> None:
    async with watching(Scripted(), size=(1, 1)) as (app, pilot):
        await pilot.press(*VIEW_KEYS[view])
        await app.poll()
        await pilot.resize_terminal(20, 5)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert app.model.view.value == view
        assert "● live" in screen(app)[0]


async def test_a_thousand_sessions_can_be_walked_through() -> None:
    sessions = [session(f"s{number:03}", parent=f"s{number - 1:03}" if number % 5 else None) for number in range(1_000)]
    async with watching(Scripted(status(sessions))) as (app, pilot):
        await pilot.press("end")
        await pilot.pause()
        assert app.model.selected == "s999"
        await pilot.press("pageup", "home")
        await pilot.pause()
        assert app.model.selected == "s000"
        assert "1,000 sessions" in screen(app)[2]


HOSTILE = [
    "[00] x",
    "[/",
    "[b",
    "[/bold]",
    "[red]red[/red] [link=file:///etc]",
    "\x1b[31m\x1b]0;title\x07",
    "a\nb\rc\td",
    "x" * 10_000,
    "שלום עולם",
    "\u202eevil\u202c\u2066",
    "zero\u200bwidth\ufeff",
    "wide 字字字字字字字字字字字字字字字字字字字",
    "👩‍👩‍👧‍👦 ❤️ 🇩🇪",
    "e" + "\u0301" * 50,
    "lone \ud800 surrogate",
    "\x9b31m c1",
    "",
]


async def test_hostile_labels_are_shown_literally_and_move_nothing() -> None:
    """B110: brackets, escapes, line ends, 10 kB, right-to-left and zero-width text, in every place a label shows."""
    sessions = [
        session(f"s{number}", label=label, namespace=label, doing=label or None) for number, label in enumerate(HOSTILE)
    ]
    events = [event(EventKind.FAILED, one.id, one.label) for one in sessions]
    async with watching(Scripted(status(sessions), events=events), size=(160, 30)) as (app, pilot):
        await app.listen()
        keys = ["1", "4"]
        for number in (1, 5, 7, 9, 12, 15):
            keys += [f"s{number}", "1", "enter", "d", "n", "l", "escape", "escape"]
        for key in keys:
            if key.startswith("s"):
                app.model.selected = key
            else:
                await pilot.press(key)
            for strip in app.screen._compositor.render_strips():
                assert strip.cell_length == 160
                assert strip.text.isprintable(), repr(strip.text)
        await pilot.press("1")
        await pilot.pause()
        text = "\n".join(screen(app))
        for shown in (
            "[00] x",
            "[/bold]",
            "[red]red[/red] [link=",
            "␛[31m␛]0;title␇",
            "a␊b␍c␉d",
            "xxx…",
            "\\u202eevil",
        ):
            assert shown in text


async def test_light_and_dark_differ_in_colours_only() -> None:
    async with watching(Scripted(), light=True) as (app, pilot):
        before = screen(app)
        light = app.export_screenshot()
        await pilot.press("m")
        await pilot.pause()
        assert app.theme == "textual-dark"
        assert screen(app) == before
        assert app.export_screenshot() != light


async def test_the_palette_offers_every_action_by_name() -> None:
    async with watching(Scripted()) as (app, pilot):
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {key.told for key in ALL if key.action.startswith(("act", "ask", "view"))} <= titles
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"memory budget")
        await done(app, pilot)
        await pilot.press("down", "enter")
        await done(app, pilot)
        assert app.model.view is View.BUDGET


async def test_nothing_is_drawn_again_when_nothing_changed() -> None:
    """No flicker: an equal status leaves every line alone."""
    async with watching(Scripted(status([session("a", doing="generate")]))) as (app, pilot):
        drawn: list[object] = []
        page = app.query_one("#page")
        page.refresh = lambda *regions, **options: drawn.append(regions) or page  # type: ignore[method-assign, func-returns-value]
        await app.poll()
        await pilot.pause()
        assert drawn == []


async def test_reasoning_is_folded_until_it_is_asked_for() -> None:
    async with watching(Scripted()) as (app, pilot):
        await pilot.press("enter")
        await done(app, pilot)
        assert "three errors" not in "\n".join(screen(app))
        await pilot.press("z")
        await pilot.pause()
        assert "thought  The log has three errors." in "\n".join(screen(app))


async def test_text_is_asked_for_only_while_its_session_is_open() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        for key in "1234":
            await pilot.press(key)
            await app.look()
        assert source.looked_into == []
        await pilot.press("1", "down", "enter")
        await done(app, pilot)
        assert source.looked_into == ["planner"]
        source.down = "gone"
        await app.look()
        assert "before the first timeout" in "\n".join(screen(app)), "what was known stays in sight"


async def test_another_sessions_text_is_never_shown_as_this_ones() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("enter")
        await done(app, pilot)
        await pilot.press("escape", "down")
        app.model.view = View.DETAIL
        app.redraw()
        await pilot.pause()
        assert "before the first timeout" not in "\n".join(screen(app))


async def test_hostile_text_of_a_session_is_shown_literally_and_moves_nothing() -> None:
    """B110, for what a session says."""
    source = Scripted()
    source.details = replace(DETAIL, passages=tuple(Passage(Voice.ANSWER, text) for text in HOSTILE))
    async with watching(source, size=(120, 60)) as (app, pilot):
        await pilot.press("enter")
        await done(app, pilot)
        text = "\n".join(screen(app))
        for strip in app.screen._compositor.render_strips():
            assert strip.cell_length == 120
            assert strip.text.isprintable(), repr(strip.text)
        assert "␛]0;title␇" in text or "\\u202eevil" in text


async def test_a_heat_map_of_nonsense_is_drawn_as_cold() -> None:
    wrong = replace(EXPERTS, layers=(LayerHeat(1, 0, 0, 0, "²x9" + "\x1b" * 200),))
    async with watching(Scripted(status(experts=wrong)), size=(80, 50)) as (app, pilot):
        await pilot.press("3")
        await pilot.pause()
        (row,) = (text for text in screen(app) if text.startswith("   1     —"))
        assert set(row.split()[-1]) <= set("·█")
