"""Reading `/v1/responses` requests: items as messages."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serai.checkpoints.names import is_id, new_id
from serai.runtime.chat import Message, PromptInvalid
from serai.runtime.sampling.params import MAX_LOGPROBS
from serai.runtime.server.ask import (
    LARGEST,
    Ask,
    Setting,
    read_declared_tools,
    read_effort,
    read_params,
    read_stops,
    read_tool_choice,
    with_format,
)
from serai.runtime.server.callers import Caller
from serai.runtime.server.errors import invalid, response_not_found
from serai.runtime.server.fields import Fields, strings

PREFIX = "resp_"
ID_FORM = re.compile(r"[\w-]{1,100}", re.ASCII)
"""What can be an id at all, of whichever server."""
LOGPROBS_INCLUDED = "message.output_text.logprobs"
UNSUPPORTED = ("conversation", "prompt")
"""Fields that would change what is answered, and that this server has nothing for."""


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """What to ask, and what the response repeats of the request. `instructions` are apart from the messages because
    whether they are read depends on what the conversation was told before."""

    ask: Ask
    fields: Fields
    input: tuple[Mapping[str, Any], ...]
    instructions: str | None
    model: str | None
    stream: bool
    background: bool
    logprobs: bool
    summary: bool


def place_of(response_id: str) -> str:
    """The place a response id names. Raises a 404 for one that was never made here, a 400 for what is no id at all."""
    if ID_FORM.fullmatch(response_id) is None:
        raise invalid(None, f"{response_id[:80]!r} is no response id; those begin with {PREFIX}", "invalid_id")
    place = response_id.removeprefix(PREFIX)
    if not response_id.startswith(PREFIX) or not is_id(place):
        raise response_not_found(response_id)
    return place


def read_responses(body: Mapping[str, Any], caller: Caller) -> ResponsesRequest:
    """Unknown fields are ignored, wrong ones are a 400 naming the field."""
    fields = Fields(body)
    for name in UNSUPPORTED:
        if fields.has(name):
            raise invalid(name, f"{name} is not supported here; send the items, or previous_response_id")
    if fields.text("truncation", "disabled") != "disabled":
        raise invalid("truncation", "truncation must be disabled here: what was read is never cut")
    previous = fields.text("previous_response_id")
    fields.need_text("model")
    tools = read_declared_tools(fields.objects("tools"), "tools")
    choice = read_tool_choice(fields)
    reasoning, text = fields.object("reasoning"), fields.object("text")
    effort = None if reasoning is None else reasoning.text("effort")
    thinking, effort = read_effort(effort, "reasoning.effort")
    max_tokens = fields.integer("max_output_tokens", 1, LARGEST)
    include = strings(fields, "include")
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    logprobs = bool(top) or LOGPROBS_INCLUDED in include
    items = _items(fields)
    messages, origins = messages_of(items)
    priority, deadline = caller.urgency(fields)
    return ResponsesRequest(
        ask=Ask(
            namespace=caller.namespace,
            messages=messages,
            origins=origins,
            setting=Setting(tools, thinking, effort),
            notes=with_format(choice.notes, _format(None if text is None else text.object("format"))),
            params=read_params(fields, max_tokens=max_tokens, logprobs=(top or 0) if logprobs else None),
            max_tokens=max_tokens,
            stops=read_stops(fields),
            store=fields.flag("store", True),
            previous=None if previous is None else place_of(previous),
            matched=previous is None,
            choice=choice,
            priority=priority,
            deadline=deadline,
        ),
        fields=fields,
        input=tuple(_shown(item) for item in items),
        instructions=fields.text("instructions"),
        model=fields.text("model"),
        stream=fields.flag("stream", False),
        background=fields.flag("background", False),
        logprobs=logprobs,
        summary=reasoning is not None and (reasoning.has("summary") or reasoning.has("generate_summary")),
    )


def _items(fields: Fields) -> list[dict[str, Any]]:
    value = fields.get("input")
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": value}]}]
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise fields.wrong("input", "a string or a list of items")
    return value


def _shown(item: Mapping[str, Any]) -> dict[str, Any]:
    """An input item as it is listed later: with an id and a type."""
    kind = item.get("type") or "message"
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(
        kind, "item"
    )
    shown = {"type": kind, "id": f"{prefix}_{new_id()}", **item}
    if kind == "message":
        shown.setdefault("status", "completed")
        if isinstance(shown.get("content"), str):
            part = "output_text" if shown.get("role") == "assistant" else "input_text"
            shown["content"] = [{"type": part, "text": shown["content"]}]
    return shown


def messages_of(items: Sequence[Mapping[str, Any]]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Items as messages: reasoning, text and calls that follow each other are one turn of the assistant. With them, for
    each the item it begins with."""
    messages: list[Message] = []
    origins: list[str] = []
    for place, item in enumerate(items):
        try:
            message = _message(item, place)
        except PromptInvalid as error:
            raise invalid(
                f"input[{place}]", f"input[{place}]: {str(error).removeprefix(f'message {place}: ')}"
            ) from None
        last = messages[-1] if messages else None
        joined = None if last is None else _one_turn(last, message)
        if joined is None:
            messages.append(message)
            origins.append(f"input[{place}]")
        else:
            messages[-1] = joined
    return tuple(messages), tuple(origins)


def _one_turn(first: Message, second: Message) -> Message | None:
    if not first.role == second.role == "assistant":
        return None
    begins_again = (second.reasoning and (first.parts or first.calls)) or (
        second.parts and (first.parts or first.calls)
    )
    if begins_again:
        return None
    return replace(
        first,
        parts=first.parts + second.parts,
        reasoning=first.reasoning + second.reasoning,
        calls=first.calls + second.calls,
    )


def _message(item: Mapping[str, Any], place: int) -> Message:
    at = Fields(item, f"input[{place}]")
    match item.get("type") or "message":
        case "message":
            content = (
                [_part(part) for part in item["content"]]
                if isinstance(item.get("content"), list)
                else item.get("content")
            )
            return Message.from_dict({"role": item.get("role"), "content": content}, index=place)
        case "function_call":
            call = {
                "id": at.need_text("call_id"),
                "function": {"name": at.need_text("name"), "arguments": at.text("arguments", "")},
            }
            return Message.from_dict({"role": "assistant", "tool_calls": [call]}, index=place)
        case "function_call_output":
            output = item.get("output")
            content = [_part(part) for part in output] if isinstance(output, list) else output
            message = {"role": "tool", "tool_call_id": at.need_text("call_id"), "content": content}
            return Message.from_dict(message, index=place)
        case "reasoning":
            texts = [part.get("text", "") for part in at.objects("content")]
            return Message.assistant("", reasoning="".join(text for text in texts if isinstance(text, str)))
        case other:
            raise invalid(
                at.path("type"),
                f"{at.path('type')} is {other!r:.60}; it must be message, function_call, function_call_output or "
                "reasoning",
            )


def _part(part: Any) -> Any:
    """A refusal is text the assistant said."""
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "text", "text": part.get("refusal", "")}
    return part


def _format(given: Fields | None) -> Fields | None:
    """`text.format` in the shape of chat's `response_format`."""
    if given is None or given.get("type") != "json_schema":
        return given
    schema = {key: value for key, value in given.values.items() if key != "type"}
    return Fields({"type": "json_schema", "json_schema": schema}, given.path("json_schema"))
