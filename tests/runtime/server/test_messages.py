"""Anthropic's Messages API as a client sees it, over a model whose replies the test writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.server.callers import Caller, Key
from serai.runtime.server.messages_request import UNPARSED, read_messages_request
from serai.runtime.server.options import ServerOptions
from tests.runtime.server.client import Client, serving_model, user
from tests.runtime.server.replies import K2, K3, ReplyModel

pytestmark = pytest.mark.anyio

HELLO = "well</think><response>hello</response></message>!"
CALLS = (
    "so</think><response>I look.</response><tools>"
    '<call tool="look" index="1"><argument key="at" type="string">a</argument></call>'
    '<call tool="find" index="2"></call></tools></message>!'
)
PATH = "/v1/messages"
TOOLS = [
    {"name": name, "description": "", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
    for name in ("look", "find")
]
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1_024}}


def asks(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 400, "messages": list(messages), **more}


async def streamed(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which has the name that its data has."""
    exchange = await client.call("POST", PATH, {**body, "stream": True})
    assert exchange.status == 200, exchange.json()
    events = []
    for chunk in exchange.chunks:
        name, _, data = chunk.decode().strip().partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make, by the rules of the API: one block at a time, every one begun and stopped."""
    message: dict[str, Any] = events[0]["message"]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    open_: int | None = None
    arguments = ""
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert open_ is None
                assert event["index"] == len(message["content"])
                open_, arguments = event["index"], ""
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_
                block, delta = message["content"][open_], event["delta"]
                kinds = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
                name = kinds[delta["type"]]
                if name == "partial_json":
                    arguments += delta[name]
                else:
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_
                block = message["content"][open_]
                if block["type"] == "tool_use":
                    block["input"] = json.loads(arguments or "{}")
                open_ = None
            case "message_delta":
                assert open_ is None
                message |= event["delta"]
                message["usage"] = event["usage"]
            case other:
                raise AssertionError(other)
    return message


async def test_a_reply_is_blocks_of_thinking_and_text() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        message = await client.post(PATH, asks(user("hi"), **THINKS))
        assert message["content"] == [
            {"type": "thinking", "thinking": "well", "signature": ""},
            {"type": "text", "text": "hello"},
        ]
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
        assert message["id"].startswith("msg_")


async def test_without_being_asked_to_it_does_not_think() -> None:
    model = ReplyModel(lambda prompt: HELLO.partition("</think>")[2])
    async with serving_model(model) as client:
        message = await client.post(PATH, asks(user("hi")))
        assert [block["type"] for block in message["content"]] == ["text"]
        thought = await client.post(PATH, asks(user("hi"), thinking={"type": "disabled"}))
        assert thought["content"] == message["content"]


async def test_a_stream_adds_up_to_the_whole_message() -> None:
    async with serving_model(ReplyModel(lambda prompt: CALLS)) as client:
        body = asks(user("look"), tools=TOOLS, **THINKS)
        whole, pieces = await client.post(PATH, body), added_up(await streamed(client, body))
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        calls = [(block["name"], block["input"]) for block in whole["content"][2:]]
        assert calls == [("look", {"at": "a"}), ("find", {})]
        assert whole["stop_reason"] == pieces["stop_reason"] == "tool_use"
        for one, other in zip(whole["content"], pieces["content"], strict=True):
            assert {**one, "id": ""} == {**other, "id": ""}


async def test_what_is_said_within_a_call_is_told_after_it() -> None:
    """A model that slips breaks no block: the call's arguments come whole, in the block that was opened for them."""
    call = '<call tool="look" index="1">oh<argument key="at" type="string">a</argument>well</call>'
    slips = f"so</think><response></response><tools>{call}</tools></message>!"
    async with serving_model(ReplyModel(lambda prompt: slips)) as client:
        body = asks(user("look"), tools=TOOLS, **THINKS)
        pieces = added_up(await streamed(client, body))
        kinds = [block["type"] for block in pieces["content"]]
        assert kinds[:2] == ["thinking", "tool_use"]
        assert pieces["content"][1]["input"] == {"at": "a"}
        said = "".join(block["text"] for block in pieces["content"] if block["type"] == "text")
        whole = await client.post(PATH, body)
        assert said == "".join(block["text"] for block in whole["content"] if block["type"] == "text")


def test_what_no_object_was_made_of_is_the_same_text_again() -> None:
    told = {"type": "tool_use", "id": "c", "name": "look", "input": {UNPARSED: '{"at": '}}
    body = {"model": "m", **asks(user("look"), {"role": "assistant", "content": [told]}, user("go on"))}
    request = read_messages_request(body, Caller(), stored=True, counts=False)
    assert request.ask.messages[1].calls[0].arguments == '{"at": '


def test_no_effort_is_no_thinking() -> None:
    body = {"model": "m", **asks(user("hi"), output_config={"effort": "none"}, **THINKS)}
    assert read_messages_request(body, Caller(), stored=True, counts=False).ask.setting.thinking is False


async def test_results_go_to_the_calls_they_answer_and_only_what_is_new_is_read(tmp_path: Path) -> None:
    model = ReplyModel(lambda prompt: HELLO if "RESULT" in prompt else CALLS)
    async with serving_model(model, store=tmp_path) as client:
        body = asks(user("please look"), tools=TOOLS, system=[{"type": "text", "text": "Be brief."}], **THINKS)
        first = await client.post(PATH, body)
        uses = [block for block in first["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": uses[1]["id"], "content": [{"type": "text", "text": "RESULT two"}]},
            {"type": "tool_result", "tool_use_id": uses[0]["id"], "content": "RESULT one"},
            {"type": "text", "text": "And now?"},
        ]
        answer = {"role": "assistant", "content": first["content"]}
        second = await client.post(
            PATH, {**body, "messages": [user("please look"), answer, {"role": "user", "content": results}]}
        )
        assert second["content"][-1] == {"type": "text", "text": "hello"}
        prompt = model.prompts[-1]
        assert prompt.index("Be brief.") < prompt.index("please look")
        assert prompt.index("RESULT one") < prompt.index("RESULT two") < prompt.index("And now?")
        used = first["usage"]
        read = used["input_tokens"] + used["cache_read_input_tokens"] + used["output_tokens"]
        assert second["usage"]["cache_read_input_tokens"] >= read - 1


async def test_why_a_reply_ended() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        stopped = await client.post(PATH, asks(user("hi"), stop_sequences=["zz", "ll"], **THINKS))
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "ll")
        assert stopped["content"][-1]["text"] == "he"
        cut = await client.post(PATH, {**asks(user("hi"), **THINKS), "max_tokens": 2})
        assert cut["stop_reason"] == "max_tokens"
        assert cut["usage"]["output_tokens"] == 2


async def test_a_number_beyond_all_numbers_is_told_as_text() -> None:
    """A model may write one where a schema allows any number, and JSON has no form for what Python reads it as."""
    arguments = '{"at": 1e999}'
    call = f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    reply = f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>!"
    async with serving_model(ReplyModel(lambda prompt: reply, family=K2)) as client:
        message = await client.post(PATH, asks(user("hi"), tools=TOOLS))
        assert message["content"][-1]["input"] == {UNPARSED: arguments}


@pytest.mark.parametrize("family", [K2, K3])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
async def test_a_call_that_must_come_comes(choice: dict[str, Any], family: str) -> None:
    async with serving_model(ReplyModel(lambda prompt: "no, I'd rather not!", family=family)) as client:
        message = await client.post(PATH, asks(user("hi"), tools=TOOLS, tool_choice=choice))
        assert message["stop_reason"] in ("tool_use", "max_tokens")
        assert message["content"][0]["type"] == "tool_use"


async def test_an_answer_is_what_the_schema_says() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    async with serving_model(ReplyModel(lambda prompt: "whatever!")) as client:
        for body in ({"output_config": {"format": form}}, {"output_format": form}):
            message = await client.post(PATH, asks(user("hi"), **body))
            assert json.loads(message["content"][0]["text"])["n"] in (1, 2)


async def test_tokens_are_counted_without_a_reply() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        body = asks(user("hi"), tools=TOOLS, system="Be brief.", **THINKS)
        counted = await client.post(f"{PATH}/count_tokens", {**body, "max_tokens": None})
        assert client.service.runtime.counters.prefilled_tokens == 0
        message = await client.post(PATH, body)
        usage = message["usage"]
        assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": [user("hi")]}, "max_tokens is required"),
        (asks(), "messages is required"),
        (asks({"role": "system", "content": "x"}), "messages[0].role is 'system'"),
        (asks({"role": "user", "content": 7}), "messages[0].content must be"),
        (
            asks({"role": "user", "content": [{"type": "image", "source": {}}]}),
            "messages[0].content[0].type is 'image'",
        ),
        (asks(user("hi"), {"role": "assistant", "content": "I"}), "the last message must be the user's"),
        (asks(user("hi"), tools=[{"type": "web_search_20250305", "name": "w"}]), "only custom tools"),
        (asks(user("hi"), tools=[{"name": "w"}]), "tools[0].input_schema is required"),
        (asks(user("hi"), tool_choice={"type": "some"}), "tool_choice.type is 'some'"),
        (asks(user("hi"), tool_choice={"type": "any"}), "no tools are declared"),
        (asks(user("hi"), thinking={"type": "deep"}), "thinking.type is 'deep'"),
        (asks(user("hi"), temperature="hot"), "temperature must be a finite number"),
        (asks(user("hi"), output_format={"type": "grammar"}), "output_format.type must be json_schema"),
        (asks({"role": "user", "content": [{"type": "tool_result", "content": "x"}]}), "tool_use_id is required"),
    ],
)
async def test_what_is_wrong_is_told_in_the_shape_of_that_api(body: dict[str, Any], says: str) -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        exchange = await client.call("POST", PATH, body)
        assert exchange.status == 400
        told = exchange.json()
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert says in told["error"]["message"]
        assert client.service.runtime.counters.steps == 0


async def test_a_stream_that_fails_ends_with_an_error_of_that_name() -> None:
    steps = 0

    def breaks(batch: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 40:  # after more events than are held together
            raise ValueError("a kernel broke")

    long = f"{'well, ' * 20}</think><response>hello</response></message>!"
    async with serving_model(ReplyModel(lambda prompt: long, before_step=breaks)) as client:
        events = await streamed(client, asks(user("hi"), **THINKS))
        assert events[-1]["type"] == "error"
        assert events[-1]["error"]["type"] == "overloaded_error"
        after = await client.call("POST", PATH, asks(user("hi")))
        assert (after.status, after.json()["error"]["type"]) == (503, "overloaded_error")


async def test_a_key_may_be_sent_as_those_clients_do() -> None:
    options = ServerOptions(keys=(Key.plain("a-secret"),))
    async with serving_model(ReplyModel(lambda prompt: HELLO), options) as client:
        refused = await client.call("POST", PATH, asks(user("hi")))
        assert (refused.status, refused.json()["error"]["type"]) == (401, "authentication_error")
        for headers, status in (({"x-api-key": "a-secret"}, 200), ({"x-api-key": "another"}, 401)):
            exchange = await client.call("POST", PATH, asks(user("hi")), headers=headers)
            assert exchange.status == status
        nowhere = await client.call("GET", f"{PATH}/batches", key="a-secret")
        assert (nowhere.status, nowhere.json()["error"]["type"]) == (404, "not_found_error")
