"""The monitor on another program's terminal: where its logs go, and what is left behind."""

import logging
from functools import partial

import anyio
import pytest

from serai.runtime.monitor import embedded
from serai.runtime.monitor.app import Monitor
from serai.runtime.monitor.embedded import LogEntries, Screen, logging_to
from serai.runtime.monitor.model import Model, View
from tests.runtime.monitor.scripted import Scripted

pytestmark = pytest.mark.anyio


def test_logs_go_to_the_monitor_and_back_to_where_they_went() -> None:
    model, before = Model("here"), logging.getLogger().handlers[:]
    with logging_to(LogEntries(model, lambda: "12:00:00")):
        logging.getLogger("serai.test").warning("%s full", "disk")
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("serai.test").exception("failed")
    assert logging.getLogger().handlers == before
    first, second = model.log
    assert (first.time, first.what, first.detail) == ("12:00:00", "warning", "serai.test: disk full")
    assert second.what == "error"
    assert "ValueError: why" in second.detail


@pytest.fixture
def headless(monkeypatch: pytest.MonkeyPatch) -> list[Monitor]:
    """Monitors are run without a terminal; gives those that were."""
    shown: list[Monitor] = []
    run = Monitor.run_async

    async def run_async(app: Monitor) -> None:
        shown.append(app)
        await partial(run, headless=True)(app)

    monkeypatch.setattr(Monitor, "run_async", run_async)
    monkeypatch.setattr(embedded, "watch_for_hangup", lambda on_gone: None)
    return shown


async def test_leaving_the_screen_is_told_and_ends_nothing_else(headless: list[Monitor]) -> None:
    screen, source = Screen(), Scripted()
    told: list[str] = []
    show = partial(screen.show, source, session_id="planner", notice="hi")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(show, left=lambda: told.append("left")))
        with anyio.fail_after(10):
            while not (headless and headless[0].model.status):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            assert screen.is_shown
            assert (headless[0].model.view, headless[0].model.selected) == (View.DETAIL, "planner")
            assert headless[0].model.notice == "hi"
            await headless[0].run_action("quit")
            while not told:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        assert told == ["left"]
        await screen.end()
    assert source.closed


async def test_ending_takes_the_screen_away_and_keeps_it_away(headless: list[Monitor]) -> None:
    screen = Screen()
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(screen.show, Scripted(), left=lambda: told.append("left")))
        with anyio.fail_after(10):
            while not (headless and headless[0].is_running):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            await screen.end()
        assert not screen.is_shown
        await screen.show(Scripted(), left=lambda: told.append("left"))
    assert told == []
    assert len(headless) == 1
