"""Each request is a line in the log, whatever a client sends; those of supervisors are told apart."""

import logging

import pytest

from tests.runtime.server.client import serving_model, user
from tests.runtime.server.replies import ReplyModel

pytestmark = pytest.mark.anyio

NAME = "serai.runtime.server.request_log"


async def test_a_request_is_told_once_when_its_answer_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=NAME)
    async with serving_model(ReplyModel(lambda prompt: "</think><response>hi</response></message>!")) as client:
        await client.chat(user("hi"))
        await client.stream("/v1/chat/completions", {"messages": [user("hi")]})
        await client.call("POST", "/v1/chat/completions", {"messages": []})
        await client.call("GET", "/nowhere\n2030 INFO all is well")
        await client.call("GET", "/health")
    told = [(one.levelname, one.getMessage().rsplit(" in ", 1)[0]) for one in caplog.records if one.name == NAME]
    assert told == [
        ("INFO", "POST /v1/chat/completions: 200"),
        ("INFO", "POST /v1/chat/completions: 200"),
        ("INFO", "POST /v1/chat/completions: 400"),
        ("INFO", "GET /nowhere%0A2030%20INFO%20all%20is%20well: 404"),
        ("DEBUG", "GET /health: 200"),
    ]
