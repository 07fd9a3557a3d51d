"""Talking to a live session from a monitor: words go in as its next message, the reply comes piece by piece."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from serai.runtime.chat import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
from serai.runtime.monitor.source import ActionRefused
from serai.runtime.monitor.transcript import Passage, Voice
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sessions.conversation import CURSOR_KEY

if TYPE_CHECKING:
    from serai.runtime.runtime import Runtime
    from serai.runtime.sessions.session import Session

MOST_TOKENS = 2_048
"""Enough for an answer that a person reads; saying "go on" continues it."""


async def say(runtime: "Runtime", session_id: str, text: str) -> AsyncGenerator[Passage, None]:
    """A session that a chat filled is sent a user's message; any other reads the text as it is and goes on from it.

    Closing the stream ends the reply; what was given out stays in the session. Raises `ActionRefused` for a session
    that is not live, or what the session's own call raises.
    """
    session = runtime.find(session_id)
    if session is None:
        raise ActionRefused(f"session {session_id} is not live, so nothing can be said to it")
    if not text:
        raise ActionRefused("there is nothing to say in an empty message")
    params = SamplingParams(max_tokens=MOST_TOKENS)
    if CURSOR_KEY in session.append_metadata:
        pieces = _chat(runtime, session, text, params)
    else:
        pieces = _continue(session, text, params)
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _chat(
    runtime: "Runtime", session: "Session", text: str, params: SamplingParams
) -> AsyncGenerator[Passage, None]:
    async with aclosing(runtime.chat_over(session).send(text, params)) as reply:
        async for event in reply:
            piece = _piece(event)
            if piece is not None:
                yield piece


def _piece(event: Event) -> Passage | None:
    match event:
        case ReasoningDelta(written):
            return Passage(Voice.REASONING, written)
        case ContentDelta(written):
            return Passage(Voice.ANSWER, written)
        case ToolCallBegin(name=name):
            return Passage(Voice.CALL, f"{name} ")
        case ToolArgumentsDelta(text=written):
            return Passage(Voice.CALL, written)
        case _:
            return None


async def _continue(session: "Session", text: str, params: SamplingParams) -> AsyncGenerator[Passage, None]:
    await session.append(text)
    async with session.generate(params) as generation:
        async for token in generation:
            if token.text:
                yield Passage(Voice.ANSWER, token.text)
