"""Looking at a runtime from a terminal: what arrives changes the model, the model becomes pages, keys choose which."""

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import datetime
from typing import ClassVar

import anyio
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.widgets import Input

from serai.runtime.monitor import keys
from serai.runtime.monitor.budget_page import budget_page
from serai.runtime.monitor.detail_page import detail_page
from serai.runtime.monitor.experts_page import experts_page
from serai.runtime.monitor.frame import help_page, hints_line, tab_at, tabs_line, title_line
from serai.runtime.monitor.log_page import log_page
from serai.runtime.monitor.model import INNER, LogEntry, Model, View
from serai.runtime.monitor.nodes_page import nodes_page
from serai.runtime.monitor.page import Page
from serai.runtime.monitor.sessions_page import sessions_page
from serai.runtime.monitor.source import Source, SourceUnreachable
from serai.runtime.monitor.tree import Order, Showing
from serai.runtime.monitor.widgets import Lines, PageView

LONGEST_RETRY_S = 8.0
LOOK_EVERY_S = 0.4
"""How often an open session's text is asked for: often enough to be read as it grows."""


def wall_clock() -> str:
    """The time of day here, for the log."""
    return datetime.now().astimezone().strftime("%H:%M:%S")


class Watcher(App[None]):
    """Watches `source`, asking for its status every `every_s` seconds; None leaves asking to the caller of `poll`.

    `interrupted` is what Ctrl-C does where this program is not the monitor's own; without it, it leaves the monitor.
    `opened` is the id of a session to begin with.
    """

    TITLE = "serai monitor"
    CSS = "Screen { layout: vertical; } #search { padding: 0 1; display: none; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, key.told, show=False) for key in keys.ALL),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(
        self,
        source: Source,
        *,
        every_s: float | None = 1.0,
        light: bool = False,
        interrupted: Callable[[], None] | None = None,
        opened: str | None = None,
        clock: Callable[[], str] = wall_clock,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.animation_level = "none"
        self.theme = "textual-light" if light else "textual-dark"
        self.model = Model(source.name)
        self._source = source
        self._every_s = every_s
        self._interrupted = interrupted
        if opened is not None:
            self.model.selected, self.model.view = opened, View.DETAIL
        self._clock = clock
        self._monotonic = monotonic
        self._lost_at_s: float | None = None
        self._failures = 0
        self._answered = anyio.Event()

    def compose(self) -> ComposeResult:
        yield Lines(lambda width: title_line(self.model, width), id="title")
        yield Lines(lambda width: tabs_line(self.model), id="tabs")
        yield PageView(id="page")
        told = "search labels, namespaces and ids; enter keeps, esc clears"
        yield Input(placeholder=told, id="search", compact=True)
        yield Lines(lambda width: hints_line(self.model, width), id="hints")

    def on_mount(self) -> None:
        self._page.turn(self._make)
        self._page.focus()
        if self._every_s is not None:
            if self._interrupted is None:
                # Being told to end is no reason to leave the terminal in disorder.
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
            self.run_worker(self._poll_always())
            self.run_worker(self._listen_always(self._every_s))
            self.run_worker(self._look_always())

    async def on_unmount(self) -> None:
        await self._source.close()

    @property
    def _page(self) -> PageView:
        return self.screen_stack[0].query_one("#page", PageView)

    def _make(self, width: int) -> Page:
        # A page with a cursor has two columns for it.
        match self.model.view:
            case View.SESSIONS:
                return sessions_page(self.model, width)
            case View.BUDGET:
                return budget_page(self.model, width)
            case View.EXPERTS:
                return experts_page(self.model, width)
            case View.LOG:
                return log_page(self.model, width)
            case View.DETAIL:
                return detail_page(self.model, width, self._page.size.height)
            case View.NODES:
                return nodes_page(self.model, width)
            case View.HELP:
                return help_page()

    def redraw(self) -> None:
        """Show the model as it is now."""
        for shown in self.screen_stack[0].query(Lines):
            shown.redraw()

    # What arrives.

    async def poll(self) -> float:
        """Ask for the status once; how many seconds to wait before the next time."""
        every_s = self._every_s or 1.0
        try:
            status = await self._source.status()
            if not self.model.connection.is_live:
                self.model.about = await self._source.about()
        except SourceUnreachable as error:
            now_s = self._monotonic()
            if self._lost_at_s is None:
                self._lost_at_s = now_s
            wait_s = min(every_s * 2.0**self._failures, LONGEST_RETRY_S)
            self._failures = min(self._failures + 1, 10)
            lost_s = max(now_s - self._lost_at_s, 0.0)
            self.model.lost(str(error), lost_s=lost_s, retry_s=wait_s, time=self._clock())
        else:
            self._lost_at_s, self._failures = None, 0
            self.model.saw(status, self._clock())
            self._answered.set()
            wait_s = every_s
        self.redraw()
        return wait_s

    async def look(self) -> None:
        """Ask what the open session says, if one is open."""
        selected = self.model.selected
        if self.model.view not in (View.DETAIL, View.NODES) or selected is None or not self.model.about.may_act:
            return
        try:
            self.model.looked_into(await self._source.detail(selected))
        except SourceUnreachable:
            return  # the next poll says so
        self.redraw()

    async def listen(self) -> bool:
        """Log events until the connection ends; False when there will never be any."""
        try:
            async with aclosing(self._source.events()) as events:
                async for event in events:
                    self.model.happened(event, self._clock())
        except SourceUnreachable:
            return True  # the next poll finds out, and says so
        self.model.log.append(LogEntry(self._clock(), "no events", detail="this server tells none; only figures"))
        return False

    async def _poll_always(self) -> None:
        while True:
            wait_s = await self.poll()
            await anyio.sleep(wait_s)

    async def _look_always(self) -> None:
        while True:
            await anyio.sleep(LOOK_EVERY_S)
            await self.look()

    async def _listen_always(self, every_s: float) -> None:
        while True:
            await self._answered.wait()
            if not await self.listen():
                return
            self._answered = anyio.Event()
            await anyio.sleep(every_s)

    # Views and moving.

    def action_view(self, name: str) -> None:
        self._turn(View(name))

    def action_open(self) -> None:
        if self.model.view is View.SESSIONS and self.model.selected is not None:
            self._turn(View.DETAIL)

    def action_nodes(self) -> None:
        if self.model.view in (View.SESSIONS, View.DETAIL) and self.model.selected is not None:
            self._turn(View.NODES)

    def action_thoughts(self) -> None:
        self.model.thoughts_shown = not self.model.thoughts_shown
        self.redraw()

    async def action_back(self) -> None:
        model = self.model
        if model.view is View.NODES:
            self._turn(View.DETAIL)
        elif model.view in INNER:
            self._turn(model.came_from)
        elif model.view is View.SESSIONS:
            model.query, model.showing, model.notice = "", Showing.ALL, ""
            self._search.value = ""
            self._search.display = False
            self.redraw()

    def action_move(self, lines: int) -> None:
        self._page.move(lines)

    def action_move_pages(self, pages: int) -> None:
        self._page.move(pages * self._page.body_lines)

    def action_move_to(self, index: int) -> None:
        self._page.move_to(index)

    @on(PageView.Selected)
    def _selected(self) -> None:
        if self.model.view is View.SESSIONS and self._page.key is not None:
            self.model.selected = self._page.key
        elif self.model.view is View.NODES:
            self.model.node = self._page.key

    @on(PageView.Opened)
    def _opened(self) -> None:
        self.action_open()

    @on(Click, "#tabs")
    def _tab_clicked(self, event: Click) -> None:
        view = tab_at(self.model, event.x)
        if view is not None:
            self._turn(view)

    def _turn(self, view: View) -> None:
        model = self.model
        if view is View.EXPERTS and (model.status is None or model.status.experts is None):
            model.tell("this model's experts are all in memory, or it has none")
        else:
            if model.view not in INNER:
                model.came_from = model.view
            elif view not in INNER:
                model.came_from = view
            model.view = view
            model.notice = ""
            self._page.turn(self._make)
            if view is View.SESSIONS and model.selected is not None:
                self._page.select(model.selected)
            if view in (View.DETAIL, View.NODES):
                self.run_worker(self.look(), exclusive=True, group="look")
        self.redraw()

    # The list.

    @property
    def _search(self) -> Input:
        return self.screen_stack[0].query_one("#search", Input)

    def action_search(self) -> None:
        if self.model.view is not View.SESSIONS:
            self._turn(View.SESSIONS)
        self._search.display = True
        self._search.focus()

    @on(Input.Changed, "#search")
    def _searched(self, event: Input.Changed) -> None:
        self.model.query = event.value
        self.redraw()

    @on(Input.Submitted, "#search")
    def _search_kept(self) -> None:
        self._search.display = False
        self._page.focus()

    def action_order(self) -> None:
        orders = list(Order)
        self.model.order = orders[(orders.index(self.model.order) + 1) % len(orders)]
        self.redraw()

    def action_reverse(self) -> None:
        self.model.reverse = not self.model.reverse
        self.redraw()

    def action_showing(self) -> None:
        kinds = list(Showing)
        self.model.showing = kinds[(kinds.index(self.model.showing) + 1) % len(kinds)]
        self.redraw()

    def action_fold(self) -> None:
        if self.model.selected is not None:
            self.model.folded ^= {self.model.selected}
            self.redraw()

    def action_interrupt(self) -> None:
        """Ctrl-C: the program's own meaning of it where there is one."""
        if self._interrupted is None:
            self.call_later(self.run_action, "quit")
        else:
            self._interrupted()

    def action_light_or_dark(self) -> None:
        self.theme = "textual-dark" if self.theme == "textual-light" else "textual-light"
