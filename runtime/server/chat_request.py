"""Reading `/v1/chat/completions` requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from serai.runtime.chat import read_messages
from serai.runtime.sampling.params import MAX_LOGPROBS
from serai.runtime.server.ask import (
    LARGEST,
    MAX_CHOICES,
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
from serai.runtime.server.errors import invalid
from serai.runtime.server.fields import Fields


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What to ask, and how the answer is to look."""

    ask: Ask
    model: str | None
    stream: bool
    include_usage: bool
    logprobs: bool


def read_chat(body: Mapping[str, Any], caller: Caller, *, stored: bool) -> ChatRequest:
    """Unknown fields are ignored, as OpenAI's own clients expect of servers; wrong ones are a 400 naming the field."""
    fields = Fields(body)
    if not isinstance(fields.get("messages"), list) or not body["messages"]:
        raise invalid("messages", "messages is required, a list of at least one message")
    fields.need_text("model")
    setting = _setting(fields)
    choice = read_tool_choice(fields)
    logprobs, top = fields.flag("logprobs", False), fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top is not None and not logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    max_tokens = read_max_tokens(fields)
    messages = read_messages(body["messages"])
    for place, message in enumerate(messages):
        read_declared_tools(message.tools, f"messages[{place}].tools")
    options = fields.object("stream_options")
    priority, deadline = caller.urgency(fields)
    return ChatRequest(
        ask=Ask(
            namespace=caller.namespace,
            messages=messages,
            setting=setting,
            notes=with_format(choice.notes, fields.object("response_format")),
            params=read_params(fields, max_tokens=max_tokens, logprobs=(top or 0) if logprobs else None),
            max_tokens=max_tokens,
            stops=read_stops(fields),
            choices=fields.integer("n", 1, MAX_CHOICES) or 1,
            store=fields.flag("store", stored),
            choice=choice,
            priority=priority,
            deadline=deadline,
        ),
        model=fields.text("model"),
        stream=fields.flag("stream", False),
        include_usage=options is not None and options.flag("include_usage", False),
        logprobs=logprobs,
    )


def read_max_tokens(fields: Fields) -> int | None:
    """The newer name wins over the older one."""
    newer = fields.integer("max_completion_tokens", 1, LARGEST)
    older = fields.integer("max_tokens", 1, LARGEST)
    return older if newer is None else newer


def _setting(fields: Fields) -> Setting:
    tools = read_declared_tools(fields.objects("tools"), "tools")
    thinking, effort = read_effort(fields.text("reasoning_effort"), "reasoning_effort")
    template = fields.object("chat_template_kwargs")
    if template is not None:
        for name in ("thinking", "enable_thinking"):
            if template.has(name):
                thinking = template.flag(name, True)
    return Setting(tools, thinking, effort)
