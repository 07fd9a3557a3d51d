"""Messages as values: what a conversation is made of, read from dicts in the shape of OpenAI's chat API."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, cast

from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.chat.json_text import json_value
from serai.runtime.chat.segments import require_unicode

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
Tool: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextPart:
    """A piece of a message's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture. Only one whose size in pixels is filled in can be rendered; this layer doesn't find it out."""

    source: str
    width: int | None = None
    height: int | None = None


Part: TypeAlias = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the assistant made. `arguments` is JSON text exactly as written, broken or empty as it may be."""

    name: str
    arguments: str = ""
    id: str | None = None

    def arguments_object(self) -> dict[str, Any] | None:
        """The arguments as an object ({} for none), or None if the text isn't JSON.

        Raises PromptInvalid for JSON that isn't an object: no format has a form for it.
        """
        if not self.arguments.strip():
            return {}
        try:
            value = json_value(self.arguments)
        except (ValueError, RecursionError):  # a number of 5,000 digits and 5,000 open brackets included
            return None
        if not isinstance(value, dict):
            raise PromptInvalid(f"the arguments of {self.name!r} are {_kind(value)}; they must be a JSON object")
        return value


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    `reasoning` and `calls` belong to the assistant, `call_id` (which call this answers) to a tool, `tools` to a system
    message that declares further tools; `name` names the speaker, of a tool message the tool.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    tools: tuple[Tool, ...] = ()

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @classmethod
    def system(cls, text: str) -> "Message":
        return cls("system", _text_parts(text))

    @classmethod
    def user(cls, text: str) -> "Message":
        return cls("user", _text_parts(text))

    @classmethod
    def assistant(cls, text: str, *, reasoning: str = "", calls: Sequence[ToolCall] = ()) -> "Message":
        return cls("assistant", _text_parts(text), reasoning=reasoning, calls=tuple(calls))

    @classmethod
    def tool(cls, text: str, *, call_id: str | None = None, name: str | None = None) -> "Message":
        return cls("tool", _text_parts(text), call_id=call_id, name=name)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, index: int = 0) -> "Message":
        """Reads an OpenAI chat message. Unknown keys are ignored; `developer` is another word for `system`.

        Raises PromptInvalid, with `index` as its `message_index`, for whatever can't be read.
        """
        return _Reader(index).message(data)


def read_messages(items: Sequence[Mapping[str, Any] | Message]) -> tuple[Message, ...]:
    """Reads a list of messages; a Message passes as it is. Raises PromptInvalid naming the index of a bad one."""
    if not isinstance(items, list | tuple):
        raise PromptInvalid(f"messages must be a list, not {_kind(items)}")
    return tuple(
        item if isinstance(item, Message) else Message.from_dict(item, index=index) for index, item in enumerate(items)
    )


def read_tools(items: Sequence[Tool] | None, *, message_index: int | None = None) -> tuple[Tool, ...]:
    """A private copy of a list of tool declarations. Raises PromptInvalid if one is no JSON object or has no name."""
    reader = _Reader(message_index)
    if items is None:
        return ()
    if not isinstance(items, list | tuple):
        raise reader.bad(f"tools must be a list, not {_kind(items)}")
    return tuple(reader.tool(item, place) for place, item in enumerate(items))


def join_split_turn(first: Message, second: Message) -> Message | None:
    """One message for an assistant's prose and its calls where they came as two, or None if these aren't such halves.

    Some gateways split one turn so; a model that sees the halves as two turns learns to stop after the prose.
    """
    if not first.role == second.role == "assistant":
        return None
    if first.calls or not second.calls or second.parts or (first.reasoning and second.reasoning):
        return None
    return replace(first, calls=second.calls, reasoning=first.reasoning or second.reasoning)


def _text_parts(text: str) -> tuple[Part, ...]:
    return (TextPart(text),) if text else ()


def _kind(value: object) -> str:
    """What a JSON value is, in words for an error."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence):
        return "a list"
    return f"a {type(value).__name__}"


class _Reader:
    """Reads foreign dicts, with the index of the message in every complaint."""

    def __init__(self, index: int | None) -> None:
        self._index = index

    def bad(self, what: str) -> PromptInvalid:
        return PromptInvalid(what, message_index=self._index)

    def message(self, data: object) -> Message:
        if not isinstance(data, Mapping):
            raise self.bad(f"it must be an object, not {_kind(data)}")
        role = data.get("role")
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant", "tool"):
            raise self.bad(f"role is {role!r}; it must be system, developer, user, assistant or tool")
        role = cast(Role, role)
        tools = read_tools(data.get("tools"), message_index=self._index) if role == "system" else ()
        content = data.get("content")
        if content is None and role != "assistant" and not tools:
            raise self.bad(f"a {role} message needs content, a string or a list of parts")
        message = Message(role, self._parts(content), name=self._optional_string(data, "name"), tools=tools)
        if role == "assistant":
            reasoning = self._optional_string(data, "reasoning_content") or self._optional_string(data, "reasoning")
            return replace(message, reasoning=reasoning or "", calls=self._calls(data.get("tool_calls")))
        if role == "tool":
            name = message.name or self._optional_string(data, "tool")
            return replace(message, name=name, call_id=self._optional_string(data, "tool_call_id"))
        return message

    def tool(self, data: object, place: int) -> Tool:
        if not isinstance(data, Mapping):
            raise self.bad(f"tool {place} must be an object, not {_kind(data)}")
        if data.get("type") == "function":
            function = data.get("function")
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise self.bad(f"tool {place} is of type function but has no function.name")
        text = self._json(data, f"tool {place}")
        return cast(Tool, json.loads(text))

    def _json(self, value: object, what: str) -> str:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.bad(f"{what} can't be written as JSON ({error})") from None
        require_unicode(text, message_index=self._index)
        return text

    def _string(self, value: object, what: str) -> str:
        if not isinstance(value, str):
            raise self.bad(f"{what} must be a string, not {_kind(value)}")
        require_unicode(value, message_index=self._index)
        return value

    def _optional_string(self, data: Mapping[str, Any], key: str) -> str | None:
        value = data.get(key)
        return None if value is None else self._string(value, key)

    def _parts(self, content: object) -> tuple[Part, ...]:
        if content is None:
            return ()
        if isinstance(content, str):
            return _text_parts(self._string(content, "content"))
        if not isinstance(content, list | tuple):
            raise self.bad(f"content must be a string or a list of parts, not {_kind(content)}")
        parts = (self._part(part, place) for place, part in enumerate(content))
        return tuple(part for part in parts if part != TextPart(""))

    def _part(self, part: object, place: int) -> Part:
        if not isinstance(part, Mapping):
            raise self.bad(f"content part {place} must be an object, not {_kind(part)}")
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text"):
            return TextPart(self._string(part.get("text"), f"the text of content part {place}"))
        if kind in ("image_url", "input_image"):
            source = part.get("image_url")
            url = source.get("url") if isinstance(source, Mapping) else source
            return ImagePart(self._string(url, f"the image_url of content part {place}"))
        raise self.bad(f"content part {place} is of type {kind!r}; it must be text or image_url")

    def _calls(self, calls: object) -> tuple[ToolCall, ...]:
        if calls is None:
            return ()
        if not isinstance(calls, list | tuple):
            raise self.bad(f"tool_calls must be a list, not {_kind(calls)}")
        return tuple(self._call(call, place) for place, call in enumerate(calls))

    def _call(self, call: object, place: int) -> ToolCall:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise self.bad(f"tool call {place} must be an object with a function object")
        name = self._string(function.get("name"), f"the function name of tool call {place}")
        arguments = function.get("arguments")
        if arguments is None:
            text = ""
        elif isinstance(arguments, str):
            text = self._string(arguments, f"the arguments of tool call {place}")
        else:
            text = self._json(arguments, f"the arguments of tool call {place}")
        result = ToolCall(name, text, self._optional_string(call, "id"))
        try:
            value = result.arguments_object()
        except PromptInvalid as error:
            raise self.bad(str(error)) from None
        if value:
            self._json_text(value)
        return result

    def _json_text(self, value: dict[str, Any]) -> None:
        """JSON can spell with escapes what no text can hold."""
        require_unicode(json.dumps(value, ensure_ascii=False), message_index=self._index)
