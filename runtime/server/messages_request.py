"""Reading `/v1/messages` requests, the API of Anthropic's clients: content blocks as messages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serai.runtime.chat import Message, ToolCall
from serai.runtime.chat.messages import TextPart
from serai.runtime.server.ask import (
    LARGEST,
    Ask,
    Setting,
    read_declared_tools,
    read_effort,
    read_params,
    read_stops,
    with_format,
)
from serai.runtime.server.callers import Caller
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import Fields
from serai.runtime.server.held import Choice, read_choice

UNPARSED = "serai:unparsed"
"""The one argument of a call whose arguments are no object, such as a reply cut short leaves: what it wrote."""

HIDDEN_BLOCKS = ("redacted_thinking",)
"""What only the server that wrote it could read, so it is passed over."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """What to ask, and how the answer is to look."""

    ask: Ask
    model: str
    stream: bool


def read_messages_request(body: Mapping[str, Any], caller: Caller, *, stored: bool, counts: bool) -> MessagesRequest:
    """Unknown fields are ignored, wrong ones are a 400 naming the field. `counts`: no reply is asked for, only how long
    the request is, so that `max_tokens` may be left out."""
    fields = Fields(body)
    model = fields.need_text("model")
    max_tokens = fields.integer("max_tokens", 1, LARGEST)
    if max_tokens is None and not counts:
        raise invalid("max_tokens", "max_tokens is required, an integer of at least 1")
    choice = _choice(fields)
    output = fields.object("output_config")
    thinks, effort = read_effort(None if output is None else output.text("effort"), "output_config.effort")
    thinking = _thinking(fields) if thinks is None else thinks
    setting = Setting(read_declared_tools(_functions(fields.objects("tools")), "tools"), thinking, effort)
    priority, deadline = caller.urgency(fields)
    system, (messages, origins) = _system(fields), _messages(fields)
    return MessagesRequest(
        Ask(
            namespace=caller.namespace,
            messages=(*system, *messages),
            origins=(*("system" for _ in system), *origins),
            setting=setting,
            notes=with_format(choice.notes, _format(fields, output)),
            params=read_params(fields, max_tokens=max_tokens, logprobs=None),
            max_tokens=max_tokens,
            stops=read_stops(fields, "stop_sequences"),
            store=fields.flag("store", stored),
            choice=choice,
            priority=priority,
            deadline=deadline,
        ),
        model,
        fields.flag("stream", False),
    )


def _thinking(fields: Fields) -> bool | None:
    """Off unless asked for, as that API has it. A budget of tokens for it is taken, and not held to."""
    given = fields.object("thinking")
    kind = "disabled" if given is None else given.need_text("type")
    match kind:
        case "disabled":
            return False
        case "enabled":
            return True
        case "adaptive":
            return None
        case _:
            raise invalid("thinking.type", f"thinking.type is {kind!r:.60}; it must be enabled, adaptive or disabled")


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in the shape of OpenAI's functions. Those that Anthropic's own servers run have another type."""
    functions = []
    for place, tool in enumerate(tools):
        at = Fields(tool, f"tools[{place}]")
        if at.text("type", "custom") != "custom":
            kind = tool["type"]
            raise invalid(at.path("type"), f"{at.path('type')} is {kind!r:.60}; only custom tools can be called here")
        schema = at.object("input_schema")
        if schema is None:
            raise invalid(at.path("input_schema"), f"{at.path('input_schema')} is required, a JSON schema")
        function = {"name": at.need_text("name"), "description": at.text("description"), "parameters": schema.values}
        functions.append({"type": "function", "function": function, "strict": at.flag("strict", False)})
    return functions


def _choice(fields: Fields) -> Choice:
    given = fields.object("tool_choice")
    strict = any(tool.get("strict") is True for tool in fields.objects("tools"))
    if given is None:
        return read_choice(None, parallel=True, strict=strict)
    parallel = not given.flag("disable_parallel_tool_use", False)
    kind = given.need_text("type")
    if kind == "tool":
        function = {"type": "function", "name": given.need_text("name")}
        return read_choice(function, parallel=parallel, strict=strict)
    words = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in words:
        raise invalid("tool_choice.type", f"tool_choice.type is {kind!r:.60}; it must be auto, any, tool or none")
    return read_choice(words[kind], parallel=parallel, strict=strict)


def _format(fields: Fields, output: Fields | None) -> Fields | None:
    """The schema of the answer, in the shape of chat's `response_format`; `output_format` is its older place."""
    newer = None if output is None else output.object("format")
    given = fields.object("output_format") if newer is None else newer
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise invalid(given.path("type"), f"{given.path('type')} must be json_schema")
    schema = {"name": "output", "schema": given.get("schema"), "strict": True}
    return Fields({"type": "json_schema", "json_schema": schema}, given.path("schema"))


def _system(fields: Fields) -> tuple[Message, ...]:
    given = fields.get("system")
    if given is None:
        return ()
    parts = tuple(TextPart(_text(block)) for block in _blocks(given, "system"))
    return (Message("system", parts),) if parts else ()


def _messages(fields: Fields) -> tuple[list[Message], list[str]]:
    """The messages, and for each the place of the client's own that it comes from."""
    given = fields.objects("messages")
    if not given:
        raise invalid("messages", "messages is required, a list of at least one message")
    found: list[Message] = []
    origins: list[str] = []
    for place, item in enumerate(given):
        at = Fields(item, f"messages[{place}]")
        blocks = _blocks(at.get("content"), at.path("content"))
        match at.need_text("role"):
            case "user":
                found += _user(blocks)
            case "assistant":
                found.append(_assistant(blocks))
            case role:
                raise invalid(at.path("role"), f"{at.path('role')} is {role!r:.60}; it must be user or assistant")
        origins += [f"messages[{place}]"] * (len(found) - len(origins))
    if found[-1].role == "assistant":
        raise invalid("messages", "the last message must be the user's; a reply can't be begun for the model here")
    return found, origins


def _blocks(content: object, path: str) -> list[Fields]:
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, path)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(path, f"{path} must be a string or a list of content blocks")
    return [Fields(block, f"{path}[{place}]") for place, block in enumerate(content)]


def _user(blocks: Sequence[Fields]) -> list[Message]:
    """The results of tools, each a message of its own, then what the user says beside them. That a result is an error
    has no form in the models' own markup; its text says so."""
    results: list[Message] = []
    parts: list[TextPart] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content")
            inner = [] if content is None else _blocks(content, block.path("content"))
            texts = tuple(TextPart(_text(one)) for one in inner)
            results.append(Message("tool", texts, call_id=block.need_text("tool_use_id")))
        else:
            parts.append(TextPart(_text(block)))
    return results + ([Message("user", tuple(parts))] if parts or not results else [])


def _assistant(blocks: Sequence[Fields]) -> Message:
    reasoning: list[str] = []
    parts: list[TextPart] = []
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "thinking":
                reasoning.append(block.need_text("thinking"))
            case "tool_use":
                calls.append(ToolCall(block.need_text("name"), _arguments(block), block.need_text("id")))
            case kind if kind not in HIDDEN_BLOCKS:
                parts.append(TextPart(_text(block)))
    return Message("assistant", tuple(parts), reasoning="".join(reasoning), calls=tuple(calls))


def _arguments(block: Fields) -> str:
    """As JSON text; what was no object, and had been told as text, is that text again."""
    given = block.object("input")
    if given is not None and list(given.values) == [UNPARSED]:
        return given.text(UNPARSED) or ""
    return json.dumps({} if given is None else given.values, ensure_ascii=False)


def _text(block: Fields) -> str:
    kind = block.get("type")
    if kind != "text":
        raise invalid(block.path("type"), f"{block.path('type')} is {kind!r:.60}; only text can be read there")
    return block.need_text("text")
