"""Responses under way: their events, their state, and the request fitted to its conversation."""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskStatus

from serai.checkpoints.names import new_id
from serai.runtime.chat import Message
from serai.runtime.server.ask import Ask, Setting
from serai.runtime.server.asking import Asked, Usage
from serai.runtime.server.chat_output import logprob_json
from serai.runtime.server.errors import ApiError, invalid
from serai.runtime.server.event_log import EventLog
from serai.runtime.server.gate import Gate, Gates
from serai.runtime.server.responses_output import ResponseDocument, Told
from serai.runtime.server.responses_request import ResponsesRequest
from serai.runtime.server.streams import tell
from serai.runtime.server.wire import line_of
from serai.runtime.server.writing import Finish, Piece

if TYPE_CHECKING:
    from serai.runtime.server.service import Service, Work

KEPT_RUNS = 256
"""Responses whose events are kept for whoever attaches after their end."""

KEPT_LOG_BYTES = 32 << 20
"""And how much those events may take together."""

LAST_WORDS_S = 1.0
"""How long a cancelled response waits for its client to take the last event."""


class Run:
    """One response under way, or lately ended."""

    def __init__(self, request: ResponsesRequest, place_id: str, document: ResponseDocument) -> None:
        self.request = request
        self.place_id = place_id
        self.document = document
        self.log = EventLog()
        self.gate = Gate()
        self.work: Work | None = None
        self.cancelled = False
        self.ended = anyio.Event()
        self.ended_s = math.inf
        self.hear: Callable[[Told, bytes], Awaitable[None]] | None = None
        self.failure: ApiError | None = None
        self.session_id: str | None = None

    async def tell(self, told: list[Told]) -> None:
        for one in told:
            line = line_of(one["type"], one)
            self.log.add(line)
            if self.hear is not None:
                await self.hear(one, line)

    async def last_words(self, told: list[Told]) -> None:
        """Tell a client that may have left."""
        lines = [line_of(one["type"], one) for one in told]
        for line in lines:
            self.log.add(line)
        if self.hear is not None:
            with anyio.move_on_after(LAST_WORDS_S), suppress(anyio.BrokenResourceError):
                for one, line in zip(told, lines, strict=True):
                    await self.hear(one, line)

    async def cancel(self) -> None:
        """End it where it is, if it has not ended, and wait until all it held is free."""
        if not self.ended.is_set():
            self.cancel_nowait()
            await self.ended.wait()

    def cancel_nowait(self) -> None:
        """As `cancel`, without waiting."""
        self.cancelled = True
        self.gate.open()
        if self.work is not None:
            self.work.scope.cancel()

    def end(self) -> None:
        self.ended_s = anyio.current_time()
        self.log.end()
        self.ended.set()


class Runs:
    """The runs of one service by place id; ended ones make room for newer ones."""

    def __init__(self, service: "Service") -> None:
        self._service = service
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def add(self, run: Run) -> None:
        self._runs[run.place_id] = run
        held_bytes = sum(one.log.held_bytes for one in self._runs.values())
        for place_id in [id_ for id_, one in self._runs.items() if one.ended.is_set()]:
            if len(self._runs) <= KEPT_RUNS and held_bytes <= KEPT_LOG_BYTES:
                break
            held_bytes -= self._runs.pop(place_id).log.held_bytes

    def tidy(self, now_s: float) -> None:
        """Forget those that were not to be stored, once nobody can go on from them."""
        ttl_s = self._service.options.unstored_ttl_s
        for place_id, run in list(self._runs.items()):
            if not run.request.ask.store and now_s - run.ended_s >= ttl_s:
                del self._runs[place_id]

    def remove(self, place_id: str) -> None:
        self._runs.pop(place_id, None)

    def get(self, place_id: str, namespace: str) -> Run | None:
        run = self._runs.get(place_id)
        return run if run is not None and run.request.ask.namespace == namespace else None

    def cancel_session(self, session_id: str) -> bool:
        """End the response that a session is writing; whether there was one."""
        for run in self._runs.values():
            if run.session_id == session_id and not run.ended.is_set():
                run.cancel_nowait()
                return True
        return False

    async def prepare(self, request: ResponsesRequest) -> Run:
        """A run for a request, which is fitted to what its conversation has been told before."""
        request = await fitted(self._service, request)
        place_id = new_id()
        document = ResponseDocument(
            request,
            place_id=place_id,
            model=request.model or self._service.runtime.facts.name,
            created_at=int(time.time()),
            open_responses_names=self._service.options.open_responses_names,
        )
        return Run(request, place_id, document)

    async def execute(self, run: Run, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Write the response. Errors before it has begun are raised; later ones end it as failed."""
        service, begun, began_s = self._service, False, anyio.current_time()

        async def begin(_: int) -> None:
            nonlocal begun
            begun = True
            self.add(run)
            await run.tell(run.document.queued() if run.request.background else run.document.begin())
            task_status.started()

        try:
            async with service.work(run.request.ask.namespace) as work:
                run.work = work
                gates = Gates(service.engine_gate, run.gate)
                async with service.asking.open(run.request.ask, gates, place_id=run.place_id, begun=begin) as asked:
                    await self._write(run, asked, began_s)
                    service.metrics.count(asked.usage)
            if run.document.status == "in_progress":  # cancelled before anything was written
                await run.last_words(run.document.finish("cancelled", Usage(), completed_at=None))
        except Exception as error:  # whatever it is, the response ends with it
            if not begun:
                raise
            run.failure = told = tell(error)
            if run.document.status == "in_progress":
                failure = {"code": told.code or "server_error", "message": told.message}
                await run.last_words(run.document.finish("failed", Usage(), completed_at=None, error=failure))
        finally:
            run.end()

    async def _write(self, run: Run, asked: Asked, began_s: float) -> None:
        writer = asked.writers[0]
        run.session_id = writer.session.id
        try:
            async with aclosing(writer.pieces()) as pieces:
                async for piece in pieces:
                    if writer.output_tokens == 1:
                        self._service.metrics.first_s.observe(anyio.current_time() - began_s)
                    await self._tell_piece(run, piece)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                told = run.document.finish("cancelled", asked.usage, completed_at=None)
                if writer.output_tokens:
                    await self._keep(run, asked, parked=run.cancelled)
                await run.last_words(told)
            raise
        status, incomplete = "completed", None
        if writer.finish is Finish.LENGTH:
            status = "incomplete"
            incomplete = "max_output_tokens" if writer.cut_by is None else f"serai:{writer.cut_by.value}"
        told = run.document.finish(status, asked.usage, completed_at=int(time.time()), incomplete=incomplete)
        await run.tell(told[:-1])
        await self._keep(run, asked, parked=True)
        await run.tell(told[-1:])

    async def _tell_piece(self, run: Run, piece: Piece) -> None:
        tokenizer = self._service.runtime.tokenizer
        logprobs = []
        if run.request.logprobs and tokenizer is not None:
            logprobs = [logprob_json(token, tokenizer) for token in piece.tokens]
        for event in piece.events:
            await run.tell(run.document.take(event, logprobs))
            logprobs = []

    async def _keep(self, run: Run, asked: Asked, *, parked: bool) -> None:
        await asked.keep(0, document=run.document.document(), shown_input=run.request.input, parked=parked)


async def fitted(service: "Service", request: ResponsesRequest) -> ResponsesRequest:
    """The request with instructions and tools as messages, as far as the conversation doesn't know them yet.

    Nothing that was read is ever taken back: new instructions and further tools are read where they come, tools left
    out stay known, and the effort, which stands before all messages, can't be changed.
    """
    ask, instructions = request.ask, request.instructions
    told = () if instructions is None else (Message.system(instructions),)
    if ask.previous is None:
        if not told and not ask.messages:
            raise invalid("input", "input is required, a string or a list of items")
        setting = replace(ask.setting, instructions=instructions)
        return replace(request, ask=_after(ask, setting, instructions=told))
    place = await service.sessions.place(ask.previous, ask.namespace)
    before, setting = place.setting, ask.setting
    if setting.effort is not None:
        begun = service.sessions.format.markup.options(thinking=before.thinking, thinking_effort=before.effort)
        if setting.effort != begun.thinking_effort:
            raise invalid(
                "reasoning.effort",
                f"this conversation was begun with effort {begun.thinking_effort!r}, which stands before its first "
                "message and can't be changed; leave it out, or begin a new one",
            )
    known = [json.dumps(tool, sort_keys=True) for tool in before.tools]
    further = tuple(tool for tool in setting.tools if json.dumps(tool, sort_keys=True) not in known)
    declared = (Message("system", tools=further),) if further else ()
    new = () if instructions in (None, before.instructions) else told
    kept = Setting(
        tools=before.tools + further,
        thinking=before.thinking if setting.thinking is None else setting.thinking,
        effort=before.effort,
        instructions=before.instructions if instructions is None else instructions,
    )
    return replace(request, ask=_after(ask, kept, tools=declared, instructions=new))


def _after(ask: Ask, setting: Setting, **before: tuple[Message, ...]) -> Ask:
    """What is asked, with messages before that the client gave elsewhere in its request."""
    messages = tuple(message for given in before.values() for message in given)
    origins = tuple(name for name, given in before.items() for _ in given)
    return replace(ask, messages=messages + ask.messages, origins=origins + ask.origins, setting=setting)
