"""A chat with a fork, on a screen of its own: the reply streams in, escape stops it, leaving pauses the fork."""

from collections.abc import Awaitable
from contextlib import aclosing
from typing import ClassVar

import anyio
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import Worker

from serai.runtime.monitor.chat_page import Conversation, chat_page
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused, Source, SourceUnreachable
from serai.runtime.monitor.text import Line, Span, Tone, fit, line
from serai.runtime.monitor.widgets import Lines, PageView

DRAWN_EVERY_S = 0.1
"""A fast model gives hundreds of pieces a second; nobody reads more than this."""


class ChatScreen(Screen[str]):
    """Its result says what became of the fork."""

    CSS = "ChatScreen { layout: vertical; } #say { padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop_or_leave", show=False),
        Binding("ctrl+t", "thoughts", show=False, priority=True),
        Binding("pageup", "scroll(-1)", show=False),
        Binding("pagedown", "scroll(1)", show=False),
    ]

    def __init__(self, source: Source, chat: Conversation) -> None:
        super().__init__()
        self._source = source
        self.chat = chat
        self._reply: Worker[None] | None = None
        self._left = False
        self._is_stale = False

    def compose(self) -> ComposeResult:
        yield Lines(self._title, id="chat-title")
        yield PageView(id="talk")
        yield Input(placeholder="say something; enter sends", id="say", compact=True)
        yield Lines(self._hints, id="chat-hints")

    def on_mount(self) -> None:
        self._talk.can_focus = False
        self._talk.turn(lambda width: chat_page(self.chat, width))
        self.query_one("#say", Input).focus()
        self.set_interval(DRAWN_EVERY_S, self._draw_if_stale)

    @property
    def _talk(self) -> PageView:
        return self.query_one("#talk", PageView)

    def redraw(self) -> None:
        """Show the chat as it is now."""
        self._is_stale = False
        for shown in self.query(Lines):
            shown.redraw()

    @on(Input.Submitted, "#say")
    def _sent(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        if text and not self.chat.is_replying:
            event.input.value = ""
            self.chat.asks(text)
            self._talk.move_to(-1)
            self._reply = self.run_worker(self._hear(text))
            self.redraw()

    def action_stop_or_leave(self) -> Awaitable[None] | None:
        if self._reply is not None and self.chat.is_replying:
            self._reply.cancel()
            return None
        return self.leave()

    def action_thoughts(self) -> None:
        self.chat.thoughts_shown = not self.chat.thoughts_shown
        self.redraw()

    def action_scroll(self, pages: int) -> None:
        self._talk.move(pages * self._talk.body_lines)

    async def leave(self) -> None:
        """Stop the reply, pause the fork and go; where nothing can be stored, the fork stays live."""
        if self._left:
            return
        self._left = True
        if self._reply is not None and self.chat.is_replying:
            self._reply.cancel()
            while self.chat.is_replying:  # noqa: ASYNC110  # a worker tells nobody that it has ended
                await anyio.sleep(0.01)
        try:
            told = (await self._source.act(Action(ActionKind.PAUSE, self.chat.session_id))).message
        except (ActionRefused, SourceUnreachable) as error:
            told = f"the fork stays live: {error}"
        self.dismiss(f"chat: {told}")

    async def _hear(self, text: str) -> None:
        """Say it, and take in the reply."""
        notice = "stopped; the fork keeps what was said"
        try:
            async with aclosing(self._source.say(self.chat.session_id, text)) as pieces:
                async for piece in pieces:
                    self.chat.hears(piece)
                    self._is_stale = True
            notice = ""
        except (ActionRefused, SourceUnreachable) as error:
            notice = str(error)
        finally:
            self.chat.ended(notice)
            self._is_stale = True

    def _draw_if_stale(self) -> None:
        if self._is_stale:
            self.redraw()

    def _title(self, width: int) -> Line:
        right = "● replying " if self.chat.is_replying else "○ listening "
        left = f" chat in a fork of {self.chat.label}"
        return line(
            Span(fit(left, max(width - len(right), 1)), Tone.STRONG),
            Span(right, Tone.GOOD if self.chat.is_replying else Tone.DIM),
        )

    def _hints(self, width: int) -> Line:
        if self.chat.notice:
            return line(Span(fit(f" {self.chat.notice}", width), Tone.STRONG))
        escape = "stop" if self.chat.is_replying else "leave, which pauses the fork"
        keys = (("enter", "send"), ("esc", escape), ("ctrl+t", "thoughts"), ("pgup pgdn", "scroll"))
        spans: list[Span] = []
        for key, does in keys:
            spans.extend((Span(f" {key}", Tone.STRONG), Span(f" {does} ", Tone.DIM)))
        return tuple(spans)
