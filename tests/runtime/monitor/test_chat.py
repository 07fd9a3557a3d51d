"""A chat in a fork: asked for with a key, streamed, stopped, and put away when it is left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from textual.pilot import Pilot

from serai.runtime.monitor.app import Monitor
from serai.runtime.monitor.chat_page import Conversation
from serai.runtime.monitor.chat_screen import ChatScreen
from serai.runtime.monitor.source import Action, ActionKind
from serai.runtime.monitor.transcript import Passage, Voice
from tests.runtime.monitor.scripted import Scripted, done, screen, watching

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def chatting(source: Scripted, *keys: str) -> AsyncIterator[tuple[Monitor, Pilot[None], ChatScreen]]:
    """A chat in a fork of the first session."""
    async with watching(source) as (app, pilot):
        await pilot.press(*keys, "a")
        await done(app, pilot)
        talk = app.screen
        assert isinstance(talk, ChatScreen)
        yield app, pilot, talk


async def settled(pilot: Pilot[None], talk: ChatScreen) -> None:
    """Wait for the reply, and draw it."""
    with anyio.fail_after(10):
        while talk.chat.is_replying:  # noqa: ASYNC110  # a worker tells nobody that it has ended
            await anyio.sleep(0.001)
    talk.redraw()
    await pilot.pause()


async def said(pilot: Pilot[None], talk: ChatScreen, text: str) -> None:
    await pilot.press(*text, "enter")
    await pilot.pause()
    await settled(pilot, talk)


async def test_a_chat_is_a_fork_that_shows_what_was_said_before_it() -> None:
    source = Scripted()
    async with chatting(source) as (app, _, _):
        assert source.actions == [Action(ActionKind.FORK, "reader", "reader, chat")]
        text = "\n".join(screen(app))
        assert "chat in a fork of reader" in text
        assert "What happened first?" in text
        assert text.index("before the first timeout") < text.index("forked here")


async def test_a_reply_streams_in_with_its_reasoning_folded() -> None:
    source = Scripted()
    async with chatting(source) as (app, pilot, talk):
        await said(pilot, talk, "why?")
        assert source.said == [("reader", "why?")]
        text = "\n".join(screen(app))
        assert "user  why?" in text
        assert "▸ 1 word" in text
        assert "answer  It is 42." in text
        await pilot.press("ctrl+t")
        await pilot.pause()
        assert "thought  hm" in "\n".join(screen(app))


async def test_escape_stops_the_reply_first_and_leaves_after() -> None:
    source = Scripted()
    source.silent_after = 2
    async with chatting(source) as (app, pilot, talk):
        await pilot.press(*"go", "enter")
        with anyio.fail_after(10):
            while len(talk.chat.said) < 3:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        await pilot.press("escape")
        await settled(pilot, talk)
        assert source.hung_up == 1
        assert "answer  It" in "\n".join(screen(app))
        assert "stopped" in screen(app)[-1]
        await pilot.press("escape")
        await done(app, pilot)
        assert source.actions[-1] == Action(ActionKind.PAUSE, "reader")
        assert not isinstance(app.screen, ChatScreen)
        assert "chat: pause done" in screen(app)[-1]


async def test_leaving_in_the_middle_of_a_reply_stops_and_pauses() -> None:
    source = Scripted()
    source.silent_after = 1
    async with chatting(source) as (app, pilot, talk):
        await pilot.press(*"go", "enter")
        await pilot.pause()
        await app.run_action("quit")
        assert talk.chat.is_replying is False
        assert source.actions[-1].kind is ActionKind.PAUSE
    assert source.hung_up == 1


async def test_a_fork_that_can_not_be_stored_is_said_to_stay() -> None:
    source = Scripted()
    async with chatting(source) as (app, pilot, _):
        source.refusal = "pausing needs a place to keep the state"
        await pilot.press("escape")
        await done(app, pilot)
        assert "the fork stays live: pausing needs a place" in screen(app)[-1]


async def test_what_the_session_refuses_is_said_and_can_be_tried_again() -> None:
    source = Scripted()
    async with chatting(source) as (app, pilot, talk):
        source.refusal = "session reader is busy"
        await said(pilot, talk, "hi")
        assert "session reader is busy" in screen(app)[-1]
        source.refusal = None
        await said(pilot, talk, "hi")
        assert "It is 42." in "\n".join(screen(app))


async def test_a_lost_connection_ends_the_reply_not_the_chat() -> None:
    source = Scripted()
    async with chatting(source) as (app, pilot, talk):
        source.down = "connection refused"
        await said(pilot, talk, "hi")
        assert "connection refused" in screen(app)[-1]
        source.down = None


async def test_nothing_is_sent_while_a_reply_comes_or_for_an_empty_line() -> None:
    source = Scripted()
    source.silent_after = 0
    async with chatting(source) as (_, pilot, talk):
        await pilot.press("enter", "space", "enter", "backspace", *"one", "enter", *"two", "enter")
        await pilot.pause()
        assert [text for _, text in source.said] == ["one"]
        await pilot.press("escape")
        await settled(pilot, talk)


async def test_a_refused_fork_opens_no_chat() -> None:
    source = Scripted(refusal="it wants a key")
    async with watching(source) as (app, pilot):
        await pilot.press("a")
        await done(app, pilot)
        assert not isinstance(app.screen, ChatScreen)
        assert "chat: it wants a key" in screen(app)[-1]


async def test_a_chat_can_start_at_a_node() -> None:
    source = Scripted()
    async with watching(source) as (app, pilot):
        await pilot.press("enter")
        await done(app, pilot)
        await pilot.press("n", "down", "down", "a")
        await done(app, pilot)
        assert source.actions == [Action(ActionKind.FORK, "reader", "reader, chat", position=20_400)]
        assert "before the first timeout" not in "\n".join(screen(app)), "what came after the node is not its past"


async def test_hostile_words_move_nothing_in_a_chat() -> None:
    source = Scripted()
    source.reply = [Passage(Voice.ANSWER, "\x1b[2J\x1b]0;x\x07[/bold] \u202e字" + "x" * 500)]
    async with chatting(source) as (app, pilot, talk):
        await said(pilot, talk, "hi")
        for strip in app.screen._compositor.render_strips():
            assert strip.cell_length == 80
            assert strip.text.isprintable(), repr(strip.text)
        for size in ((1, 1), (20, 5), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
        assert "[/bold]" in "\n".join(screen(app))


def test_pieces_of_one_voice_are_one_passage() -> None:
    chat = Conversation("a", "b")
    chat.asks("q")
    for piece in (Passage(Voice.REASONING, "a"), Passage(Voice.REASONING, "b"), Passage(Voice.ANSWER, "c")):
        chat.hears(piece)
    assert chat.said == [Passage(Voice.USER, "q"), Passage(Voice.REASONING, "ab"), Passage(Voice.ANSWER, "c")]
