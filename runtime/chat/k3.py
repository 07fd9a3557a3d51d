"""Kimi K3's prompt format: nested elements, spelled with four control tokens.

    element = <|open|> name ( ' key' '="' value '"' )* <|sep|> body <|close|> name <|sep|>
    message = the element `message`, then <|end_of_msg|>

Names, keys, values and quotes are ordinary text, each a segment of its own. Quotes in values are escaped, so no value
can end early, and no text can spell a control token. An assistant's message holds the channels `think` (exactly when
the conversation thinks), `response` (always) and `tools` (if it calls any), in this order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

from serai.runtime.chat.conversation import (
    DEFAULT_EFFORT,
    NO_NOTES,
    Channel,
    Cursor,
    MintCallId,
    Notes,
    PlacedCall,
    PromptOptions,
    Rendered,
    ReplyParser,
    Run,
    place_results,
    runs,
    told_of,
)
from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.chat.grammars import Held
from serai.runtime.chat.k3_grammar import k3_grammar
from serai.runtime.chat.k3_reply import K3ReplyParser
from serai.runtime.chat.k3_tags import END_OF_MESSAGE, END_OF_TEXT, K3Writer, json_type, missing_tags
from serai.runtime.chat.messages import ImagePart, Message, Part, TextPart, Tool, ToolCall, read_tools
from serai.runtime.chat.segments import Tokenizer

# The sentences below are the model's own: it was trained on these bytes.
_DECLARE_FIRST = "# Tools\nHere are the available tools, described in JSONSchema."
_DECLARE_MORE = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools."
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


@dataclass(frozen=True, slots=True)
class K3Markup:
    """The `Markup` of Kimi K3."""

    id: str = "kimi-k3/1"
    stop_names: tuple[str, ...] = (END_OF_MESSAGE, END_OF_TEXT)

    def options(
        self, *, tools: Sequence[Tool] | None = None, thinking: bool | None = None, thinking_effort: str | None = None
    ) -> PromptOptions:
        """K3 thinks unless told otherwise, with effort "max" unless told otherwise."""
        thinks = thinking is not False
        if thinking_effort is None and thinks:
            thinking_effort = DEFAULT_EFFORT
        return PromptOptions(read_tools(tools), thinks, thinking_effort)

    def begin(self, options: PromptOptions) -> Rendered:
        out = K3Writer()
        if options.tools:
            out.note("tool-declare", f"{_DECLARE_FIRST}\n\n{_fenced(list(options.tools))}")
        if options.thinking and options.thinking_effort is not None:
            out.note("thinking-effort", _EFFORT.format(options.thinking_effort))
        return Rendered(out.finish(), Cursor(thinking=options.thinking, tools_declared=bool(options.tools)))

    def append(self, cursor: Cursor, messages: Sequence[Message]) -> Rendered:
        out = K3Writer(cursor.missing)
        cursor = replace(cursor, missing=(), reply=None)
        for run in runs(messages):
            with told_of(run.index):
                cursor = _write_run(out, cursor, run)
        return Rendered(out.finish(), cursor)

    def prompt(self, cursor: Cursor, notes: Notes = NO_NOTES, *, thinking: bool | None = None) -> Rendered:
        out = K3Writer(cursor.missing)
        if isinstance(notes.tool_choice, str) and notes.tool_choice in _TOOL_CHOICE:
            if cursor.tools_declared:
                out.note("tool-choice", _TOOL_CHOICE[notes.tool_choice])
            elif notes.tool_choice == "required":
                raise PromptInvalid("tool_choice is required, but the conversation declares no tools to choose from")
        kind = (notes.response_format or {}).get("type")
        if kind in ("json_object", "json_schema"):
            body = _RESPONSE_FORMAT.format(kind)
            out.note("response-format", body if notes.schema is None else f"{body}{_SCHEMA}{_fenced(notes.schema)}")
        channel: Channel = "think" if (cursor.thinking if thinking is None else thinking) else "response"
        out.open("message", role="assistant")
        out.open(channel)
        missing = missing_tags(["message", channel], answered=channel == "response")
        return Rendered(out.finish(), replace(cursor, spoken=True, missing=missing, reply=channel, calls=(), results=0))

    def parser(self, cursor: Cursor, tokenizer: Tokenizer, mint: MintCallId) -> ReplyParser:
        return K3ReplyParser(cursor, tokenizer, mint)

    def grammar(self, cursor: Cursor, held: Held, tokenizer: Tokenizer) -> str:
        return k3_grammar(cursor, held, tokenizer)


def _write_run(out: K3Writer, cursor: Cursor, run: Run) -> Cursor:
    first = run.messages[0]
    match first.role:
        case "tool":
            _write_results(out, cursor, run)
            return replace(cursor, spoken=True, results=cursor.results + len(run.messages))
        case "assistant":
            _write_assistant(out, first, thinking=cursor.thinking)
            calls = tuple(PlacedCall(call.name, call.id) for call in first.calls)
            return replace(cursor, spoken=True, calls=calls, results=0, next_call=cursor.next_call + len(calls))
        case "system" if first.tools:
            out.note("tool-declare", f"{_DECLARE_MORE}\n\n{_fenced(list(first.tools))}")
            return replace(cursor, spoken=True, tools_declared=True, results=0)
        case "system" | "user":
            out.open("message", role=first.role, **({"name": first.name} if first.name else {}))
            _write_parts(out, first.parts)
            out.end_message()
            return replace(cursor, spoken=True, results=0)
        case _:
            assert_never(first.role)


def _write_results(out: K3Writer, cursor: Cursor, run: Run) -> None:
    for number, result in enumerate(place_results(run, cursor), cursor.results + 1):
        with told_of(result.index):
            at_place = result.call_at_place
            name = result.call.name if result.call else result.message.name or (at_place.name if at_place else None)
            if name is None:
                raise PromptInvalid(
                    f"this tool result (tool_call_id {result.message.call_id!r}) answers no call of the turn before "
                    "it; give the tool's name, or put it after the assistant message that made the call"
                )
            out.open("message", role="tool", tool=name, index=str(number))
            _write_parts(out, result.parts)
            out.end_message()


def _write_parts(out: K3Writer, parts: Sequence[Part]) -> None:
    for part in parts:
        match part:
            case TextPart(text):
                out.text(text)
            case ImagePart(source, width, height):
                if width is None or height is None:
                    raise PromptInvalid(
                        f"the image {source[:60]!r} can't be read here; send text, or an image whose pixels are known"
                    )
                # An image is a value, never a placeholder looked for in text: no text can claim its slot.
                slot = f"<|media_begin|>image {width}x{height}<|media_content|><|media_pad|><|media_end|>"
                out.markup(slot)


def _write_assistant(out: K3Writer, message: Message, *, thinking: bool) -> None:
    out.open("message", role="assistant")
    if thinking:
        out.open("think")
        if message.reasoning.strip():
            out.text(message.reasoning)
        out.close("think")
    out.open("response")
    _write_parts(out, message.parts)
    out.close("response")
    if message.calls:
        out.open("tools")
        for index, call in enumerate(message.calls, 1):
            _write_call(out, call, index)
        out.close("tools")
    out.end_message()


def _write_call(out: K3Writer, call: ToolCall, index: int) -> None:
    out.open("call", tool=call.name, index=str(index))
    arguments = call.arguments_object()
    if arguments is None:
        out.open("json", type="object")
        out.text(call.arguments)
        out.close("json")
    else:
        for key, value in arguments.items():
            out.open("argument", key=key, type=json_type(value))
            out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            out.close("argument")
    out.close("call")


def _fenced(value: Sequence[Tool] | Mapping[str, Any]) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptInvalid(f"a schema can't be written as JSON ({error})") from None
    return f"```json\n{text}\n```"
