"""What can't be rendered is told by the place where the client has it, whatever stands before that for the model."""

from typing import Any

import pytest

from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import ReplyModel

pytestmark = pytest.mark.anyio

HELLO = "well</think><response>hello</response></message>!"
HALF = "half \ud83d"
TOOL = {"type": "function", "name": "look", "description": None, "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
ORPHAN = {"type": "function_call_output", "call_id": "nobody", "output": "t"}
RESULT = {"type": "tool_result", "tool_use_id": "nobody", "content": "t"}
ANSWER = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/messages", {"system": HALF, "messages": [user("hi")]}, "system"),
        ("/v1/messages", {"system": "s", "messages": [user(HALF)]}, "messages[0]"),
        ("/v1/messages", {"messages": [user(HALF)]}, "messages[0]"),
        (
            "/v1/messages",
            {"system": "s", "messages": [user("hi"), ANSWER, {"role": "user", "content": [RESULT]}]},
            "messages[2]",
        ),
        ("/v1/messages/count_tokens", {"system": "s", "messages": [user(HALF)]}, "messages[0]"),
        ("/v1/responses", {"instructions": HALF, "input": "hi"}, "instructions"),
        ("/v1/responses", {"instructions": "i", "input": [user("hi"), ORPHAN]}, "input[1]"),
        ("/v1/responses", {"instructions": "i", "input": [user(HALF)]}, "input[0]"),
        (
            "/v1/responses",
            {"instructions": "i", "input": [user("hi"), {"type": "reasoning", "content": []}, ANSWER, ORPHAN]},
            "input[3]",
        ),
        ("/v1/responses", {"input": [user("hi"), CALL, {**ORPHAN, "call_id": "c"}, ORPHAN]}, "input[3]"),
        ("/v1/responses/input_tokens", {"instructions": "i", "input": [user("hi"), ORPHAN]}, "input[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}, user(HALF)]}, "messages[1]"),
    ],
)
async def test_the_error_names_the_place_in_the_request(path: str, body: dict[str, Any], where: str) -> None:
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        exchange = await client.call("POST", path, {"max_tokens": 5, **body})
        assert exchange.status == 400, exchange.json()
        error = exchange.json()["error"]
        assert where in error["message"] or where == error["param"]
        if path.startswith("/v1/responses"):
            assert (error["param"], error["message"].partition(": ")[0]) == (where, where)
        assert client.service.runtime.counters.steps == 0


async def test_what_is_known_of_a_conversation_is_counted_too() -> None:
    """The server goes on behind the messages it knows, and once counted from there."""
    async with serving_model(ReplyModel(lambda prompt: HELLO)) as client:
        await client.chat(user("hi"))
        answer = {"role": "assistant", "content": "hello"}
        orphan = {"role": "tool", "tool_call_id": "nobody", "content": "t"}
        body = {"messages": [user("hi"), answer, orphan]}
        error = (await client.call("POST", "/v1/chat/completions", body)).json()["error"]
        assert (error["param"], error["message"].partition(": ")[0]) == ("messages[2]", "message 2")
        first = await client.post("/v1/responses", {"input": "hi", "instructions": "i"})
        on = {"previous_response_id": first["id"], "instructions": "others", "tools": [TOOL], "input": [ORPHAN]}
        error = (await client.call("POST", "/v1/responses", on)).json()["error"]
        assert error["param"] == "input[0]"
