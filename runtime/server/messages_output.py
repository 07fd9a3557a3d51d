"""Saying a reply in the words of Anthropic's Messages API, whole or as a stream of content blocks."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio

from serai.runtime.chat import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin, ToolCallEnd
from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.chat.messages import ToolCall
from serai.runtime.server.asking import Asked, Usage
from serai.runtime.server.gate import Gates
from serai.runtime.server.messages_request import UNPARSED, MessagesRequest
from serai.runtime.server.streams import Emit
from serai.runtime.server.writing import Finish, Writer

if TYPE_CHECKING:
    from serai.runtime.server.service import Service

STOP_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.TOOL_CALLS: "tool_use"}


class MessageAnswer:
    """One reply on its way."""

    def __init__(self, service: "Service", request: MessagesRequest) -> None:
        self._service = service
        self._request = request
        self._began_s = anyio.current_time()

    async def whole(self) -> Mapping[str, Any]:
        """The reply as one message."""
        return await self._run(None)

    async def stream(self, emit: Emit) -> None:
        """The reply as events."""
        await self._run(emit)

    async def _run(self, emit: Emit | None) -> Mapping[str, Any]:
        service, ask = self._service, self._request.ask
        async with service.work(ask.namespace), service.asking.open(ask, Gates(service.engine_gate)) as asked:
            (writer,) = asked.writers
            told = None if emit is None else _Told(emit)
            if told is not None:
                await told.begin(self._message(asked))
            async with aclosing(writer.pieces()) as pieces:
                async for piece in pieces:
                    if writer.output_tokens == 1:
                        service.metrics.first_s.observe(anyio.current_time() - self._began_s)
                    if told is not None:
                        for event in piece.events:
                            await told.tell(event)
            await asked.keep()
            service.metrics.count(asked.usage)
            if told is not None:
                await told.end(_ending(writer), asked.usage)
            return {**self._message(asked), "content": content_json(writer), **_ending(writer)}
        raise AssertionError("a request that was ended raises")

    def _message(self, asked: Asked) -> dict[str, Any]:
        return {
            "id": f"msg_{asked.place_ids[0]}",
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "usage": usage_json(asked.usage),
        }


class _Told:
    """A message told as events: one content block is open at a time, and each has an index."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._index = -1
        self._open = ""
        self._beside: list[str] = []  # what was said within a call, told after it

    async def begin(self, message: Mapping[str, Any]) -> None:
        """The message before there is anything of it."""
        empty = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
        await self._emit("message_start", {"type": "message_start", "message": empty})

    async def end(self, ending: Mapping[str, Any], usage: Usage) -> None:
        """Why the message ended, and what it took."""
        await self._close()
        delta = {"type": "message_delta", "delta": ending, "usage": usage_json(usage)}
        await self._emit("message_delta", delta)
        await self._emit("message_stop", {"type": "message_stop"})

    async def tell(self, event: Event) -> None:
        match event:
            case ReasoningDelta(text):
                await self._open_block("thinking", {"thinking": "", "signature": ""})
                await self._add("thinking_delta", "thinking", text)
            case ContentDelta(text) if self._open == "tool_use":
                self._beside.append(text)
            case ContentDelta(text):
                await self._open_block("text", {"text": ""})
                await self._add("text_delta", "text", text)
            case ToolCallBegin(_, id_, name):
                await self._close()
                await self._open_block("tool_use", {"id": id_, "name": name, "input": {}})
            case ToolArgumentsDelta(_, text):
                await self._add("input_json_delta", "partial_json", text)
            case ToolCallEnd():
                await self._close()
            case _:
                return

    async def _close(self) -> None:
        if self._open:
            self._open = ""
            await self._emit("content_block_stop", {"type": "content_block_stop", "index": self._index})
        beside, self._beside = "".join(self._beside), []
        if beside:
            await self.tell(ContentDelta(beside))
            await self._close()

    async def _open_block(self, kind: str, empty: Mapping[str, Any]) -> None:
        """Open a block, unless one of this kind is open."""
        if self._open == kind:
            return
        await self._close()
        self._open = kind
        self._index += 1
        block = {"type": kind, **empty}
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        await self._emit("content_block_start", start)

    async def _add(self, kind: str, name: str, text: str) -> None:
        delta = {"type": kind, name: text}
        await self._emit("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})


def content_json(writer: Writer) -> list[dict[str, Any]]:
    """The whole reply's blocks."""
    said = writer.reply.message
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
    if said.text:
        blocks.append({"type": "text", "text": said.text})
    return blocks + [_call(call) for call in said.calls]


def _call(call: ToolCall) -> dict[str, Any]:
    """The API has no form for arguments that are no object, such as a reply cut short leaves; they are told as text."""
    try:
        given = call.arguments_object()
    except PromptInvalid:
        given = None
    broken = {UNPARSED: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": broken if given is None else given}


def _ending(writer: Writer) -> dict[str, Any]:
    reason = None if writer.finish is None else STOP_REASONS[writer.finish]
    if writer.stopped_by is not None:
        reason = "stop_sequence"
    cut = {} if writer.cut_by is None else {"serai:cut_by": writer.cut_by.value}
    return {"stop_reason": reason, "stop_sequence": writer.stopped_by, **cut}


def usage_json(usage: Usage) -> dict[str, Any]:
    """That API counts tokens from the cache apart from those of the input."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
