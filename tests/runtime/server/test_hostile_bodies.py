"""Requests with any part of them replaced by anything: each is answered, or refused naming what is wrong."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.server.client import Client, serving_model
from tests.runtime.server.replies import ReplyModel

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s", "tools": [{"type": "function", "function": FUNCTION}]},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "u"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "t"},
    ],
    "tools": [{"type": "function", "function": {**FUNCTION, "name": "g", "strict": False}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "parallel_tool_calls": True,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"thinking": True},
    "max_completion_tokens": 4,
    "max_tokens": 4,
    "stop": ["x"],
    "n": 1,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "store": True,
    "serai:priority": 0,
    "serai:deadline_s": 100.0,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "t"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", **FUNCTION, "strict": True}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 4,
    "top_logprobs": 1,
    "metadata": {"a": "b"},
    "truncation": "disabled",
    "background": False,
    "stream": False,
    "store": False,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "t", "is_error": True}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": FUNCTION["parameters"], "strict": False}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1_024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "u"},
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_k": 5,
    "stream": False,
}
COMPLETION: dict[str, Any] = {
    "model": "m",
    "prompt": ["a", [1, 2]],
    "max_tokens": 3,
    "n": 1,
    "echo": True,
    "logprobs": 2,
    "stop": "x",
    "stream": False,
}
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/responses/input_tokens": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/serai/actions": {"action": "fork", "session": "s", "value": "t"},
}
BODIES = {"/v1/chat/completions": CHAT, "/v1/responses": RESPONSES, "/v1/completions": COMPLETION, **OTHERS}

MODEL = ReplyModel(lambda prompt: "</think><response>ok</response></message>!")
"""With a short context: a reply held to any JSON object is as long as it likes where its request sets no limit."""

ODD: st.SearchStrategy[object] = st.sampled_from(
    [
        None, True, 0, -1, 1, 2**63, 10**400, 1e308, -0.0, 0.5, "", "\0", "\ud800", "x" * 5_000, "none", [], {},
        [[]], [None], [1, "a"], {"type": "function"}, {"type": "json_schema"}, {"type": []}, "resp_" + "a" * 26,
    ]
)  # fmt: skip
ANYTHING = ODD | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(BODIES)))
    body = copy.deepcopy(BODIES[path])
    # Most of a valid request constrains the rest of it, so that much is left out, too.
    for key in draw(st.lists(st.sampled_from(sorted(body)), unique=True)):
        if key not in ("model", "messages", "input", "prompt", "max_tokens", "max_output_tokens"):
            del body[key]
    for _ in range(draw(st.integers(1, 2))):
        parts = sorted(places(body), key=str)
        if not parts:
            break
        *way, last = draw(st.sampled_from(parts))
        inner = body
        for step in way:
            inner = inner[step]
        inner[last] = copy.deepcopy(draw(ANYTHING))  # it may be changed in turn
    if isinstance(body.get("n"), int) and body["n"] > 3:
        body["n"] = 3  # 32 choices are fine, and slow
    return path, json.dumps(body).encode("utf-8", "surrogatepass")


async def ask(client: Client, path: str, raw: bytes) -> None:
    with anyio.fail_after(20):
        answer = await client.call("POST", path, raw)
    said = b"".join(answer.chunks)
    assert answer.status < 500, (path, raw, said)
    if answer.status == 200 and b"text/event-stream" in answer.headers.get("content-type", "").encode():
        assert b'"internal_error"' not in said
        assert said.endswith(b'{"type":"message_stop"}\n\n' if path == "/v1/messages" else b"data: [DONE]\n\n")
        return
    body = json.loads(said)
    if answer.status != 200:
        assert answer.status in (400, 404, 408, 409, 429), (answer.status, raw, body)
        more = set() if path.startswith("/v1/messages") else {"param", "code"}
        assert set(body["error"]) == {"message", "type"} | more
        assert len(body["error"]["message"]) <= 1_001, "one sentence, whatever was sent"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(requests(), min_size=4, max_size=8))
def test_whatever_a_request_has_in_it_the_server_answers(sent: list[tuple[str, bytes]]) -> None:
    async def run() -> None:
        async with serving_model(MODEL, max_positions=3_000) as client:
            for path, raw in sent:
                await ask(client, path, raw)
            with anyio.fail_after(20):
                await client.service.wait_idle()
            assert (await client.call("GET", "/health")).status == 200

    anyio.run(run)


@pytest.mark.parametrize("path", sorted(BODIES))
def test_the_bodies_that_are_changed_are_right_as_they_are(path: str) -> None:
    """Otherwise each change would meet the same refusal, and nothing behind it would be tried."""
    body = copy.deepcopy(BODIES[path])

    async def run() -> int:
        async with serving_model(MODEL, max_positions=3_000) as client:
            return (await client.call("POST", path, body)).status

    assert anyio.run(run) == (404 if path == "/serai/actions" else 200)
