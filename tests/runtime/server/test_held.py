"""What a request holds its reply to, as a client sees it: JSON by schema, calls that must come or may not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.sampling.grammar import MOST_WHITESPACE
from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import K2, ReplyModel
from tests.runtime.server.test_chat import TOOL, joined

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
FIND = {"type": "function", "function": {"name": "find"}}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
RAMBLES = "so</think><response>I would rather talk</response></message>!"
MANY = {"max_tokens": 600, "seed": 3}


@pytest.mark.parametrize("effort", ["high", "none"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
async def test_a_call_that_must_come_comes(choice: Any, effort: str) -> None:
    """A model that has more to say is held to the call, ends the message after it, and can go on from there."""
    thinks = effort == "high"
    name = "look" if choice == "required" else "find"
    opened = "hm</think><response></response>" if thinks else "</response>"
    call_ = f'<call tool="{name}" index="1"><argument key="a" type="number">3</argument></call>'
    async with serving_model(ReplyModel(lambda prompt: f"{opened}<tools>{call_}</tools></message>!")) as client:
        tools = [TOOL, FIND]
        body = {"messages": [user("hi")], "tools": tools, "tool_choice": choice, "reasoning_effort": effort, **MANY}
        whole = await client.post("/v1/chat/completions", body)
        message = whole["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, {"a": 3})
        assert message.get("reasoning_content", "") == ("hm" if thinks else "")
        said = joined(await client.stream("/v1/chat/completions", body))
        assert [one["name"] for one in said["tool_calls"].values()] == [name]
        assert whole["choices"][0]["finish_reason"] == said["finish"] == "tool_calls"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "x"}
        again = await client.chat(user("hi"), message, result, tools=tools, reasoning_effort=effort)
        known = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert known > 0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
@pytest.mark.parametrize("family", ["kimi_k3", K2])
async def test_whatever_the_model_would_say_it_calls_with_what_the_schema_allows(choice: Any, family: str) -> None:
    model = ReplyModel(lambda prompt: RAMBLES if family != K2 else "I would rather talk<|im_end|>", family=family)
    async with serving_model(model) as client:
        body = {"input": "hi", "tools": [WEATHER], "tool_choice": choice, "seed": 3, "max_output_tokens": 600}
        made = await client.post("/v1/responses", body)
        assert made["status"] == "completed"
        calls = [item for item in made["output"] if item["type"] == "function_call"]
        assert calls
        assert [item["type"] for item in made["output"] if item["type"] == "message"] == []
        for call in calls:
            arguments = json.loads(call["arguments"])
            assert call["name"] == "weather"
            assert set(arguments) == {"city", "days"}
            assert arguments["days"] in (1, 2, 3)
            assert len(arguments["city"]) <= 9
        if choice != "required":
            assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["kimi_k3", K2])
async def test_an_answer_is_what_the_schema_says(family: str, stream: bool) -> None:
    model = ReplyModel(lambda prompt: RAMBLES if family != K2 else "I would rather talk<|im_end|>", family=family)
    async with serving_model(model) as client:
        body = {"messages": [user("hi")], "response_format": JSON_SCHEMA, **MANY}
        if stream:
            said = joined(await client.stream("/v1/chat/completions", body))
            text, finish = said["content"], said["finish"]
        else:
            choice = (await client.post("/v1/chat/completions", body))["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
        value = json.loads(text)
        assert set(value) == {"ok", "n"}
        assert isinstance(value["ok"], bool)
        assert value["n"] in (1, 2)
        assert finish == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["json_schema", "call"])
@pytest.mark.parametrize("family", ["kimi_k3", K2])
async def test_a_model_that_would_only_write_white_space_answers_all_the_same(
    family: str, form: str, stream: bool
) -> None:
    """B97: valid JSON in bounded tokens, no long run of white space in it and nothing after it."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    function = {"name": "f", "strict": True, "parameters": schema}
    ways: dict[str, Any] = {
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        "call": {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    }
    spaces = " " * 2_000
    model = ReplyModel(lambda _: f"</think><response>{spaces}" if family != K2 else spaces, family=family)
    async with serving_model(model) as client:
        body = {"messages": [user("hi")], "max_tokens": 400, "temperature": 0, **ways[form]}
        if stream:
            said = joined(await client.stream("/v1/chat/completions", body))
            text, finish = said["content"], said["finish"]
            calls = [call["arguments"] for call in said["tool_calls"].values()]
        else:
            choice = (await client.post("/v1/chat/completions", body))["choices"][0]
            text, finish = choice["message"]["content"], choice["finish_reason"]
            calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
        assert finish == ("tool_calls" if form == "call" else "stop")
        written = calls[0] if form == "call" else text
        assert json.loads(written)["n"] in (1, 2)
        assert max(map(len, re.findall(r"\s+", written)), default=0) <= MOST_WHITESPACE
        assert written.endswith("}"), "nothing follows the object"


async def test_responses_are_held_by_text_format() -> None:
    async with serving_model(ReplyModel(lambda prompt: RAMBLES)) as client:
        form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
        made = await client.post("/v1/responses", {"input": "hi", "text": {"format": form}, "seed": 3})
        (message,) = (item for item in made["output"] if item["type"] == "message")
        assert set(json.loads(message["content"][0]["text"])) == {"ok", "n"}
        assert made["text"]["format"]["name"] == "answer"


async def test_json_object_is_an_object() -> None:
    said = 'so</think><response>[1, {"a": [1, 2]}]</response></message>!'
    async with serving_model(ReplyModel(lambda prompt: said)) as client:
        whole = await client.chat(user("hi"), response_format={"type": "json_object"}, max_tokens=40, temperature=0)
        assert whole["choices"][0]["message"]["content"].startswith("{")


async def test_calls_that_were_forbidden_do_not_come() -> None:
    calls = 'so</think><response>no</response><tools><call tool="look" index="1"></call></tools></message>!'
    async with serving_model(ReplyModel(lambda prompt: calls)) as client:
        whole = await client.chat(user("hi"), tools=[TOOL], tool_choice="none", max_tokens=100)
        choice = whole["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == "no"
        assert choice["finish_reason"] == "stop"
        free = await client.chat(user("hi"), tools=[TOOL], max_tokens=100)
        assert free["choices"][0]["finish_reason"] == "tool_calls", "it would have called"


def several(*names: str) -> str:
    calls = "".join(f'<call tool="{name}" index="{place}"></call>' for place, name in enumerate(names, 1))
    return f"so</think><response></response><tools>{calls}</tools></message>!"


async def test_some_of_the_tools_may_be_allowed() -> None:
    model = ReplyModel(lambda prompt: several("look"))
    async with serving_model(model) as client:
        for shape in (
            {"mode": "required", "tools": [{"type": "function", "name": "find"}]},
            {"allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "find"}}]}},
        ):
            choice = {"type": "allowed_tools", **shape}
            whole = await client.chat(user("hi"), tools=[TOOL, FIND], tool_choice=choice, **MANY)
            names = {call["function"]["name"] for call in whole["choices"][0]["message"]["tool_calls"]}
            assert names == {"find"}
        none = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "gone"}]}
        refused = await client.call(
            "POST", "/v1/chat/completions", {"messages": [user("hi")], "tools": [TOOL], "tool_choice": none}
        )
        assert (refused.status, (await refused.body())["error"]["param"]) == (400, "tool_choice")


async def test_calls_are_one_at_a_time_when_asked() -> None:
    async with serving_model(ReplyModel(lambda prompt: several("look", "look"))) as client:
        two = await client.chat(user("hi"), tools=[TOOL])
        assert len(two["choices"][0]["message"]["tool_calls"]) == 2
        one = await client.chat(user("hi"), tools=[TOOL], parallel_tool_calls=False, **MANY)
        assert len(one["choices"][0]["message"]["tool_calls"]) == 1


async def test_arguments_of_a_strict_tool_are_held_where_the_model_chose_to_call() -> None:
    call = '<call tool="weather" index="1"><argument key="city" type="string">Constantinople</argument></call>'
    said = f"so</think><response></response><tools>{call}</tools></message>!"
    async with serving_model(ReplyModel(lambda prompt: said)) as client:
        whole = await client.chat(user("hi"), tools=[WEATHER], **MANY)
        (made, *_) = whole["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(made["function"]["arguments"])
        assert arguments["city"] == "Constanti"
        assert arguments["days"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]},
            "tools",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, None),
        ({"tools": [FIND], "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.mode"),
        ({"tools": [FIND], "tool_choice": {"type": "allowed_tools", "tools": "find"}}, "tool_choice.mode"),
    ],
)
async def test_what_can_not_be_held_is_refused_before_any_work(body: dict[str, Any], param: str | None) -> None:
    model = ReplyModel(lambda prompt: RAMBLES)
    async with serving_model(model) as client:
        refused = await client.call("POST", "/v1/chat/completions", {"messages": [user("hi")], **body})
        assert refused.status == 400
        assert (await refused.body())["error"]["param"] == param
        assert model.prompts == []


async def test_a_tool_that_is_not_strict_is_called_with_any_object_where_its_schema_can_not_be_held() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}}}
    async with serving_model(ReplyModel(lambda prompt: several("f"))) as client:
        whole = await client.chat(user("hi"), tools=[tool], tool_choice="required")
        assert [call["function"]["name"] for call in whole["choices"][0]["message"]["tool_calls"]] == ["f"]


async def test_a_tool_whose_schema_can_not_be_held_leaves_the_answers_schema_as_it_is() -> None:
    """And the other way round: it is named what is at fault."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}}}
    async with serving_model(ReplyModel(lambda prompt: RAMBLES)) as client:
        for seed in range(6):
            body = {"tools": [tool], "response_format": JSON_SCHEMA, "max_tokens": 900, "seed": seed}
            message = (await client.chat(user("hi"), **body))["choices"][0]["message"]
            if "tool_calls" in message:
                assert {call["function"]["name"] for call in message["tool_calls"]} == {"f"}
            else:
                assert set(json.loads(message["content"])) == {"ok", "n"}
        bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
        body = {"messages": [user("hi")], "tools": [tool], "response_format": bad}
        refused = await client.call("POST", "/v1/chat/completions", body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "response_format")


def of(member: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": member}, "required": ["a"], **more}


def nested(depth: int, more: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = more(schema)
    return schema


HOSTILE = {
    "definitions in a circle": of({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}]}}}),
    "definitions in a circle of two": of(
        {"$ref": "#/$defs/n"},
        **{"$defs": {"n": {"anyOf": [{"$ref": "#/$defs/m"}]}, "m": {"anyOf": [{"$ref": "#/$defs/n"}]}}},
    ),
    "a definition that is itself": of({"$ref": "#/$defs/n"}, **{"$defs": {"n": {"$ref": "#/$defs/n"}}}),
    "definitions that are a list": of({"$ref": "#/$defs/x"}, **{"$defs": ["x"]}),
    "a reference that is a number": of({"$ref": 5}),
    "a reference to nothing": of({"$ref": "#/$defs/gone"}),
    "required keys that are lists": {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
    "required keys that are nowhere": {"type": "object", "properties": {}, "required": ["a"]},
    "required that is a text": {"type": "object", "properties": {"a": {}}, "required": "a"},
    "a type that is a number": of({"type": 5}),
    "a type of lists": of({"type": [["x"]]}),
    "no type": of({"type": []}),
    "no alternatives": of({"anyOf": []}),
    "a type of numbers beside an enum": of({"enum": [1], "type": 5}),
    "an enum of none of its type": of({"enum": [1], "type": "string"}),
    "an enum that is a number": of({"enum": 5}),
    "lengths that cross": of({"type": "string", "minLength": 5, "maxLength": 2}),
    "a length that is a text": of({"type": "string", "minLength": "x"}),
    "a length below none": of({"type": "string", "maxLength": -1}),
    "a pattern that is none": of({"type": "string", "pattern": "("}),
    "a format that is a list": of({"type": "string", "format": ["x"]}),
    "a member that is a number": of(5),
    "members that are a list": {"type": "object", "properties": ["a"]},
    "half a character in a key": {"type": "object", "properties": {"\ud800": {}}},
    "half a character in an enum": of({"enum": ["\ud800"]}),
    "arrays in arrays": of(nested(450, lambda inner: {"type": "array", "items": inner})),
    "alternatives in alternatives": of(nested(400, lambda inner: {"anyOf": [inner]})),
    "alternatives in members": of(nested(200, lambda inner: of({"anyOf": [inner]}))),
}


@pytest.mark.parametrize("family", ["kimi_k3", K2])
@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
async def test_no_schema_whatever_is_the_servers_fault(schema: dict[str, Any], family: str) -> None:
    """Each is held, or taken for any object, or refused where it was promised: the server knows what to do."""
    said = RAMBLES if family != K2 else "I would rather talk<|im_end|>"
    async with serving_model(ReplyModel(lambda prompt: said, family=family)) as client:
        for strict in (False, True):
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
            body = {"messages": [user("hi")], "tools": [tool], "tool_choice": "required", "max_tokens": 20, "seed": 3}
            got = await client.call("POST", "/v1/chat/completions", body)
            assert got.status in (200, 400), got.json()
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        body = {"messages": [user("hi")], "response_format": form, "max_tokens": 20, "seed": 3}
        got = await client.call("POST", "/v1/chat/completions", body)
        assert got.status in (200, 400), got.json()


CALLS_LOOK = '<tools><call tool="look" index="1"></call></tools></message>!'


@pytest.mark.parametrize(
    ("choice", "said", "calls"),
    [
        ("required", RAMBLES, ["look"]),
        ({"type": "function", "function": {"name": "look"}}, RAMBLES, ["look"]),
        ("none", f"so</think><response>no</response>{CALLS_LOOK}", []),
        ("auto", f"so</think><response>no</response>{CALLS_LOOK}", ["look"]),
    ],
)
async def test_tools_that_a_message_declares_are_tools(choice: Any, said: str, calls: list[str]) -> None:
    declares = {"role": "system", "content": None, "tools": [TOOL]}
    async with serving_model(ReplyModel(lambda prompt: said)) as client:
        whole = await client.chat(declares, user("hi"), tool_choice=choice, parallel_tool_calls=False, **MANY)
        made = whole["choices"][0]["message"].get("tool_calls") or []
        assert [call["function"]["name"] for call in made] == calls


async def test_calls_that_were_forbidden_do_not_come_where_no_tools_are_declared() -> None:
    said = f"so</think><response>no</response>{CALLS_LOOK}"
    async with serving_model(ReplyModel(lambda prompt: said)) as client:
        whole = await client.chat(user("hi"), tool_choice="none", max_tokens=100)
        choice = whole["choices"][0]
        assert "tool_calls" not in choice["message"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("no", "stop")
        free = await client.chat(user("hi"), max_tokens=100)
        assert free["choices"][0]["finish_reason"] == "tool_calls", "it would have called"


async def test_choices_are_held_each(tmp_path: Path) -> None:
    async with serving_model(ReplyModel(lambda prompt: RAMBLES), store=tmp_path / "store") as client:
        body = {"messages": [user("hi")], "response_format": JSON_SCHEMA, "n": 4, **MANY}
        whole = await client.post("/v1/chat/completions", body)
        again = await client.post("/v1/chat/completions", body)
        texts = [choice["message"]["content"] for choice in whole["choices"]]
        assert [choice["message"]["content"] for choice in again["choices"]] == texts
        assert all(set(json.loads(text)) == {"ok", "n"} for text in texts)
        assert len(set(texts)) > 1


@pytest.mark.parametrize("then", ["previous_response_id", "messages"])
async def test_tools_that_an_earlier_message_declared_stay_tools(then: str) -> None:
    """A response that goes on from a conversation may be held to a tool that one of its messages had declared."""
    declares = {"role": "system", "content": None, "tools": [TOOL]}
    async with serving_model(ReplyModel(lambda prompt: RAMBLES)) as client:
        first = await client.chat(declares, user("hi"), **MANY)
        named = {"type": "function", "name": "look"}
        if then == "messages":
            said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            choice = {"type": "function", "function": {"name": "look"}}
            second = await client.chat(declares, user("hi"), said, user("look"), tool_choice=choice, **MANY)
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            calls = second["choices"][0]["message"]["tool_calls"]
            assert [call["function"]["name"] for call in calls] == ["look"]
            return
        id_ = "resp_" + first["id"].removeprefix("chatcmpl-")
        for _ in range(2):  # and those it made go on knowing it
            body = {"input": "look", "previous_response_id": id_, "tool_choice": named, "max_output_tokens": 2_000}
            made = await client.post("/v1/responses", body)
            id_ = made["id"]
            assert [item["name"] for item in made["output"] if item["type"] == "function_call"] == ["look"]
        wrong = {"input": "x", "previous_response_id": id_, "tool_choice": {"type": "function", "name": "other"}}
        refused = await client.call("POST", "/v1/responses", wrong)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "tool_choice")
