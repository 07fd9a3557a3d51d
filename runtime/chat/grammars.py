"""What a reply is held to, and the parts of grammars that both prompt formats share.

A grammar covers a whole reply, from the end of its generation prompt to the stop token. Structure is spelled in token
ids, exactly those the renderer would write; text is whatever ordinary tokens spell, so no text can end early.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.chat.messages import Tool
from serai.runtime.chat.segments import Segment, Tokenizer, encode
from serai.runtime.sampling.grammar import ids_rule

MOST_CALLS = 16
"""Calls of one reply; each number of a call is a rule of its own."""

TEXT = "TEXT: /(?s:.*)/"
"""Any text, by the name `TEXT`: control tokens are never part of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a reply must be.

    `schema` is what its text must be as JSON (None: any text). `tools` are those it may call, at least `least_calls`
    and at most `most_calls` of them.
    """

    schema: Mapping[str, Any] | bool | None = None
    tools: tuple[Tool, ...] = ()
    least_calls: int = 0
    most_calls: int = MOST_CALLS

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.most_calls > 0


def spelled(segments: Sequence[Segment], tokenizer: Tokenizer) -> str:
    """Segments as the tokens the renderer makes of them."""
    return ids_rule(encode(segments, tokenizer))


def function_of(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    """A tool's name and the schema of its arguments, {} for any object."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise PromptInvalid(f"the parameters of {function['name']!r:.80} must be a JSON schema, an object")
    return function["name"], parameters


def as_object(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with its type said: arguments are always an object."""
    return {**parameters, "type": "object"}


def run_of_calls(least: int, most: int) -> str:
    """The rule of the calls in a section, each by its number: `call_1`, `call_2` and so on, the later ones only after
    those before. A section has one at least: a reply with neither text nor a call would answer nothing."""
    rule = ""
    for number in range(max(most, 1), 0, -1):
        inner = f"call_{number} {rule}".strip()
        rule = inner if number <= max(least, 1) else f"[{inner}]"
    return rule
