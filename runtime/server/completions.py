"""`/v1/completions`, `/tokenize` and `/detokenize`: text without messages."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from serai.checkpoints.names import new_id
from serai.runtime.errors import DeadlineMissed
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.server.ask import LARGEST, MAX_CHOICES, read_params, read_stops
from serai.runtime.server.asking import Usage
from serai.runtime.server.callers import Caller
from serai.runtime.server.chat_output import told_logprob, usage_json
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import Fields
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.requests import caller_of, read_body
from serai.runtime.server.service import Service
from serai.runtime.server.streams import Emit, whole
from serai.runtime.sessions.deadline import Deadline
from serai.runtime.sessions.generation import FinishReason, Token
from serai.runtime.sessions.session import Session

DEFAULT_TOKENS = 16
"""What OpenAI generates here when nothing is said."""

MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`prompts` are texts or lists of token ids."""

    namespace: str
    priority: int
    deadline: Deadline | None
    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    choices: int
    echo: bool
    stream: bool
    include_usage: bool
    model: str | None


def read_completion(body: Mapping[str, Any], caller: Caller) -> CompletionRequest:
    fields = Fields(body)
    fields.need_text("model")
    max_tokens = fields.integer("max_tokens", 1, LARGEST) or DEFAULT_TOKENS
    options = fields.object("stream_options")
    params = read_params(fields, max_tokens=max_tokens, logprobs=fields.integer("logprobs", 0, 5))
    priority, deadline = caller.urgency(fields)
    return CompletionRequest(
        namespace=caller.namespace,
        priority=priority,
        deadline=deadline,
        prompts=_prompts(fields),
        params=replace(params, stop=read_stops(fields)),
        choices=fields.integer("n", 1, MAX_CHOICES) or 1,
        echo=fields.flag("echo", False),
        stream=fields.flag("stream", False),
        include_usage=options is not None and options.flag("include_usage", False),
        model=fields.text("model"),
    )


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", "a text, a list of token ids, or a list of either")
    if _are_ids(value):
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(value):,} texts, and at most {MAX_PROMPTS} are read")
    if not all((isinstance(one, str) and one) or (isinstance(one, list) and one and _are_ids(one)) for one in value):
        raise fields.wrong("prompt", "a text, a list of token ids, or a list of either, none of them empty")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value)


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and abs(one) < 2**63 for one in value)


class TextAnswer:
    """One request's completions on their way."""

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        self._service = service
        self._request = request
        self._id = f"cmpl-{new_id()}"
        self._created = int(time.time())
        self._prompt_tokens = 0
        self._output_tokens = 0
        count = len(request.prompts) * request.choices
        self._texts = [""] * count
        self._tokens: list[list[Token]] = [[] for _ in range(count)]
        self._finishes: list[str | None] = [None] * count

    async def whole(self) -> Mapping[str, Any]:
        await self._run(None)
        choices = [
            self._choice(index, text, tokens)
            for index, (text, tokens) in enumerate(zip(self._texts, self._tokens, strict=True))
        ]
        return {**self._head(), "choices": choices, "usage": usage_json(self._usage)}

    async def stream(self, emit: Emit) -> None:
        await self._run(emit)

    async def _run(self, emit: Emit | None) -> None:
        async with self._service.work(self._request.namespace), AsyncExitStack() as stack:
            sessions: list[Session] = []
            for prompt in self._request.prompts:
                sessions += await self._read(prompt, len(sessions), stack)
            failed: list[Exception] = []

            async def one(index: int, session: Session) -> None:
                try:
                    await self._write(index, session, emit)
                except Exception as error:  # noqa: BLE001  # raised again below, without a group around it
                    failed.append(error)
                    tasks.cancel_scope.cancel()

            async with anyio.create_task_group() as tasks:
                for index, session in enumerate(sessions):
                    tasks.start_soon(one, index, session)
            if failed:
                raise failed[0]
            deadline = self._request.deadline
            if deadline is not None and not self._output_tokens:
                raise DeadlineMissed(what="the reply", left_s=deadline.allowed_s)
            for index, finish in enumerate(self._finishes):
                if finish is None:  # its deadline came
                    self._finishes[index] = "length"
                    if emit is not None:
                        await emit(None, self._chunk(index, "", []))
            self._service.metrics.count(self._usage)
            if emit is not None and self._request.include_usage:
                await emit(None, {**self._head(), "choices": [], "usage": usage_json(self._usage)})

    async def _read(self, prompt: str | tuple[int, ...], first: int, stack: AsyncExitStack) -> list[Session]:
        """The sessions of one prompt's choices, the first of which has the index `first`."""
        service, request = self._service, self._request
        tokenizer = service.sessions.format.tokenizer
        ids = await anyio.to_thread.run_sync(
            lambda: np.array(tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, np.int64)
        )
        limit = service.sessions.max_positions
        if len(ids) + request.params.max_tokens > limit:
            raise invalid(
                "max_tokens",
                f"{len(ids):,} tokens of prompt and {request.params.max_tokens:,} to generate are more than the "
                f"model's context of {limit:,}",
                "context_length_exceeded",
            )
        self._prompt_tokens += len(ids)
        session = await service.sessions.begin(request.namespace)
        stack.push_async_callback(service.sessions.end, session, erase=True)
        await session.append(ids, priority=request.priority, deadline_s=_left_s(request.deadline))
        result = [session]
        for choice in range(1, request.choices):
            result.append(await service.sessions.branch(session, choice))
            stack.push_async_callback(service.sessions.end, result[-1], erase=True)
        if request.echo:
            text = session.text()
            for place in range(request.choices):
                self._texts[first + place] = text
        return result

    async def _write(self, index: int, session: Session, emit: Emit | None) -> None:
        if emit is not None and self._texts[index]:
            await emit(None, self._chunk(index, self._texts[index], []))
        request = self._request
        generation = session.generate(request.params, priority=request.priority, deadline_s=_left_s(request.deadline))
        async with aclosing(generation):
            while True:
                if not self._service.engine_gate.is_open:
                    with anyio.CancelScope(deadline=math.inf if request.deadline is None else request.deadline.at_s):
                        await self._service.engine_gate.wait()
                try:
                    token = await anext(generation)
                except StopAsyncIteration:
                    break
                self._output_tokens += 1
                if token.finish_reason is not None:
                    self._finishes[index] = "stop" if token.finish_reason is FinishReason.STOP else "length"
                if emit is None:
                    self._texts[index] += token.text
                    self._tokens[index].append(token)
                else:
                    await emit(None, self._chunk(index, token.text, [token]))

    @property
    def _usage(self) -> Usage:
        return Usage(prompt=self._prompt_tokens, output=self._output_tokens)

    def _head(self) -> dict[str, Any]:
        model = self._request.model or self._service.runtime.facts.name
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": model}

    def _chunk(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        chunk = {**self._head(), "choices": [self._choice(index, text, tokens)]}
        return chunk | {"usage": None} if self._request.include_usage else chunk

    def _choice(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finishes[index],
        }

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._request.params.logprobs is None:
            return None
        spell = self._spell
        return {
            "tokens": [spell(token.id) for token in tokens],
            "token_logprobs": [told_logprob(token.logprob) for token in tokens],
            "top_logprobs": [
                {spell(id_): told_logprob(value) for id_, value in (token.top_logprobs or {}).items()}
                for token in tokens
            ],
            "text_offset": [],
        }

    def _spell(self, token: int) -> str:
        return self._service.sessions.format.tokenizer.token_bytes(token, control=True).decode("utf-8", "replace")


async def completions(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    asked = await read_body(service, request, lambda body: read_completion(body, caller))
    answer = TextAnswer(service, asked)
    return service.stream(lambda wire: answer.stream(wire.emit)) if asked.stream else await whole(request, answer.whole)


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of ordinary text; never a control token, whatever the text spells."""
    text = await read_body(service, request, lambda body: Fields(body).need_text("prompt"))
    ids = await anyio.to_thread.run_sync(service.sessions.format.tokenizer.encode, text)
    return JSONResponse({"count": len(ids), "max_model_len": service.sessions.max_positions, "tokens": ids})


async def detokenize(service: Service, request: Request) -> Response:
    ids = await read_body(service, request, _read_ids)
    tokenizer = service.runtime.tokenizer
    if tokenizer is None:
        raise AssertionError("a chat format has a tokenizer")
    text = await anyio.to_thread.run_sync(lambda: tokenizer.decode(ids, control=True))
    return JSONResponse({"prompt": text})


def _left_s(deadline: Deadline | None) -> float | None:
    return None if deadline is None else max(deadline.left_s, 0.0)


def _read_ids(body: Mapping[str, Any]) -> list[int]:
    value = body.get("tokens")
    if not isinstance(value, list) or not _are_ids(value):
        raise invalid("tokens", "tokens must be a list of token ids")
    return value


ROUTES = [
    ("POST", "/v1/completions", completions),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
]
