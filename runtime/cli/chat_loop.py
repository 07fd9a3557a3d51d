"""The conversations of one `serai chat`: each line in, its answer out, until the end of input."""

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import typer

from serai.checkpoints.names import check_text
from serai.checkpoints.reports import SessionInfo
from serai.checkpoints.store import Store
from serai.runtime.cli.chat_commands import HELP, Command, Say, Verb, read_line
from serai.runtime.cli.chat_interrupts import ChatInterrupts
from serai.runtime.cli.reply_writer import ReplyWriter, printable
from serai.runtime.errors import SeraiError
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sessions.conversation import Chat, ReplyStream
from serai.runtime.sessions.generation import FinishReason

LABEL = "serai chat"

MOST_LISTED = 30
"""So many stored sessions `/sessions` shows, the latest."""

NextLine = Callable[[], Awaitable[str | None]]
"""Gives the next line of input, or None at its end."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What was asked for. `begin_thinking` is for new conversations, `thinking` for every answer; None leaves it to
    the model's family, and to the conversation. `command` gives what to type to go on with a session."""

    store: Path
    system: str | None
    begin_thinking: bool | None
    thinking: bool | None
    params: SamplingParams
    command: Callable[[str], str]


class ChatLoop:
    """Reads lines and acts on them. Answers go to stdout, everything else that is said to `note`."""

    def __init__(
        self,
        runtime: Runtime,
        options: ChatOptions,
        next_line: NextLine,
        interrupts: ChatInterrupts,
        note: Callable[[str], None],
    ) -> None:
        self.failed = False
        self._runtime = runtime
        self._options = options
        self._next_line = next_line
        self._interrupts = interrupts
        self._note = note
        self._open: dict[str, Chat] = {}
        self._chat: Chat | None = None

    async def run(self, resume: str | None) -> None:
        """From the first line to the end of input or `/quit`. Raises only what keeps the chat from beginning."""
        if resume is None:
            await self._begin()
        else:
            await self._resume(resume)
        while (line := await self._next_line()) is not None:
            self._interrupts.heard()
            try:
                asked = read_line(line)
                if isinstance(asked, Say):
                    await self._say(asked.text)
                elif asked is not None and asked.verb is Verb.QUIT:
                    return
                elif asked is not None:
                    await self._obey(asked)
            except SeraiError as error:
                self.failed = True
                self._note(f"serai: {printable(str(error))}")

    async def put_away(self) -> None:
        """Pause every open conversation in which something was said, the present one last, and tell the way back."""
        here = self._chat
        for chat in sorted(self._open.values(), key=lambda chat: chat is here):
            if chat.session.position:
                await self._pause(chat)

    async def _obey(self, command: Command) -> None:
        match command.verb:
            case Verb.FORK:
                await self._fork(command.argument)
            case Verb.PAUSE:
                if self._chat is None or not self._chat.session.position:
                    self._note("nothing has been said here yet, so there is nothing to pause")
                elif await self._pause(self._chat):
                    self._note("the next message begins a new conversation")
            case Verb.RESUME:
                await self._resume(command.argument)
            case Verb.SESSIONS:
                await self._list()
            case Verb.HELP | Verb.QUIT:
                typer.echo(HELP)

    async def _begin(self) -> Chat:
        options = self._options
        chat = await self._runtime.chat(system=options.system, thinking=options.begin_thinking, label=LABEL)
        self._enter(chat)
        return chat

    def _enter(self, chat: Chat) -> None:
        self._chat = self._open[chat.session.id] = chat

    async def _say(self, text: str) -> None:
        chat = self._chat or await self._begin()
        stream = chat.send(text, self._options.params, thinking=self._options.thinking)
        terminal = sys.stdout.isatty()
        dim = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        writer = ReplyWriter(lambda piece: typer.echo(piece, nl=False), terminal=terminal, dim=dim)
        with self._interrupts.answering() as answering:
            try:
                async for event in stream:
                    writer.take(event)
            finally:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
                writer.finish()
        self._comment(chat, stream, writer, stopped=answering.cancelled_caught)

    def _comment(self, chat: Chat, stream: ReplyStream, writer: ReplyWriter, *, stopped: bool) -> None:
        """Say what the text of an answer doesn't show."""
        config = self._runtime.facts.config
        if stopped and not stream.begun:
            self._note("stopped before the message was read; it is not part of the conversation")
        elif stopped:
            self._note("stopped; what was said stays. Ctrl-C again pauses and leaves")
        elif stream.finish_reason is FinishReason.LENGTH:
            if config is not None and chat.session.position >= config.max_positions:
                self._note(f"the model's context of {config.max_positions:,} tokens is full; begin a new conversation")
            else:
                self._note(f"cut after {self._options.params.max_tokens:,} tokens; --max-tokens allows more")
        if writer.faults:
            more = f" (and {len(writer.faults) - 1} more)" if len(writer.faults) > 1 else ""
            self._note(f"the answer's markup is not as it should be: {printable(writer.faults[0])}{more}")

    async def _fork(self, label: str) -> None:
        check_text(label, "label", may_be_empty=True)
        origin = self._chat or await self._begin()
        child = await origin.fork(label=label or None)
        self._enter(child)
        self._note(f"this is fork {child.session.id} now; go back with: /resume {origin.session.id}")

    async def _resume(self, name: str) -> None:
        chat = self._open.get(name)
        if chat is None:
            chat = await self._runtime.resume_chat(name)
        unused = self._chat
        self._enter(chat)
        if unused is not None and unused is not chat and not unused.session.position:
            del self._open[unused.session.id]
            await unused.close()
        self._note(f"this is {chat.session.id} now, at {chat.session.position:,} tokens")

    async def _pause(self, chat: Chat) -> bool:
        """Put a conversation away. If its state can't be stored, its tokens are all the same, so the way back holds."""
        session = chat.session
        try:
            point = await chat.pause()
        except SeraiError as error:
            self.failed = True
            self._note(f"serai: {printable(str(error))}")
            self._note(f"the tokens of {session.id} are kept; go on with: {self._options.command(session.id)}")
            return False
        self._note(f"paused {session.id} at {point.position:,} tokens, {point.written_bytes:,} bytes written")
        self._note(f"go on with: {self._options.command(session.id)}")
        del self._open[session.id]
        if chat is self._chat:
            self._chat = None
        return True

    async def _list(self) -> None:
        stored = await anyio.to_thread.run_sync(stored_sessions, self._options.store)
        closed = [one for one in stored if one.position and one.session_id not in self._open]
        if len(closed) > MOST_LISTED:
            typer.echo(f"  ({len(closed) - MOST_LISTED:,} older ones are not shown)")
        for one in closed[-MOST_LISTED:]:
            _row(" ", one.session_id, one.position, "put away", one.label)
        for chat in self._open.values():
            session = chat.session
            _row("*" if chat is self._chat else " ", session.id, session.position, "open", session.label)


def stored_sessions(folder: Path) -> list[SessionInfo]:
    """Every session of a store that this process, or another, has open; latest activity last."""
    with Store.open(str(folder), read_only=True) as store:
        return store.sessions()


def _row(mark: str, session_id: str, position: int, state: str, label: str) -> None:
    typer.echo(f"{mark} {session_id}  {position:>9,} tokens  {state:<8}  {printable(label)}".rstrip())
