"""Chat completions as a client sees them, over a model whose replies the test writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from serai.runtime.server.options import ServerOptions
from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import ANY, K2, ReplyModel

pytestmark = pytest.mark.anyio

HELLO = "well</think><response>hello</response></message>!"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    "so</think><response></response><tools>"
    '<call tool="look" index="1"><argument key="at" type="string">a</argument></call>'
    '<call tool="look" index="2"><argument key="n" type="number">2</argument></call>'
    '<call tool="find" index="3"></call></tools></message>!'
)


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """What the chunks of a choice add up to."""
    said: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish": None}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            said["content"] += delta.get("content") or ""
            said["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                kept = said["tool_calls"].setdefault(call["index"], {"arguments": ""})
                if "id" in call:
                    assert "id" not in kept, "a call is introduced once"
                    kept |= {"id": call["id"], "name": call["function"]["name"]}
                kept["arguments"] += call["function"]["arguments"]
            said["finish"] = choice["finish_reason"] or said["finish"]
    return said


async def test_a_reply_is_split_into_reasoning_and_content() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        whole = await client.chat(user("hi"))
        choice = whole["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": "hello",
            "reasoning_content": "well",
            "refusal": None,
            "annotations": [],
        }
        assert choice["finish_reason"] == "stop"
        usage = whole["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len("well")
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        said = joined(await client.stream("/v1/chat/completions", {"messages": [user("hi")]}))
        assert (said["reasoning_content"], said["content"], said["finish"]) == ("well", "hello", "stop")


async def test_usage_comes_when_asked_for_and_in_a_chunk_of_its_own() -> None:
    """B84"""
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        body = {"messages": [user("hi")]}
        plain = await client.stream("/v1/chat/completions", body)
        assert all("usage" not in event and event["choices"] for event in plain)
        asked = await client.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        assert all(event["usage"] is None for event in asked[:-1])
        assert asked[-1]["choices"] == []
        whole = await client.chat(user("hi"))
        assert asked[-1]["usage"] == whole["usage"]
        two = await client.chat(user("hi"), n=2)
        assert two["usage"]["completion_tokens"] == 2 * whole["usage"]["completion_tokens"]
        assert two["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        stopped = await client.chat(user("hi"), stop=["ll"])
        assert stopped["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


async def test_parallel_calls_have_indices_of_their_own() -> None:
    """B88"""
    async with serving_model(ReplyModel(lambda prompt: CALLS)) as client:
        body = {"messages": [user("hi")], "tools": [TOOL]}
        said = joined(await client.stream("/v1/chat/completions", body))
        whole = (await client.post("/v1/chat/completions", body))["choices"][0]
        assert whole["finish_reason"] == said["finish"] == "tool_calls"
        assert whole["message"]["content"] is None
        calls = whole["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["look", "look", "find"]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"at": "a"}, {"n": 2}, {}]
        assert list(said["tool_calls"]) == [0, 1, 2]
        assert [json.loads(call["arguments"]) for call in said["tool_calls"].values()] == [{"at": "a"}, {"n": 2}, {}]
        assert len({call["id"] for call in said["tool_calls"].values()} | {call["id"] for call in calls}) == 6


@pytest.mark.parametrize(
    ("reply", "reasoning", "content", "calls"),
    [
        ('hm<tools><call tool="look" index="1"></call></tools></message>!', "hm", None, ["look"]),
        ("hm</think><response>yes</message>!", "hm", "yes", []),
        ('hm<tools><call tool="look" index="1"><argument key="a" type="str', "hm", None, ["look"]),
        ("hm</think><response>a <|close|> b", "hm", "a  b", []),
    ],
)
async def test_replies_that_leave_the_grammar_are_read_as_meant(
    reply: str, reasoning: str, content: str | None, calls: list[str]
) -> None:
    """B92"""
    async with serving_model(ReplyModel(lambda prompt: reply)) as client:
        body = {"messages": [user("hi")], "tools": [TOOL], "max_tokens": 120}
        message = (await client.post("/v1/chat/completions", body))["choices"][0]["message"]
        said = joined(await client.stream("/v1/chat/completions", body))
        assert message["reasoning_content"] == said["reasoning_content"] == reasoning
        assert (message["content"] or "") == said["content"]
        assert "<|" not in said["content"]
        assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
        assert [call["name"] for call in said["tool_calls"].values()] == calls
        if content is not None and "<|" not in reply:
            assert message["content"] == content


async def test_cut_reasoning_stays_reasoning_and_no_thinking_is_content() -> None:
    """B93"""
    model = ReplyModel(lambda prompt: HELLO if prompt.endswith("think<|sep|>") else "plain</response></message>!")
    async with serving_model(model) as client:
        cut = (await client.chat(user("hi"), max_tokens=3))["choices"][0]
        assert (cut["message"]["reasoning_content"], cut["message"]["content"]) == ("wel", None)
        assert cut["finish_reason"] == "length"
        said = joined(await client.stream("/v1/chat/completions", {"messages": [user("hi")], "max_tokens": 3}))
        assert (said["reasoning_content"], said["content"], said["finish"]) == ("wel", "", "length")
        for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": False}}):
            message = (await client.chat(user("hi"), **off))["choices"][0]["message"]
            assert message["content"] == "plain"
            assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("text", "stops", "shown", "stopped"),
    [
        ("The quick brown fox", ["own fox"], "The quick br", True),
        ("The quick brown fig", ["own fox"], "The quick brown fig", False),
        ("ple", ["assistant"], "ple", False),
        ("pleas", ["assistant"], "pleas", False),
        ("a naïve é end", ["ïve é"], "a na", True),
        ("xabcd", ["bc", "abcd"], "xa", True),
        ("response tools", ["think", "response t"], "", True),
    ],
)
async def test_a_stop_string_ends_the_content_and_nothing_before_it_is_lost(
    text: str, stops: list[str], shown: str, stopped: bool
) -> None:
    """B85, B86: over token borders, inside characters, overlapping, and never completed. Names in tags are no text."""
    reply = f"a stop assistant own fox</think><response>{text}</response></message>!"
    async with serving_model(ReplyModel(lambda prompt: reply)) as client:
        body = {"messages": [user("hi")], "stop": stops}
        whole = await client.post("/v1/chat/completions", body)
        said = joined(await client.stream("/v1/chat/completions", body))
        assert (whole["choices"][0]["message"]["content"] or "") == said["content"] == shown
        assert said["finish"] == "stop"
        full = (await client.chat(user("hi")))["usage"]["completion_tokens"]
        assert (whole["usage"]["completion_tokens"] < full) == stopped
        # The session that a stop string ended goes on like any other.
        answer = {"role": "assistant", "content": shown}
        assert (await client.chat(user("hi"), answer, user("go on"), stop=stops))["usage"]["prompt_tokens"] > full


async def test_text_held_for_a_stop_string_is_shown_at_the_length_limit() -> None:
    """B86"""
    async with serving_model(ReplyModel(lambda prompt: "pleassi</response></message>!")) as client:
        for stream in (False, True):
            body = {"messages": [user("hi")], "max_tokens": 5, "stop": ["assistant"], "reasoning_effort": "none"}
            if stream:
                said = joined(await client.stream("/v1/chat/completions", body))
                assert (said["content"], said["finish"]) == ("pleas", "length")
            else:
                choice = (await client.post("/v1/chat/completions", body))["choices"][0]
                assert (choice["message"]["content"], choice["finish_reason"]) == ("pleas", "length")


BROKEN = ['{"at": "a', "", "[1]", "null", '"x"', {"at": "a"}]


@pytest.mark.parametrize("arguments", BROKEN)
async def test_broken_arguments_in_history_are_read_or_refused_by_index(arguments: Any) -> None:
    """B89: text that is no JSON goes to the model as it is; JSON that is no object is refused, naming the message."""
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        function: dict[str, Any] = {"name": "look", "arguments": arguments}
        messages = [
            user("hi"),
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "here"},
        ]
        answer = await client.call("POST", "/v1/chat/completions", {"messages": messages, "tools": [TOOL]})
        if arguments in ("[1]", "null", '"x"'):
            assert answer.status == 400
            assert answer.json()["error"]["param"] == "messages[1]"
        else:
            assert answer.status == 200
        function["arguments"] = "{}"
        assert (await client.chat(*messages, tools=[TOOL]))["choices"][0]["finish_reason"] == "stop"


async def test_calls_of_any_id_are_matched_and_new_ids_are_unique() -> None:
    """B94"""
    reply = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:8<|tool_call_argument_begin|>{}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    model = ReplyModel(lambda prompt: reply, family=K2)
    async with serving_model(model) as client:
        messages: list[dict[str, Any]] = [user("hi")]
        for id_ in ("call_abc", "functions.look:0", "functions.look:7"):
            call = {"id": id_, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": id_, "content": f"result of {id_}"},
            ]
        choice = (await client.chat(*messages, tools=[TOOL]))["choices"][0]
        (made,) = choice["message"]["tool_calls"]
        assert made["function"]["name"] == "look"
        assert made["id"] not in ("call_abc", "functions.look:0", "functions.look:7")
        prompt = model.prompts[-1]
        for number, id_ in ((0, "call_abc"), (1, "functions.look:0"), (7, "functions.look:7")):
            assert f"## Return of functions.look:{number}\nresult of {id_}" in prompt


@pytest.mark.parametrize("value", [2147483647, 10**18, 1e18, 0, -1, True, "5", 2.0])
async def test_absurd_token_limits_are_refused_with_the_numbers(value: Any) -> None:
    """B95"""
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        answer = await client.call("POST", "/v1/chat/completions", {"messages": [user("hi")], "max_tokens": value})
        assert answer.status == 400
        error = answer.json()["error"]
        assert error["param"] == "max_tokens"
        if isinstance(value, int) and value > 1:
            assert error["code"] == "context_length_exceeded"
            assert "100,000" in error["message"]
        assert (await client.call("GET", "/health")).status == 200
        assert (await client.chat(user("hi"), max_tokens=None))["choices"][0]["finish_reason"] == "stop"


async def test_choices_differ_are_repeatable_and_share_their_prompt() -> None:
    """B96"""
    reply = f"</think><response>{ANY * 12}</response></message>!"
    async with serving_model(ReplyModel(lambda prompt: reply)) as client:
        body = {"messages": [user("hi")], "n": 3, "seed": 7}
        runs = [await client.post("/v1/chat/completions", body) for _ in range(2)]
        texts = [[choice["message"]["content"] for choice in run["choices"]] for run in runs]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) == 3
        beside = client.start("POST", "/v1/chat/completions", {"messages": [user("other")], "max_tokens": 20})
        again = await client.post("/v1/chat/completions", body)
        await beside.ended.wait()
        assert [choice["message"]["content"] for choice in again["choices"]] == texts[0]
        streamed = await client.stream("/v1/chat/completions", body)
        assert [joined(streamed, index)["content"] for index in range(3)] == texts[0]
        one = await client.post("/v1/chat/completions", {**body, "n": 1})
        assert one["choices"][0]["message"]["content"] == texts[0][0]
        unseeded = [(await client.chat(user("hi")))["choices"][0]["message"]["content"] for _ in range(2)]
        assert unseeded[0] != unseeded[1]
        before = client.service.sessions.counters.prefilled_tokens
        await client.chat(user("a prompt of its own"), n=3)
        prompt = (await client.chat(user("a prompt of its own")))["usage"]["prompt_tokens"]
        assert client.service.sessions.counters.prefilled_tokens - before == 2 * prompt


async def test_a_client_that_resends_everything_pays_for_what_is_new(tmp_path: Path) -> None:
    """B49: without the reasoning, with the call's arguments spelled anew, and after a restart too."""
    replies = {1: CALLS, 2: HELLO, 3: HELLO}
    script = lambda prompt: replies[prompt.count('message role="user"') + prompt.count('role="tool"') // 3]  # noqa: E731
    async with serving_model(ReplyModel(script), store=tmp_path / "store") as client:
        first = await client.chat(user("hi"), tools=[TOOL])
        called = first["choices"][0]["message"]
        del called["reasoning_content"], called["annotations"], called["refusal"]
        for call in called["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=2)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "found"} for call in reversed(called["tool_calls"])
        ]
        history = [user("hi"), called, *results]
        second = await client.chat(*history, tools=[TOOL])
        known = first["usage"]["total_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == known
        before = client.service.sessions.counters.prefilled_tokens
        await client.chat(*history, tools=[TOOL])
        used = client.service.sessions.counters.prefilled_tokens - before
        assert used == second["usage"]["prompt_tokens"] - known
        other = await client.chat(user("hi"), {**called, "content": "not what was said"}, *results, tools=[TOOL])
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    model = ReplyModel(script)
    async with serving_model(model, store=tmp_path / "store") as client:
        again = await client.chat(*history, tools=[TOOL])
        assert again["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
        assert model.prompts[-1].count("so<|close|>think") == 1, "the reasoning is part of what is gone on from"


async def test_notes_stand_in_no_history(tmp_path: Path) -> None:
    """What a request asks of its own reply only is gone when the conversation goes on; its reply stays."""
    said = HELLO.replace("hello", '{"a": 1}')
    model = ReplyModel(lambda prompt: said)
    body = {"response_format": {"type": "json_object"}}
    async with serving_model(model, store=tmp_path / "store") as client:
        first = await client.chat(user("hi"), **body)
        assert "response_format" in model.prompts[-1]
        answer = {"role": "assistant", "content": '{"a": 1}'}
        second = await client.chat(user("hi"), answer, user("more"))
        assert "response_format" not in model.prompts[-1]
        assert model.prompts[-1].count('{"a": 1}') == 1
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert second["usage"]["prompt_tokens"] < first["usage"]["total_tokens"] + 120
    model = ReplyModel(lambda prompt: said)
    async with serving_model(model, store=tmp_path / "store") as client:
        third = await client.chat(user("hi"), answer, user("more"))
        assert third["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
        assert "response_format" not in model.prompts[-1]
        assert "well<|close|>think" in model.prompts[-1]


async def test_logprobs_are_those_of_the_content() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        body = {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2}
        whole = (await client.post("/v1/chat/completions", body))["choices"][0]
        tokens = whole["logprobs"]["content"]
        assert "".join(one["token"] for one in tokens) == "hello"
        assert all(len(one["top_logprobs"]) == 2 and one["logprob"] <= 0 for one in tokens)
        events = await client.stream("/v1/chat/completions", body)
        streamed = [
            one
            for event in events
            for choice in event["choices"]
            for one in (choice["logprobs"] or {}).get("content", [])
        ]
        assert streamed == tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0]"),
        ({"messages": [user("hi")], "temperature": "hot"}, "temperature"),
        ({"messages": [user("hi")], "temperature": -1}, "temperature"),
        ({"messages": [user("hi")], "n": 0}, "n"),
        ({"messages": [user("hi")], "stop": [""]}, "stop"),
        ({"messages": [user("hi")], "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [user("hi")], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [user("hi")], "tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"messages": [user("hi")], "model": None}, "model"),
        ({"messages": [user("hi")], "top_logprobs": 3}, "top_logprobs"),
        ({"messages": [user("hi")], "reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"messages": [user("hi")], "stream": "yes"}, "stream"),
    ],
)
async def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        answer = await client.call("POST", "/v1/chat/completions", body)
        assert answer.status == 400
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


async def test_keys_open_the_server_and_part_its_clients(tmp_path: Path) -> None:
    options = ServerOptions(api_keys=("one", "two"), early_headers_s=30.0, shutdown_s=1.0)
    body = {"input": "hi"}
    async with serving_model(ReplyModel(lambda prompt: HELLO), options, store=tmp_path / "store") as client:
        assert (await client.call("POST", "/v1/responses", body)).status == 401
        assert (await client.call("POST", "/v1/responses", body, key="three")).status == 401
        assert (await client.call("GET", "/health")).status == 200
        made = await client.call("POST", "/v1/responses", body, key="one")
        assert made.status == 200
        path = f"/v1/responses/{made.json()['id']}"
        assert (await client.call("GET", path, key="one")).status == 200
        assert (await client.call("GET", path, key="two")).status == 404
        stolen = {"input": "more", "previous_response_id": made.json()["id"]}
        assert (await client.call("POST", "/v1/responses", stolen, key="two")).status == 404


async def test_text_completions_and_tokens() -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        ids = await client.post("/tokenize", {"prompt": "a<|open|>b"})
        assert ids["count"] == len("a<|open|>b")
        assert (await client.post("/detokenize", {"tokens": ids["tokens"]}))["prompt"] == "a<|open|>b"
        body = {"prompt": ["ab", "c"], "max_tokens": 5, "logit_bias": {str(ord("z")): 100}, "temperature": 0}
        whole = await client.post("/v1/completions", body)
        assert [choice["text"] for choice in whole["choices"]] == ["zzzzz", "zzzzz"]
        assert whole["usage"]["prompt_tokens"] == 3
        events = await client.stream("/v1/completions", {**body, "prompt": [97, 98], "stop": "zzz"})
        assert "".join(event["choices"][0]["text"] for event in events) == ""
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert client.service.runtime.status().sessions == ()
