"""The prompt format of Kimi K2 and Kimi-Linear: flat turns of control tokens.

    turn    = <|im_user|> | <|im_assistant|> | <|im_system|>, then speaker <|im_middle|> body <|im_end|>
    calls   = <|tool_calls_section_begin|> call* <|tool_calls_section_end|>, after the assistant's text
    call    = <|tool_call_begin|> functions.NAME:N <|tool_call_argument_begin|> JSON <|tool_call_end|>

Everything between two control tokens is one segment. N counts the calls of the conversation, and `functions.NAME:N` is
the only place a function's name stands: it is the model's own id of the call. Clients get other ids, which never enter
the prompt; an id of another shape there makes later calls lose their names. There is no channel for reasoning: that of
past turns is left out.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from serai.runtime.chat.conversation import (
    NO_NOTES,
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
from serai.runtime.chat.k2_grammar import k2_grammar
from serai.runtime.chat.k2_reply import K2ReplyParser
from serai.runtime.chat.k2_tokens import (
    ARGUMENT_BEGIN,
    ASSISTANT,
    CALL_BEGIN,
    CALL_END,
    END,
    END_OF_TEXT,
    MIDDLE,
    SECTION_BEGIN,
    SECTION_END,
    SYSTEM,
    USER,
)
from serai.runtime.chat.messages import ImagePart, Message, Tool, ToolCall, read_tools
from serai.runtime.chat.segments import Segment, SegmentWriter, Tokenizer

# The model's own words, put where a conversation begins without a system message.
_DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."

_MODEL_ID = re.compile(r"functions\.(?P<name>.+):(?P<number>[0-9]{1,9})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class K2Markup:
    """The `Markup` of Kimi K2 and Kimi-Linear.

    There are no notes: `tool_choice` and `response_format` render nothing, a grammar has to hold them.
    """

    id: str = "kimi-k2/1"
    stop_names: tuple[str, ...] = (END, END_OF_TEXT)

    def options(
        self, *, tools: Sequence[Tool] | None = None, thinking: bool | None = None, thinking_effort: str | None = None
    ) -> PromptOptions:
        options = PromptOptions(read_tools(tools), bool(thinking), thinking_effort)
        _refuse_thinking(options.thinking)
        if thinking_effort is not None:
            raise PromptInvalid("thinking_effort is set, but this model has no thinking channel; leave it out")
        return options

    def begin(self, options: PromptOptions) -> Rendered:
        _refuse_thinking(options.thinking)
        out = SegmentWriter()
        if options.tools:
            declared = json.dumps(list(options.tools), ensure_ascii=False, separators=(",", ":"))
            _write_turn(out, SYSTEM, "tool_declare", declared)
        return Rendered(out.finish(), Cursor(thinking=False, tools_declared=bool(options.tools)))

    def append(self, cursor: Cursor, messages: Sequence[Message]) -> Rendered:
        out = SegmentWriter(cursor.missing)
        cursor = replace(cursor, missing=(), reply=None)
        if messages:
            cursor = _speak(out, cursor, begins_with_system=messages[0].role == "system")
        for run in runs(messages):
            with told_of(run.index):
                cursor = _write_run(out, cursor, run)
        return Rendered(out.finish(), cursor)

    def prompt(self, cursor: Cursor, notes: Notes = NO_NOTES, *, thinking: bool | None = None) -> Rendered:
        _refuse_thinking(bool(thinking))
        if notes.tool_choice == "required" and not cursor.tools_declared:
            raise PromptInvalid("tool_choice is required, but the conversation declares no tools to choose from")
        out = SegmentWriter(cursor.missing)
        cursor = _speak(out, cursor, begins_with_system=False)
        _write_head(out, ASSISTANT, "assistant")
        missing = (Segment(END, markup=True),)
        return Rendered(out.finish(), replace(cursor, missing=missing, reply="response", calls=(), results=0))

    def parser(self, cursor: Cursor, tokenizer: Tokenizer, mint: MintCallId) -> ReplyParser:
        return K2ReplyParser(cursor, tokenizer, mint)

    def grammar(self, cursor: Cursor, held: Held, tokenizer: Tokenizer) -> str:
        return k2_grammar(cursor, held, tokenizer)


def _refuse_thinking(thinking: bool) -> None:
    if thinking:
        raise PromptInvalid("thinking is set, but this model has no thinking channel; set thinking=False")


def _speak(out: SegmentWriter, cursor: Cursor, *, begins_with_system: bool) -> Cursor:
    """The first message of all is a system message: the model's own words if nobody else's."""
    if not cursor.spoken and not begins_with_system:
        _write_turn(out, SYSTEM, "system", _DEFAULT_SYSTEM)
    return replace(cursor, spoken=True)


def _write_run(out: SegmentWriter, cursor: Cursor, run: Run) -> Cursor:
    first = run.messages[0]
    match first.role:
        case "tool":
            _write_results(out, cursor, run)
            return replace(cursor, results=cursor.results + len(run.messages))
        case "assistant":
            calls, next_call = number_calls(first.calls, cursor.next_call)
            _write_head(out, ASSISTANT, first.name or "assistant")
            out.text(_body(first))
            _write_calls(out, first.calls, calls)
            out.markup(END)
            return replace(cursor, calls=calls, results=0, next_call=next_call)
        case "system":
            if first.tools:
                raise PromptInvalid("this model reads tools at the start only; declare them with the conversation")
            _write_turn(out, SYSTEM, first.name or "system", _body(first))
            return replace(cursor, results=0)
        case "user":
            _write_turn(out, USER, first.name or "user", _body(first))
            return replace(cursor, results=0)
        case _:
            assert_never(first.role)


def number_calls(calls: Sequence[ToolCall], next_call: int) -> tuple[tuple[PlacedCall, ...], int]:
    """Gives each call of a past turn the id the model reads; returns them and the number of the call after them.

    A client's id that is one of the model's own is kept, unless an earlier call may have that number already.
    """
    placed = []
    for call in calls:
        own = _MODEL_ID.fullmatch(call.id or "")
        kept = own is not None and own["name"] == call.name and int(own["number"]) >= next_call
        number = int(own["number"]) if own is not None and kept else next_call
        placed.append(PlacedCall(call.name, call.id, f"functions.{call.name}:{number}"))
        next_call = number + 1
    return tuple(placed), next_call


def _write_calls(out: SegmentWriter, calls: Sequence[ToolCall], placed: Sequence[PlacedCall]) -> None:
    if not calls:
        return
    out.markup(SECTION_BEGIN)
    for call, place in zip(calls, placed, strict=True):
        call.arguments_object()  # raises for JSON that is no object; broken JSON stands as the model wrote it
        out.markup(CALL_BEGIN)
        out.text(place.model_id or call.name)
        out.markup(ARGUMENT_BEGIN)
        out.text(call.arguments.strip() or "{}")
        out.markup(CALL_END)
    out.markup(SECTION_END)


def _write_results(out: SegmentWriter, cursor: Cursor, run: Run) -> None:
    for result in place_results(run, cursor):
        with told_of(result.index):
            call = result.call or result.call_at_place
            returned = (call.model_id if call else None) or result.message.call_id or result.message.name
            if returned is None:
                raise PromptInvalid(
                    "this tool result answers no call of the turn before it; give the tool_call_id of the call, or put "
                    "it after the assistant message that made the call"
                )
            body = f"## Return of {returned}\n{_body(result.message)}"
            _write_turn(out, SYSTEM, result.message.name or "tool", body)


def _write_turn(out: SegmentWriter, head: str, speaker: str, body: str) -> None:
    _write_head(out, head, speaker)
    out.text(body)
    out.markup(END)


def _write_head(out: SegmentWriter, head: str, speaker: str) -> None:
    out.markup(head)
    out.text(speaker)
    out.markup(MIDDLE)


def _body(message: Message) -> str:
    for part in message.parts:
        if isinstance(part, ImagePart):
            raise PromptInvalid(f"the image {part.source[:60]!r} can't be read by this model; send text")
    return message.text
