"""From what is asked to a reply about to be written: the place to go on from, the messages read in, the checks."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any
from uuid import uuid4

import anyio.to_thread
import numpy as np

from serai.checkpoints.names import new_id
from serai.runtime.chat import NO_NOTES, Cursor, Held, Message, Segment
from serai.runtime.sampling.grammar import Grammar, Grammars
from serai.runtime.server.ask import Ask, chain_after, chain_start, chains
from serai.runtime.server.errors import invalid
from serai.runtime.server.gate import Gates
from serai.runtime.server.held import compiled, held
from serai.runtime.server.places import Ending, Place, Tokens
from serai.runtime.server.sessions import Sessions
from serai.runtime.server.writing import Writer
from serai.runtime.sessions.contents import ENCODE_INLINE_CHARACTERS, Appended
from serai.runtime.sessions.conversation import CURSOR_KEY, LEAST_SHARED_TOKENS, REPLY_KEY, call_ids
from serai.runtime.sessions.deadline import met
from serai.runtime.sessions.session import Session

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as clients are told them. `cached` of the `prompt` tokens were not computed again."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What is to be read: the messages, then the beginning of the reply with and without the request's notes.

    The first `shared` tokens are tools and system messages, which other conversations have too; `opened` is where they
    end.
    """

    messages: Tokens
    shared: int
    opened: Cursor
    prompt: Tokens
    plain: Tokens
    after_messages: Cursor
    prompted: Cursor


class Asked:
    """Replies under way to one request, one `writers` entry a choice."""

    def __init__(
        self,
        ask: Ask,
        sessions: Sessions,
        chain: str,
        prompt: _Prompt,
        usage: Usage,
        place_id: str,
        grammar: Grammar | None,
    ) -> None:
        self.ask = ask
        self.place_ids = [place_id, *(new_id() for _ in range(1, ask.choices))]
        self.writers: list[Writer] = []
        self._sessions = sessions
        self._chain = chain
        self._prompt = prompt
        self._usage = usage
        self._grammar = grammar
        self._before: list[Session | None] = []
        self._kept: set[int] = set()

    @property
    def usage(self) -> Usage:
        """Counts so far, over all choices."""
        return replace(
            self._usage,
            output=sum(writer.output_tokens for writer in self.writers),
            reasoning=sum(writer.reasoning_tokens for writer in self.writers),
        )

    async def keep(
        self,
        choice: int = 0,
        *,
        document: Mapping[str, Any] | None = None,
        shown_input: Sequence[Mapping[str, Any]] = (),
        parked: bool = True,
    ) -> Place:
        """Make where a choice ended a place; durable when this returns, if the request is to be stored."""
        writer, before = self.writers[choice], self._before[choice]
        self._kept.add(choice)
        ending = None if before is None else Ending(self._prompt.plain, writer.ids())
        message = writer.reply.message

        def place_of(position: int) -> Place:
            return Place(
                id=self.place_ids[choice],
                namespace=self.ask.namespace,
                position=position,
                cursor=writer.parser.cursor(),
                setting=replace(self.ask.setting, tools=self.ask.tools),
                chain=chain_after(self._chain, message) if self._chain else "",
                previous=self.ask.previous,
                document=document,
                input=tuple(shown_input),
            )

        if before is not None:
            await self._sessions.end(writer.session, erase=not self.ask.store)
        return await self._sessions.keep(
            place_of,
            writer.session if before is None else before,
            ending=ending,
            store=self.ask.store,
            parked=parked,
        )

    async def end(self) -> None:
        """Free whatever was not kept."""
        for choice, writer in enumerate(self.writers):
            if choice not in self._kept:
                await self._sessions.end(writer.session, erase=not self.ask.store)
                before = self._before[choice]
                if before is not None:
                    await self._sessions.end(before, erase=not self.ask.store)

    def add(self, session: Session, before: Session | None, gates: Gates, reply: str) -> None:
        """Another choice, whose reply `session` will write."""
        form = self._sessions.format
        self._before.append(before)
        self.writers.append(
            Writer(
                session,
                form.parser(self._prompt.prompted, call_ids(reply)),
                self.ask.params,
                stops=self.ask.stops,
                stop_ids=form.stop_ids,
                special_ids=form.tokenizer.special_ids,
                gates=gates,
                grammar=self._grammar,
                priority=self.ask.priority,
                deadline=self.ask.deadline,
            )
        )


class Asking:
    """Turns requests into replies under way."""

    def __init__(self, sessions: Sessions, grammars: Grammars) -> None:
        self._sessions = sessions
        self._grammars = grammars

    @asynccontextmanager
    async def open(
        self,
        ask: Ask,
        gates: Gates,
        *,
        place_id: str | None = None,
        begun: Callable[[int], Awaitable[None]] | None = None,
    ) -> AsyncIterator[Asked]:
        """Read the messages in and give the replies to be written; whatever isn't kept is freed at the end.

        `place_id` is the id of the first reply's place. `begun` is told the number of prompt tokens once they are
        known, before they are computed. Raises before any work what can be known then: `PromptInvalid`, and errors
        about the context with its numbers.
        """
        sessions = self._sessions
        place, done, chain = await self._place_for(ask)
        ask = ask if place is None else replace(ask, previous=place.id)
        wanted = held(ask.choice, ask.notes, ask.tools)
        prompt = await self._render(ask, place, done)
        start = 0 if place is None else place.position
        length = start + len(prompt.messages) + len(prompt.prompt)
        ask = replace(ask, params=self._with_room(ask, length))
        grammar = None if wanted is None else await self._grammar(wanted, prompt.prompted, strict=ask.choice.strict)
        if begun is not None:
            await begun(length)
        async with AsyncExitStack() as stack:
            reply = uuid4().hex
            metadata = {CURSOR_KEY: prompt.prompted.to_json(), REPLY_KEY: reply}
            before = None
            with met(ask.deadline, "the request"):
                session, replayed = await self._session(ask, place)
                stack.push_async_callback(sessions.end, session, erase=not ask.store)
                reused = start - replayed
                messages_left = prompt.messages
                if prompt.shared >= LEAST_SHARED_TOKENS:
                    opened = {CURSOR_KEY: prompt.opened.to_json()}
                    reused += (await self._read(session, ask, prompt.messages[: prompt.shared], opened)).reused
                    messages_left = prompt.messages[prompt.shared :]
                ids = np.concatenate([messages_left, prompt.prompt])
                if len(prompt.plain) and ask.notes != NO_NOTES:
                    after = {CURSOR_KEY: prompt.after_messages.to_json()}
                    reused += (await self._read(session, ask, messages_left, after)).reused
                    if session.position:
                        before = await sessions.branch(session, None)
                        stack.push_async_callback(sessions.end, before, erase=not ask.store)
                    ids = prompt.prompt
                reused += (await self._read(session, ask, ids, metadata)).reused
            usage = Usage(prompt=length, cached=reused)
            asked = Asked(ask, sessions, chain, prompt, usage, place_id or new_id(), grammar)
            asked.add(session, before, gates, reply)
            stack.pop_all()  # from here on they are the replies'
            stack.push_async_callback(asked.end)
            for choice in range(1, ask.choices):
                async with AsyncExitStack() as refused:
                    one = await sessions.branch(session, choice)
                    refused.push_async_callback(sessions.end, one, erase=not ask.store)
                    first = None if before is None else await sessions.branch(before, choice)
                    refused.pop_all()
                asked.add(one, first, gates, f"{reply}x{choice}x")
            yield asked

    async def _read(self, session: Session, ask: Ask, ids: Tokens, metadata: Mapping[str, Any]) -> Appended:
        left_s = None if ask.deadline is None else max(ask.deadline.left_s, 0.0)
        return await session.append(ids, metadata=metadata, priority=ask.priority, deadline_s=left_s)

    async def _session(self, ask: Ask, place: Place | None) -> tuple[Session, int]:
        if place is None:
            return await self._sessions.begin(ask.namespace, ask.label), 0
        return await self._sessions.go_on(place)

    async def count(self, ask: Ask) -> int:
        """How many tokens the request has before its reply."""
        place, done, _ = await self._place_for(ask)
        prompt = await self._render(ask, place, done)
        return (0 if place is None else place.position) + len(prompt.messages) + len(prompt.prompt)

    async def _place_for(self, ask: Ask) -> tuple[Place | None, int, str]:
        """The place to go on from, how many of the messages it holds already, and the hash after all of them."""
        sessions = self._sessions
        if ask.previous is not None:
            place = await sessions.place(ask.previous, ask.namespace)
            after = chains(place.chain, ask.messages) if place.chain else []
            return place, 0, next((one for one in reversed(after) if one), place.chain)
        start = chain_start(ask.setting)
        after = await _off_loop(chains, start, ask.messages)
        last = after[-1] if after else start
        found = sessions.catalogue.deepest(ask.namespace, after[:-1]) if ask.matched else None
        if found is None:
            return None, 0, last
        return await sessions.place(found[0], ask.namespace), found[1], last

    async def _render(self, ask: Ask, place: Place | None, done: int) -> _Prompt:
        """The messages after the first `done`, which the place holds."""
        form, messages = self._sessions.format, ask.messages[done:]

        def work() -> _Prompt:
            markup = form.markup
            opening: tuple[Segment, ...] = ()
            system: Sequence[Message] = ()
            if place is None:
                system = tuple(takewhile(lambda message: message.role == "system", messages))
                setting = ask.setting
                options = markup.options(tools=setting.tools, thinking=setting.thinking, thinking_effort=setting.effort)
                begun = markup.begin(options)
                opening, cursor = begun.segments, begun.cursor
            else:
                cursor = place.cursor
            opened = markup.append(cursor, system)
            body = markup.append(cursor, messages)
            # Each segment is encoded on its own, so as many segments alike are as many tokens alike.
            alike = place is None and body.segments[: len(opened.segments)] == opened.segments
            thinking = ask.setting.thinking
            noted = markup.prompt(body.cursor, ask.notes, thinking=thinking)
            plain = noted if ask.notes == NO_NOTES else markup.prompt(body.cursor, thinking=thinking)
            written, prompt, without = (
                np.array(form.encode(part), np.int32)
                for part in (opening + body.segments, noted.segments, plain.segments)
            )
            shared = len(form.encode(opening + opened.segments)) if alike else 0
            return _Prompt(written, shared, opened.cursor, prompt, without, body.cursor, noted.cursor)

        size = sum(len(message.text) for message in messages) + 500 * len(ask.setting.tools)
        with ask.naming(done):
            return work() if size <= ENCODE_INLINE_CHARACTERS else await anyio.to_thread.run_sync(work)

    async def _grammar(self, wanted: Held, prompted: Cursor, *, strict: bool) -> Grammar:
        work = partial(compiled, self._grammars, self._sessions.format, prompted, wanted, strict=strict)
        return await anyio.to_thread.run_sync(work)

    def _with_room(self, ask: Ask, length: int) -> Any:
        """Sampling with a `max_tokens` that fits the context, or an error with the numbers."""
        limit = self._sessions.max_positions
        room = limit - length
        if room < 1:
            raise invalid(
                "messages",
                f"the prompt has {length:,} tokens and the model's context ends at {limit:,}, which leaves none to "
                "answer with; send less",
                "context_length_exceeded",
            )
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise invalid(
                "max_tokens",
                f"{length:,} tokens of prompt and {ask.max_tokens:,} to generate are more than the model's context of "
                f"{limit:,}; at most {room:,} can be generated here",
                "context_length_exceeded",
            )
        wanted = room if ask.max_tokens is None else ask.max_tokens
        return replace(ask.params, max_tokens=wanted, min_tokens=min(ask.params.min_tokens, wanted))


async def _off_loop(
    function: Callable[[str, Sequence[Message]], list[str]], start: str, given: Sequence[Message]
) -> Any:
    size = sum(len(message.text) for message in given)
    if size <= 20 * ENCODE_INLINE_CHARACTERS:
        return function(start, given)
    return await anyio.to_thread.run_sync(function, start, given)
