"""Kimi-K3 message markup: a conversation becomes segments, and every segment is BPE-encoded on its own.

The grammar is the release's (open tag, close tag, `<|end_of_msg|>`; attribute values in four text segments). Only the
part the nano model needs is here: text messages, thinking effort, tool declarations, tool calls and tool results.
Pure Python; the tokenizer is passed in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

SPECIAL_TOKENS = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>",
    "[start_header_id]", "[end_header_id]", "[EOT]",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<osagent_mode>", "[UNK]", "[PAD]",
)  # fmt: skip
"""The K3 special tokens in the order of their ids in the release."""

EFFORTS = ("low", "high", "max")

Message = dict[str, Any]


class Segment(NamedTuple):
    """One piece of a rendered conversation.

    `part` says what the piece is for the loss: "user" (anything the model does not write), "mark" (markup the assistant
    writes), "think", "response" or "call"; `message` is the index of the message it came from, -1 for system notes.
    """

    text: str
    is_markup: bool
    part: str
    message: int


class Encoder(Protocol):
    """What `encode` needs: the ids of plain text, and the id of a control token."""

    def text_ids(self, text: str) -> list[int]: ...

    def special_id(self, token: str) -> int: ...


class _Writer:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.part = "user"
        self.message = -1

    def mark(self, token: str) -> None:
        self.segments.append(Segment(token, True, self.part, self.message))

    def text(self, text: str, part: str | None = None) -> None:
        if text:
            self.segments.append(Segment(text, False, part or self.part, self.message))

    def open(self, tag: str, **attributes: str) -> None:
        self.mark("<|open|>")
        self.text(tag)
        for key, value in attributes.items():
            self.text(" " + key)
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.mark("<|sep|>")

    def close(self, tag: str) -> None:
        self.mark("<|close|>")
        self.text(tag)
        self.mark("<|sep|>")

    def end_message(self) -> None:
        self.close("message")
        self.mark("<|end_of_msg|>")

    def note(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end_message()


def _sorted_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (int, float)):
        return "number"
    return "array" if isinstance(value, list) else "object"


def _write_calls(out: _Writer, calls: Sequence[Message]) -> None:
    out.open("tools")
    for index, call in enumerate(calls, 1):
        function = call["function"]
        out.open("call", tool=function["name"], index=str(index))
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except json.JSONDecodeError:
                out.open("json", type="object")
                out.text(arguments, "call")
                out.close("json")
                arguments = {}
        for key, value in arguments.items():
            out.open("argument", key=key, type=_json_type(value))
            out.text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), "call")
            out.close("argument")
        out.close("call")
    out.close("tools")


def _write_assistant(out: _Writer, message: Message, thinking: bool) -> None:
    out.open("message", role="assistant")
    out.part = "mark"
    if thinking:
        out.open("think")
        reasoning = message.get("reasoning_content") or ""
        out.text(reasoning if reasoning.strip() else "", "think")
        out.close("think")
    out.open("response")
    out.text(message.get("content") or "", "response")
    out.close("response")
    if message.get("tool_calls"):
        _write_calls(out, message["tool_calls"])
    out.end_message()
    out.part = "user"


def _tool_results(run: Sequence[Message], calls: Sequence[Message]) -> list[tuple[str, str]]:
    """(tool name, content) of a run of tool messages, in call order when every id is known."""
    by_id = {call.get("id"): position for position, call in enumerate(calls)}
    ids = [message.get("tool_call_id") for message in run]
    if all(i in by_id for i in ids):
        order = sorted(run, key=lambda message: by_id[message["tool_call_id"]])
        return [(calls[by_id[m["tool_call_id"]]]["function"]["name"], m["content"]) for m in order]
    named = []
    for position, message in enumerate(run):
        fallback = calls[position]["function"]["name"] if position < len(calls) else ""
        named.append((message.get("name") or message.get("tool") or fallback, message["content"]))
    return named


DECLARE_HEADER = "# Tools\nHere are the available tools, described in JSONSchema."


def render(
    messages: Sequence[Message],
    *,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tools: Sequence[Message] = (),
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """Segments of a conversation, ending (unless told otherwise) where the assistant starts to write."""
    out = _Writer()
    if tools:
        out.note("tool-declare", f"{DECLARE_HEADER}\n\n```json\n{_sorted_json(list(tools))}\n```")
    if thinking and thinking_effort:
        if thinking_effort not in EFFORTS:
            raise ValueError(f"thinking effort {thinking_effort!r} is not one of {', '.join(EFFORTS)}")
        out.note(
            "thinking-effort",
            "`thinking_effort` guides on how much to think in your thinking channel "
            "(not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
            f"Now the system is invoked with `thinking_effort={thinking_effort}`.",
        )
    calls: Sequence[Message] = ()
    index = 0
    while index < len(messages):
        message = messages[index]
        out.message = index
        role = message["role"]
        if role == "assistant":
            _write_assistant(out, message, thinking)
            calls = message.get("tool_calls") or ()
            index += 1
        elif role == "tool":
            end = index
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            for position, (name, content) in enumerate(_tool_results(messages[index:end], calls), 1):
                out.open("message", role="tool", tool=name, index=str(position))
                out.text(content)
                out.end_message()
            index = end
        elif role in ("user", "system"):
            out.open("message", role=role, **({"name": message["name"]} if message.get("name") else {}))
            content = message["content"]
            for piece in [content] if isinstance(content, str) else [part["text"] for part in content]:
                out.text(piece)
            out.end_message()
            index += 1
        else:
            raise ValueError(f"unknown role {role!r}; it must be system, user, assistant or tool")
    if add_generation_prompt:
        out.message = len(messages)
        out.open("message", role="assistant")
        out.open("think" if thinking else "response")
    return out.segments


def encode(segments: Sequence[Segment], encoder: Encoder) -> list[int]:
    """Token ids: control tokens by their id, everything else as plain text, one segment at a time."""
    ids: list[int] = []
    for segment in segments:
        if segment.is_markup:
            ids.append(encoder.special_id(segment.text))
        else:
            ids.extend(encoder.text_ids(segment.text))
    return ids
