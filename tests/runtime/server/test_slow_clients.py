"""Clients that never come to ask, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from serai.runtime.server.app import serving
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.running import listen, run_app
from tests.runtime.server.replies import ReplyModel, reply_runtime

pytestmark = pytest.mark.anyio

SHORT = "</think><response>ok</response></message>!"
ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def on_port(arrive_s: float) -> AsyncIterator[int]:
    options = ServerOptions(port=0, log_level="critical", shutdown_s=0.1, arrive_s=arrive_s)
    with listen(options) as bound:
        async with (
            reply_runtime(ReplyModel(lambda prompt: SHORT)) as runtime,
            serving(runtime, options) as app,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(run_app, app, options, bound)
            yield bound.getsockname()[1]
            tasks.cancel_scope.cancel()


async def answer_to(port: int, *parts: bytes) -> bytes:
    """What comes back until the server closes the connection; None of it can take long."""
    with anyio.fail_after(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in parts:
            writer.write(part)
            await writer.drain()
        said = await reader.read()
        writer.close()
    return said


@pytest.mark.parametrize("head", [b"", b"G", b"GET /health HTTP/1.1\r\nX: ", ASK + b"GET /hea"])
async def test_a_head_that_does_not_come_is_not_waited_for(head: bytes) -> None:
    async with on_port(0.2) as port:
        said = await answer_to(port, head)
        assert said.count(b"200 OK") == head.count(b"\r\n\r\n")


async def test_a_body_that_does_not_come_is_a_408() -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 500\r\n\r\n{"
    async with on_port(0.2) as port:
        said = await answer_to(port, head)
        assert b" 408 " in said.split(b"\r\n")[0]
        assert b"request_timeout" in said


async def test_a_reply_may_take_longer_than_its_request() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    async with on_port(0.5) as port:
        said = await answer_to(port, head % len(body), body)
        assert b"200 OK" in said
        assert b'"ok"' in said


LONG_HEAD = b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n"


@pytest.mark.parametrize("nonsense", [b"\x16\x03\x01\x02\x00", LONG_HEAD])
async def test_what_is_no_http_is_answered_and_closed(nonsense: bytes) -> None:
    async with on_port(0.5) as port:
        said = await answer_to(port, nonsense)
        assert said == b"" or b" 400 " in said.split(b"\r\n")[0]
        assert b"200 OK" in await answer_to(port, ASK.replace(b"Host", b"Connection: close\r\nHost"))
