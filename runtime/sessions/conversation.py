"""A chat: messages on top of a session. What was read stays as token ids and is never rendered again."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any
from uuid import uuid4
from weakref import ref

import anyio.to_thread

from serai.runtime.chat import (
    NO_NOTES,
    ChatFormat,
    Cursor,
    Event,
    Message,
    Notes,
    PromptInvalid,
    PromptOptions,
    Reply,
    ReplyEnd,
    ReplyParser,
    Segment,
    collect,
    read_messages,
)
from serai.runtime.errors import SessionBusy
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sessions.contents import ENCODE_INLINE_CHARACTERS
from serai.runtime.sessions.generation import FinishReason, Generation
from serai.runtime.sessions.journal import Point
from serai.runtime.sessions.session import Session

CURSOR_KEY = "chat"
"""Under this key an append's node keeps where the conversation stood after it; what a reply adds is parsed again."""


LEAST_SHARED_TOKENS = 32
"""A system prompt and tool list of so many tokens is an append of its own, so that whoever has the same ones starts
from its end. Fewer are read again sooner than written down."""


REPLY_KEY = "reply"
"""Under this key it keeps what the reply's tool call ids are made from, so that they are the same after a resume."""


def call_ids(reply: str) -> Callable[[int], str]:
    """The ids of the tool calls of one reply, by index."""
    return lambda index: f"call_{reply}{index}"


class Chat:
    """A conversation over one session. Made by `Runtime.chat`, `Runtime.resume_chat` and `Chat.fork`."""

    def __init__(self, session: Session, chat_format: ChatFormat, cursor: Cursor) -> None:
        self.session = session
        self._format = chat_format
        self._cursor = cursor
        self._opening: tuple[Segment, ...] = ()
        # Weakly: a reply that nobody holds is over, begun or not.
        self._stream: Callable[[], ReplyStream | None] = lambda: None

    @classmethod
    def begin(
        cls, session: Session, chat_format: ChatFormat, options: PromptOptions, messages: Sequence[Message]
    ) -> "Chat":
        """A conversation over an empty session; its opening is read before the first message that is sent."""
        begun = chat_format.markup.begin(options)
        written = chat_format.markup.append(begun.cursor, messages)
        chat = cls(session, chat_format, written.cursor)
        chat._opening = begun.segments + written.segments
        return chat

    @classmethod
    def over(cls, session: Session, chat_format: ChatFormat) -> "Chat":
        """The conversation that a session holds already. Raises `PromptInvalid` when it holds none."""
        kept = session.append_metadata.get(CURSOR_KEY)
        if kept is None:
            raise PromptInvalid(
                f"session {session.id} was not filled by a chat, so it has no messages; go on with it as a session"
            )
        cursor = Cursor.from_json(kept)
        if cursor.reply is not None:
            parser = chat_format.parser(cursor, call_ids(session.append_metadata[REPLY_KEY]))
            for token in session.timeline.ids(session.timeline.turn.generation_start).tolist():
                parser.push(token)
            cursor = parser.cursor()
        return cls(session, chat_format, cursor)

    def send(
        self,
        message: str | Message | Mapping[str, Any] | Sequence[Message | Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        notes: Notes = NO_NOTES,
        thinking: bool | None = None,
    ) -> "ReplyStream":
        """Say something (text is a user's message; tool results are messages of role `tool`) and stream the reply.

        Iterate over what comes back for events, or `await` its `collect()`. Raises `PromptInvalid` at once for messages
        that can't be rendered, and `SessionBusy` while another reply is being read.
        """
        if self._under_way() is not None:
            raise SessionBusy(session_id=self.session.id, doing="a reply")
        if isinstance(message, str):
            messages: tuple[Message, ...] = (Message.user(message),)
        elif isinstance(message, Message | Mapping):
            messages = read_messages([message])
        else:
            messages = read_messages(message)
        written = self._format.markup.append(self._cursor, messages)
        prompt = self._format.markup.prompt(written.cursor, notes, thinking=thinking)
        segments = written.segments + prompt.segments
        stream = ReplyStream(self, segments, prompt.cursor, params or SamplingParams())
        self._stream = ref(stream)
        return stream

    def _under_way(self) -> "ReplyStream | None":
        stream = self._stream()
        return None if stream is None or stream.ended else stream

    async def fork(self, *, label: str | None = None) -> "Chat":
        """A second conversation from here on. A reply under way is not part of it beyond what was handed out."""
        return self._forked(await self.session.fork(label=label))

    async def fork_many(self, count: int) -> list["Chat"]:
        """`count` forks, as `fork`, or none."""
        return [self._forked(session) for session in await self.session.fork_many(count)]

    def _forked(self, session: Session) -> "Chat":
        """The conversation over a session that was forked just now."""
        stream = self._under_way()
        if stream is not None and not stream.begun and CURSOR_KEY in session.append_metadata:
            return Chat.over(session, self._format)  # it has the messages, or the opening, or neither
        child = Chat(session, self._format, self._cursor if stream is None else stream.cursor())
        child._opening = self._opening
        return child

    async def pause(self) -> Point:
        """As `Session.pause`; `Runtime.resume_chat` goes on from the point."""
        return await self.session.pause()

    async def close(self) -> None:
        await self.session.close()

    async def __aenter__(self) -> "Chat":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Chat over {self.session!r}>"


class ReplyStream:
    """One reply as it is written: an asynchronous iterator of events. Leaving it early keeps what was handed out."""

    def __init__(self, chat: Chat, segments: tuple[Segment, ...], prompted: Cursor, params: SamplingParams) -> None:
        self.ended = True  # until it is whole
        self._chat = chat
        self._segments = segments
        self._prompted = prompted
        self._params = replace(params, stop_token_ids=tuple({*params.stop_token_ids, *chat._format.stop_ids}))
        self._generation: Generation | None = None
        self._parser: ReplyParser | None = None
        self._events: deque[Event] = deque()
        self._seen: list[Event] = []
        self.ended = False

    @property
    def begun(self) -> bool:
        """Whether the messages have been read."""
        return self._parser is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the reply ended, once it has."""
        return None if self._generation is None else self._generation.finish_reason

    def cursor(self) -> Cursor:
        """Where the conversation stands after what has been handed out."""
        return self._chat._cursor if self._parser is None else self._parser.cursor()

    def __aiter__(self) -> "ReplyStream":
        return self

    async def __anext__(self) -> Event:
        try:
            while not self._events:
                if self.ended:
                    raise StopAsyncIteration
                await self._read_on()
        except Exception:
            self._settle()
            raise
        event = self._events.popleft()
        self._seen.append(event)
        return event

    def __del__(self) -> None:
        self._settle()  # its generation goes too, and lets go of the session

    async def aclose(self) -> None:
        """Stop here."""
        if self._generation is not None:
            await self._generation.aclose()
        self._settle()

    async def collect(self) -> Reply:
        """Read to the end and give the whole reply."""
        try:
            async for _ in self:
                pass
        finally:
            await self.aclose()
        return collect(self._seen)

    async def _read_on(self) -> None:
        """Read the messages if that is still to be done, else take the next token."""
        chat = self._chat
        if self._parser is None or self._generation is None:
            opening, ids = await self._encoded(chat._opening), await self._encoded(self._segments)
            if len(opening) >= LEAST_SHARED_TOKENS:
                await chat.session.append(opening, metadata={CURSOR_KEY: chat._cursor.to_json()})
                chat._opening, opening = (), []
            reply = uuid4().hex
            metadata = {CURSOR_KEY: self._prompted.to_json(), REPLY_KEY: reply}
            await chat.session.append(opening + ids, metadata=metadata)
            chat._opening = ()
            self._parser = chat._format.parser(self._prompted, call_ids(reply))
            self._generation = chat.session.generate(self._params)
            return
        token = await anext(self._generation)
        self._events.extend(self._parser.push(token.id))
        if token.finish_reason is not None:
            self._end()

    async def _encoded(self, segments: Sequence[Segment]) -> list[int]:
        if sum(len(segment.text) for segment in segments) <= ENCODE_INLINE_CHARACTERS:
            return self._chat._format.encode(segments)
        return await anyio.to_thread.run_sync(self._chat._format.encode, segments)

    def _end(self) -> None:
        if self._parser is not None and not any(isinstance(event, ReplyEnd) for event in self._events):
            self._events.extend(self._parser.finish())
        self._settle()

    def _settle(self) -> None:
        """The conversation goes on from what has been read."""
        if not self.ended:
            self.ended = True
            self._chat._cursor = self.cursor()
