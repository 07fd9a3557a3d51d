"""serai as a model of the OpenAI Agents SDK, in this process: no HTTP, and a response id is a place to go on from.

It takes `pip install 'serai[agents]'`. What a request means, how its reply is held to a schema and how a conversation
is found again is what the server does (`serai.runtime.server`), so an agent moves from one to the other unchanged.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, get_args

import anyio
from agents import (
    AgentOutputSchemaBase,
    AgentsException,
    Handoff,
    Model,
    ModelResponse,
    ModelSettings,
    ModelTracing,
    Tool,
    TResponseInputItem,
    Usage,
    UserError,
    generation_span,
)
from agents.items import ItemHelpers, TResponseStreamEvent
from agents.models.openai_responses import Converter
from anyio.abc import ObjectSendStream
from openai import Omit
from openai.types.responses import Response, ResponsePromptParam, ResponseStreamEvent

from serai.runtime.errors import SeraiError
from serai.runtime.runtime import Runtime
from serai.runtime.server.callers import ANYBODY, Caller
from serai.runtime.server.errors import ApiError
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.responses_request import read_responses
from serai.runtime.server.runs import Run
from serai.runtime.server.service import Service, at_service

EVENTS = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(ResponseStreamEvent)[0])}
"""The SDK's classes of events by their `type`."""

AHEAD = 16
"""Events that may wait for the agent; the model goes on when it takes them."""


@asynccontextmanager
async def agents_model(runtime: Runtime, *, namespace: str = "", keep_hot: int = 64) -> AsyncIterator["SeraiModel"]:
    """A model for agents over an open runtime; leaving the block ends what is under way.

    `namespace` parts its conversations from others; `keep_hot` of their responses stay in memory to go on from at once,
    older ones come back from the runtime's store.
    """
    async with at_service(runtime, ServerOptions(keep_hot=keep_hot)) as service:
        yield SeraiModel(service, namespace)


class SeraiModel(Model):
    """`Agent(model=...)` takes it. Made by `agents_model`.

    A `previous_response_id` (and so `auto_previous_response_id=True`) goes on from that response, as often as one
    likes: twice is a fork. Without one, the items sent are matched to what is known, so that only what is new is read.
    Raises `UserError` for requests that can't be answered as they are, `AgentsException` when the runtime can't answer
    now; the cause of both says more.
    """

    def __init__(self, service: Service, namespace: str) -> None:
        self._service = service
        self._namespace = namespace
        self.model = service.runtime.facts.name

    async def get_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],  # noqa: A002  # the SDK's name
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> ModelResponse:
        """One whole response, with its usage and its id."""
        _refuse(conversation_id, prompt)
        body = self._body(
            system_instructions, input, model_settings, tools, output_schema, handoffs, previous_response_id
        )
        with generation_span(model=self.model, disabled=tracing.is_disabled()) as span:
            try:
                run = await self._service.runs.prepare(read_responses(body, self._caller()))
                await self._service.runs.execute(run)
            except (SeraiError, ApiError) as error:
                raise _told(error) from error
            if run.failure is not None:
                raise _told(run.failure) from run.failure
            response = Response.construct(**run.document.document())
            usage = _usage(response)
            span.span_data.usage = {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}
            if tracing.include_data():
                span.span_data.output = [item.model_dump() for item in response.output]
        return ModelResponse(output=response.output, usage=usage, response_id=response.id)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: str | list[TResponseInputItem],  # noqa: A002  # the SDK's name
        model_settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        tracing: ModelTracing,
        *,
        previous_response_id: str | None = None,
        conversation_id: str | None = None,
        prompt: ResponsePromptParam | None = None,
    ) -> AsyncIterator[TResponseStreamEvent]:
        """The events of one response, as they come. Leaving ends it; the runtime is as idle then as before."""
        _refuse(conversation_id, prompt)
        body = self._body(
            system_instructions, input, model_settings, tools, output_schema, handoffs, previous_response_id
        )
        put, take = anyio.create_memory_object_stream[Mapping[str, Any]](AHEAD)
        with generation_span(model=self.model, disabled=tracing.is_disabled()) as span:
            try:
                run = await self._service.runs.prepare(read_responses(body, self._caller()))
                await self._service.tasks.start(self._write, run, put)
            except (SeraiError, ApiError) as error:
                put.close()
                take.close()
                raise _told(error) from error
            try:
                async for told in take:
                    event = EVENTS[told["type"]].construct(**told)
                    if event.type in ("response.completed", "response.incomplete"):
                        usage = _usage(event.response)
                        span.span_data.usage = {
                            "input_tokens": usage.input_tokens,
                            "output_tokens": usage.output_tokens,
                        }
                    yield event
            finally:
                run.hear = None  # nobody listens any more
                with anyio.CancelScope(shield=True):
                    await run.cancel()
                take.close()

    def _caller(self) -> Caller:
        return Caller(replace(ANYBODY, namespace=self._namespace), anyio.current_time())

    async def _write(
        self, run: Run, put: ObjectSendStream[Mapping[str, Any]], *, task_status: Any = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """The task that writes a response: the service's own, because a generator must not hold a task group open."""

        async def hear(told: Mapping[str, Any], _: bytes) -> None:
            await put.send(told)

        run.hear = hear
        async with put:
            await self._service.runs.execute(run, task_status=task_status)

    def _body(
        self,
        instructions: str | None,
        given: str | list[TResponseInputItem],
        settings: ModelSettings,
        tools: list[Tool],
        output_schema: AgentOutputSchemaBase | None,
        handoffs: list[Handoff],
        previous: str | None,
    ) -> dict[str, Any]:
        """The request as `/v1/responses` takes it."""
        reasoning = settings.reasoning
        body: dict[str, Any] = {
            "model": self.model,
            "input": ItemHelpers.input_to_new_input_list(given),
            "instructions": instructions,
            "previous_response_id": previous,
            "tools": list(Converter.convert_tools(tools, handoffs).tools),
            "tool_choice": Converter.convert_tool_choice(settings.tool_choice, tools=tools, handoffs=handoffs),
            "parallel_tool_calls": settings.parallel_tool_calls,
            "text": Converter.get_response_format(output_schema),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "presence_penalty": settings.presence_penalty,
            "frequency_penalty": settings.frequency_penalty,
            "max_output_tokens": settings.max_tokens,
            "top_logprobs": settings.top_logprobs,
            "truncation": settings.truncation,
            "store": settings.store,
            "reasoning": None if reasoning is None else reasoning.model_dump(exclude_none=True),
        }
        body = {name: value for name, value in body.items() if value is not None and not isinstance(value, Omit)}
        more = settings.extra_body if isinstance(settings.extra_body, Mapping) else {}
        return {**body, **more, **(settings.extra_args or {})}


def _refuse(conversation_id: str | None, prompt: ResponsePromptParam | None) -> None:
    if conversation_id is not None:
        raise UserError("there are no stored conversations here; go on from a response with previous_response_id")
    if prompt is not None:
        raise UserError("there are no stored prompts here; give the agent its instructions")


def _told(error: Exception) -> AgentsException:
    wrong = isinstance(error, ApiError) and error.status in (400, 404)
    return UserError(str(error)) if wrong else AgentsException(str(error))


def _usage(response: Response) -> Usage:
    used = response.usage
    if used is None:
        return Usage(requests=1)
    return Usage(
        requests=1,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        total_tokens=used.total_tokens,
        input_tokens_details=used.input_tokens_details,
        output_tokens_details=used.output_tokens_details,
    )
