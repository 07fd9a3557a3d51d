"""Two widgets that put lines of text on a terminal: fixed ones, and a page that scrolls and has a cursor.

Lines are drawn as segments of literal text, and only those that changed are drawn again.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.text import Line, Span, Tone, cut, printable

WHEEL_LINES = 3
_TONE_CLASSES = {tone: f"tone--{tone.value}" for tone in Tone}

TONES_CSS = """
    &>.tone--normal { color: $foreground; }
    &>.tone--dim { color: $foreground 70%; }
    &>.tone--strong { color: $foreground; text-style: bold; }
    &>.tone--head { color: $foreground; text-style: bold underline; }
    &>.tone--good { color: $text-success; }
    &>.tone--warn { color: $text-warning; text-style: bold; }
    &>.tone--bad { color: $text-error; text-style: bold; }
    &>.tone--graph { color: $text-accent; }
    &>.tone--trunk { background: #4e79a7; color: #ffffff; }
    &>.tone--scratch { background: #9c755f; color: #ffffff; }
    &>.tone--experts { background: #8f6bb0; color: #ffffff; }
    &>.tone--live { background: #3f8f3f; color: #ffffff; }
    &>.tone--kept { background: #b8860b; color: #ffffff; }
    &>.tone--spare { background: #5f6b6d; color: #ffffff; }
    &>.tone--free { background: $surface; color: $foreground; }
    &>.tone--cool { color: #4e79a7; }
    &>.tone--mild { color: #8f6bb0; }
    &>.tone--warm { color: #d97a3a; }
    &>.tone--hot { color: #d9a514; }
    &>.cursor { background: $primary 40%; }
"""


class Lines(Widget):
    """Fixed lines, made anew for the present width by `make` at each `redraw`."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {*_TONE_CLASSES.values(), "cursor"}
    DEFAULT_CSS = "Lines { height: 1; " + TONES_CSS + "}"

    def __init__(self, make: Callable[[int], Line], *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(id=id)
        self._make = make
        self._shown: list[tuple[Line, bool]] = []

    def redraw(self) -> None:
        """Show what `make` gives now."""
        self._show([(self._make(self.size.width), False)])

    def on_resize(self) -> None:
        self.redraw()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= len(self._shown):
            return Strip.blank(width, self.rich_style)
        spans, under_cursor = self._shown[y]
        over = Style(bgcolor=self.get_component_rich_style("cursor").bgcolor) if under_cursor else Style.null()
        segments = [
            Segment(span.text, self.get_component_rich_style(_TONE_CLASSES[span.tone]) + over)
            for span in cut(tuple(Span(printable(span.text), span.tone) for span in spans), width)
        ]
        return Strip(segments).adjust_cell_length(width, self.rich_style + over)

    def _show(self, lines: list[tuple[Line, bool]]) -> None:
        """Draw what differs from what is there."""
        before, self._shown = self._shown, lines
        changed = [y for y, new in enumerate(lines) if y >= len(before) or before[y] != new]
        changed.extend(range(len(lines), len(before)))
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))


class PageView(Lines, can_focus=True):
    """The page that `turn` was given the maker of. A page with keys has a cursor, which stays on its key when lines
    come, go or change places; without keys, moving scrolls."""

    DEFAULT_CSS = "PageView { height: 1fr; " + TONES_CSS + "}"

    class Opened(Message):
        """A line was clicked twice."""

    class Selected(Message):
        """The cursor may have gone to another key."""

    def __init__(self, *, id: str) -> None:  # noqa: A002 - Textual's name
        super().__init__(lambda width: (), id=id)
        self._make_page: Callable[[int], Page] = lambda width: page_of((), ())
        self._page = page_of((), ())
        self._top = 0
        self._at = 0
        self._follow = True

    @property
    def key(self) -> str | None:
        """The key under the cursor."""
        keys = self._page.keys
        return keys[self._at] if keys else None

    def turn(self, make: Callable[[int], Page]) -> None:
        """Show another page from its beginning, or its end if it follows that."""
        self._make_page = make
        self._top, self._follow = 0, True
        self.redraw()

    def redraw(self) -> None:
        held = self.key
        self._page = self._make_page(self.size.width)
        self._take(held)

    def select(self, key: str) -> None:
        """Put the cursor on a key, if the page has it."""
        self._take(key)

    def move(self, lines: int) -> None:
        """The cursor, or the page where there is none."""
        if self._page.keys:
            self._go(self._at + lines)
        else:
            self._scroll(self._top + lines)

    def move_to(self, index: int) -> None:
        """To a line; -1 is the last one."""
        where = self._page.count - 1 if index < 0 else index
        if self._page.keys:
            self._go(where)
        else:
            self._scroll(where)

    @property
    def body_lines(self) -> int:
        """How many lines of the body fit."""
        return max(self.size.height - len(self._page.head), 1)

    def on_click(self, event: events.Click) -> None:
        index = self._top + event.y - len(self._page.head)
        if self._page.keys and len(self._page.head) <= event.y and index < self._page.count:
            self._go(index)
            if event.chain == 2:
                self.post_message(self.Opened())

    def on_mouse_scroll_down(self) -> None:
        self._scroll(self._top + WHEEL_LINES)

    def on_mouse_scroll_up(self) -> None:
        self._scroll(self._top - WHEEL_LINES)

    def _take(self, key: str | None) -> None:
        """Find the cursor's line again, and draw."""
        keys: Sequence[str] = self._page.keys or ()
        if key is not None and key in keys:
            self._at = keys.index(key)
        self._go(self._at)

    def _go(self, index: int) -> None:
        self._at = min(max(index, 0), max(self._page.count - 1, 0))
        if self._page.keys:
            self._top = min(max(self._top, self._at - self.body_lines + 1), self._at)
        elif self._page.follows_end and self._follow:
            self._top = self._page.count
        self._draw()
        self.post_message(self.Selected())

    def _scroll(self, top: int) -> None:
        self._follow = top >= self._page.count - self.body_lines
        self._top = top
        self._draw()

    def _draw(self) -> None:
        page, height = self._page, self.size.height
        self._top = min(max(self._top, 0), max(page.count - self.body_lines, 0))
        lines: list[tuple[Line, bool]] = [(spans, False) for spans in page.head[:height]]
        for index in range(self._top, min(page.count, self._top + height - len(lines))):
            if page.keys:
                at = index == self._at
                lines.append(((Span("▶ " if at else "  "), *page.line_at(index)), at))
            else:
                lines.append((page.line_at(index), False))
        self._show(lines)
