"""Reading messages: what is taken, and that every refusal names the message."""

from typing import Any

import pytest

from serai.runtime.chat import ImagePart, Message, PromptInvalid, TextPart, ToolCall, read_messages, read_tools


def _call(arguments: Any, name: Any = "f") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_content_is_a_string_or_parts() -> None:
    assert Message.from_dict({"role": "user", "content": "a"}).parts == (TextPart("a"),)
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": ""}, {"type": "text", "text": "b"}]
    assert Message.from_dict({"role": "user", "content": parts}).text == "ab"
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    assert Message.from_dict({"role": "user", "content": [image]}).parts == (ImagePart("http://x/y.png"),)


def test_unknown_keys_and_nulls_are_ignored() -> None:
    data: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "tool_calls": None,
        "refusal": None,
        "annotations": [],
        "name": None,
    }
    assert Message.from_dict(data) == Message("assistant")


def test_a_message_value_passes_as_it_is() -> None:
    message = Message.user("a")
    assert read_messages([message, {"role": "user", "content": "a"}]) == (message, message)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("hello", "must be an object, not a string"),
        ({"content": "a"}, "role is None"),
        ({"role": "function", "content": "a"}, "role is 'function'; it must be system, developer"),
        ({"role": "user"}, "a user message needs content"),
        ({"role": "tool", "content": None}, "a tool message needs content"),
        ({"role": "user", "content": 7}, "content must be a string or a list of parts, not a number"),
        ({"role": "user", "content": ["a"]}, "content part 0 must be an object"),
        ({"role": "user", "content": [{"type": "text"}]}, "the text of content part 0 must be a string, not null"),
        ({"role": "user", "content": [{"type": "video"}]}, "content part 0 is of type 'video'"),
        ({"role": "user", "content": "\ud800"}, "lone surrogate \\(U\\+D800\\) at character 0"),
        ({"role": "user", "content": "a", "name": 3}, "name must be a string, not a number"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls must be a list, not an object"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "tool call 0 must be an object with a function object"),
        (
            {"role": "assistant", "tool_calls": [_call("{}", name=None)]},
            "function name of tool call 0 must be a string",
        ),
        ({"role": "system", "tools": {}}, "tools must be a list, not an object"),
        ({"role": "system", "tools": [{"type": "function"}]}, "tool 0 is of type function but has no function.name"),
    ],
)
def test_a_refusal_names_the_message_and_what_is_wrong(data: Any, sentence: str) -> None:
    with pytest.raises(PromptInvalid, match=rf"^message 1: .*{sentence}") as caught:
        read_messages([{"role": "user", "content": "fine"}, data])
    assert caught.value.message_index == 1


def test_messages_must_be_a_list() -> None:
    with pytest.raises(PromptInvalid, match="messages must be a list, not an object"):
        read_messages({"role": "user", "content": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", ["[1]", "null", '"x"', "7", "true", [1]])
def test_arguments_that_are_json_but_no_object_are_refused(arguments: Any) -> None:
    """B89"""
    with pytest.raises(PromptInvalid, match=r"^message 0: the arguments of 'f' are .*must be a JSON object") as caught:
        read_messages([{"role": "assistant", "tool_calls": [_call(arguments)]}])
    assert caught.value.message_index == 0


@pytest.mark.parametrize(
    ("arguments", "text", "value"),
    [
        ('{"city": "Par', '{"city": "Par', None),
        ("", "", {}),
        (None, "", {}),
        (" \n", " \n", {}),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("[" * 100_000, "[" * 100_000, None),
        ('{"n": ' + "9" * 5000 + "}", '{"n": ' + "9" * 5000 + "}", None),
        ('{"n": -1e999}', '{"n": -1e999}', None),
        ('{"n": NaN}', '{"n": NaN}', None),
    ],
)
def test_broken_or_missing_arguments_are_kept_as_they_are(arguments: Any, text: str, value: Any) -> None:
    """B89"""
    (message,) = read_messages([{"role": "assistant", "tool_calls": [_call(arguments)]}])
    assert message.calls == (ToolCall("f", text, "c1"),)
    assert message.calls[0].arguments_object() == value


def test_arguments_that_spell_half_a_character_are_refused() -> None:
    with pytest.raises(PromptInvalid, match=r"^message 0: .*lone surrogate"):
        read_messages([{"role": "assistant", "tool_calls": [_call('{"a": "\\ud83d"}')]}])


def test_tools_are_copied_so_that_later_changes_dont_reach_a_prompt() -> None:
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (copy,) = read_tools([tool])
    tool["function"]["name"] = "g"
    assert copy["function"]["name"] == "f"
    assert read_tools(None) == ()


def test_a_tool_that_is_no_json_is_refused() -> None:
    with pytest.raises(PromptInvalid, match=r"^tool 0 can't be written as JSON"):
        read_tools([{"type": "function", "function": {"name": "f", "default": float("nan")}}])
