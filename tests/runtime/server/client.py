"""A client inside the test's own event loop: requests over ASGI, streams read event by event, leaving at will."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from starlette.applications import Starlette

from serai.runtime.server.app import serving
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.service import Service
from tests.runtime.server.replies import ReplyModel, reply_runtime

OPTIONS = ServerOptions(early_headers_s=30.0, keep_alive_s=30.0, shutdown_s=1.0)


@dataclass(eq=False)
class Exchange:
    """One request under way. `leave()` is the client closing its socket; `stall` makes it stop reading."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    left: anyio.Event = field(default_factory=anyio.Event)
    reading: anyio.Event = field(default_factory=anyio.Event)
    ended: anyio.Event = field(default_factory=anyio.Event)
    chunks: list[bytes] = field(default_factory=list)
    arrived: anyio.Event = field(default_factory=anyio.Event)

    def leave(self) -> None:
        self.left.set()

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def json(self) -> Any:
        return json.loads(b"".join(self.chunks))

    async def body(self) -> Any:
        """The whole body as JSON, once it is there."""
        await self.ended.wait()
        return self.json()

    async def wait_chunks(self, count: int) -> None:
        with anyio.fail_after(30):
            while len(self.chunks) < count:
                self.arrived = anyio.Event()
                await self.arrived.wait()

    async def events(self) -> list[Any]:
        """All events of a stream, once it has ended, without the `[DONE]` that must be the last."""
        await self.ended.wait()
        blocks = b"".join(self.chunks).decode().split("\n\n")
        data = [line[6:] for block in blocks for line in block.split("\n") if line.startswith("data: ")]
        assert data[-1] == "[DONE]", data[-1]
        return [json.loads(one) for one in data[:-1]]


def _events(body: bytes) -> list[bytes]:
    """Each event of those that were written together: how many those are depends on the machine's load."""
    return [event + b"\n\n" for event in body.removesuffix(b"\n\n").split(b"\n\n")]


class Client:
    def __init__(self, app: Starlette, tasks: TaskGroup) -> None:
        self.app = app
        self.service: Service = app.state.service
        self._tasks = tasks

    def start(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        stalled: bool = False,
    ) -> Exchange:
        """Send a request without waiting for its answer."""
        exchange = Exchange()
        if not stalled:
            exchange.reading.set()
        sent = dict(headers or {}) | ({} if key is None else {"authorization": f"Bearer {key}"})
        self._tasks.start_soon(self._talk, exchange, method, path, body, sent)
        return exchange

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Exchange:
        exchange = self.start(method, path, body, key=key, headers=headers)
        await exchange.ended.wait()
        return exchange

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a request that must succeed."""
        exchange = await self.call("POST", path, body)
        assert exchange.status == 200, exchange.json()
        return exchange.json()

    async def chat(self, *messages: Mapping[str, Any], **more: Any) -> Any:
        return await self.post("/v1/chat/completions", {"model": "m", "messages": list(messages), **more})

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        exchange = await self.call("POST", path, {**body, "stream": True})
        assert exchange.status == 200, exchange.json()
        return await exchange.events()

    async def _talk(
        self,
        exchange: Exchange,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None,
        headers: Mapping[str, str],
    ) -> None:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps({"model": "m", **body}).encode()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-length", str(len(raw)).encode())]
            + [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("test", 1),
            "server": ("test", 80),
            "state": {},
        }
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await exchange.reading.wait()
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                exchange.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            elif message.get("body"):
                exchange.chunks += _events(message["body"]) if exchange.is_stream else [message["body"]]
            exchange.arrived.set()

        try:
            await self.app(scope, receive, send)
        finally:
            exchange.ended.set()


@asynccontextmanager
async def serving_model(model: ReplyModel, options: ServerOptions = OPTIONS, **runtime: Any) -> AsyncIterator[Client]:
    """A served runtime, checked to end with nothing at work."""
    async with reply_runtime(model, **runtime) as rt, serving(rt, options) as app, anyio.create_task_group() as tasks:
        client = Client(app, tasks)
        yield client
        tasks.cancel_scope.cancel()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
