"""Chat completions: running a request, and saying its replies in OpenAI's words, whole or in chunks."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio

from serai.runtime.chat import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallBegin
from serai.runtime.chat.messages import ToolCall
from serai.runtime.server.asking import Asked, Usage
from serai.runtime.server.chat_request import ChatRequest
from serai.runtime.server.gate import Gates
from serai.runtime.server.streams import Emit
from serai.runtime.server.writing import Piece, Writer
from serai.runtime.sessions.generation import Token
from serai.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serai.runtime.server.service import Service


class ChatAnswer:
    """One chat completion on its way."""

    def __init__(self, service: "Service", request: ChatRequest, model: str) -> None:
        self._service = service
        self._request = request
        self._model = model
        self._created = int(time.time())
        self._began_s = anyio.current_time()
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in range(request.ask.choices)]
        self._id = ""

    async def whole(self) -> Mapping[str, Any]:
        """The completion as one object."""
        return await self._run(None)

    async def stream(self, emit: Emit) -> None:
        """The completion in chunks."""
        await self._run(emit)

    async def _run(self, emit: Emit | None) -> Mapping[str, Any]:
        service, ask = self._service, self._request.ask
        async with service.work(ask.namespace), service.asking.open(ask, Gates(service.engine_gate)) as asked:
            self._id = f"chatcmpl-{asked.place_ids[0]}"
            if len(asked.writers) == 1:
                await self._choice(asked, 0, emit)
            else:
                await self._choices(asked, emit)
            service.metrics.count(asked.usage)
            if emit is not None and self._request.include_usage:
                await emit(None, {**self._chunk([]), "usage": usage_json(asked.usage)})
            return {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._whole_choice(index, writer) for index, writer in enumerate(asked.writers)],
                "usage": usage_json(asked.usage),
            }
        raise AssertionError("a request that was ended raises")

    async def _choices(self, asked: Asked, emit: Emit | None) -> None:
        """All choices side by side; the first error ends them all and is the request's."""
        failed: list[Exception] = []

        async def one(index: int) -> None:
            try:
                await self._choice(asked, index, emit)
            except Exception as error:  # noqa: BLE001  # raised again below, without a group around it
                failed.append(error)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index in range(len(asked.writers)):
                tasks.start_soon(one, index)
        if failed:
            raise failed[0]

    async def _choice(self, asked: Asked, index: int, emit: Emit | None) -> None:
        writer = asked.writers[index]
        if emit is not None:
            await emit(None, self._delta(index, {"role": "assistant", "content": ""}))
        async with aclosing(writer.pieces()) as pieces:
            async for piece in pieces:
                if writer.output_tokens == 1:
                    self._service.metrics.first_s.observe(anyio.current_time() - self._began_s)
                told = [logprob_json(token, self._tokenizer) for token in piece.tokens] if self._asks_logprobs else []
                self._logprobs[index] += told
                if emit is not None:
                    await self._emit_piece(index, piece, told, emit)
        await asked.keep(index)
        if emit is not None:
            await emit(None, self._chunk([{"index": index, "delta": {}, "logprobs": None, **_finish(writer)}]))

    async def _emit_piece(self, index: int, piece: Piece, told: list[dict[str, Any]], emit: Emit) -> None:
        for event in piece.events:
            delta = delta_of(event)
            if delta is not None:
                spoken = isinstance(event, ContentDelta) and bool(told)
                await emit(None, self._delta(index, delta, logprobs=told if spoken else None))
                if spoken:
                    told = []
        if told:  # tokens whose text is held back, or belongs to a character that is not complete
            await emit(None, self._delta(index, {}, logprobs=told))

    @property
    def _asks_logprobs(self) -> bool:
        return self._request.logprobs

    @property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._service.runtime.tokenizer
        if tokenizer is None:
            raise AssertionError("a chat format has a tokenizer")
        return tokenizer

    def _delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        told = None if logprobs is None else {"content": list(logprobs), "refusal": None}
        return self._chunk([{"index": index, "delta": delta, "logprobs": told, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _whole_choice(self, index: int, writer: Writer) -> dict[str, Any]:
        said = writer.reply.message
        message: dict[str, Any] = {
            "role": "assistant",
            "content": said.text or None if said.calls or said.reasoning else said.text,
            "refusal": None,
            "annotations": [],
        }
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [call_json(call) for call in said.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs[index], "refusal": None} if self._asks_logprobs else None,
            **_finish(writer),
        }


def _finish(writer: Writer) -> dict[str, Any]:
    """Why a choice ended. OpenAI has no word for a reply that time or memory cut short, so that is told beside it."""
    finish = {"finish_reason": None if writer.finish is None else writer.finish.value}
    return finish if writer.cut_by is None else {**finish, "serai:cut_by": writer.cut_by.value}


def delta_of(event: Event) -> dict[str, Any] | None:
    """What an event adds to a message; None for what has no words of its own."""
    match event:
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ContentDelta(text):
            return {"content": text}
        case ToolCallBegin(index, id_, name):
            call = {"index": index, "id": id_, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolArgumentsDelta(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.output,
        "total_tokens": usage.prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprob_json(token: Token, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token with its logprob and its likeliest alternatives."""
    top = token.top_logprobs or {}
    return {
        **_one(token.id, token.logprob, tokenizer),
        "top_logprobs": [_one(other, logprob, tokenizer) for other, logprob in top.items()],
    }


def _one(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    spelled = tokenizer.token_bytes(token, control=True)
    return {"token": spelled.decode("utf-8", "replace"), "logprob": told_logprob(logprob), "bytes": list(spelled)}


def told_logprob(logprob: float | None) -> float:
    """JSON has no -Infinity; OpenAI writes -9999 for it."""
    return -9999.0 if logprob is None or logprob == float("-inf") else logprob
