"""Answers over HTTP: one JSON object or a stream of events, for a client that may leave or stop reading at any time.

Whoever produces the events waits while the client is slow, so nothing piles up beyond a few events and what the
socket holds; a client that takes nothing for long is let go. When the client leaves, the producer is cancelled.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from serai.runtime.server.errors import ApiError, api_error

log = logging.getLogger(__name__)

Event: TypeAlias = tuple[str | None, Mapping[str, Any]]
"""An event's name, where the protocol names them, and its data."""
Emit: TypeAlias = Callable[[str | None, Mapping[str, Any]], Awaitable[None]]
Produce: TypeAlias = Callable[[Emit], Awaitable[None]]

BUFFERED_EVENTS = 16
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def tell(error: Exception) -> ApiError:
    """The error as the client is told it; one that nobody foresaw is logged."""
    told = api_error(error)
    if told.code == "internal_error":
        log.error("a request failed", exc_info=error)
    return told


def error_response(error: Exception) -> Response:
    told = tell(error)
    return JSONResponse(told.body(), told.status, headers=told.headers)


async def whole(request: Request, produce: Callable[[], Awaitable[Mapping[str, Any]]]) -> Response:
    """One JSON object; a client that leaves meanwhile cancels the work for it."""
    result: Response | None = None

    async def work() -> None:
        nonlocal result
        try:
            result = JSONResponse(await produce())
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            result = error_response(error)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_until_left, request.receive, tasks.cancel_scope)
        tasks.start_soon(work)
    # 499 is what proxies log for a client that left; nobody is there to read it.
    return Response(status_code=499) if result is None else result


async def _until_left(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    scope.cancel()


class EventStream(Response):
    """Server-sent events of whatever `produce` emits, with `[DONE]` at the end.

    An error before the first event, if it comes within `early_headers_s`, is an answer with its own status; a later
    one is an event with `error`. A comment is sent after `keep_alive_s` of silence.
    """

    def __init__(self, produce: Produce, *, keep_alive_s: float, slow_reader_s: float, early_headers_s: float) -> None:
        self._produce = produce
        self._keep_alive_s = keep_alive_s
        self._slow_reader_s = slow_reader_s
        self._early_headers_s = early_headers_s
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        put, take = anyio.create_memory_object_stream[Event | ApiError](BUFFERED_EVENTS)
        async with anyio.create_task_group() as tasks, take:
            tasks.start_soon(_until_left, receive, tasks.cancel_scope)
            tasks.start_soon(self._run, put)
            await self._send_all(take, _bounded(send, self._slow_reader_s, tasks.cancel_scope), scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _run(self, put: MemoryObjectSendStream[Event | ApiError]) -> None:
        async def emit(name: str | None, data: Mapping[str, Any]) -> None:
            await put.send((name, data))

        async with put:
            try:
                await self._produce(emit)
            except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
                await put.send(tell(error))

    async def _send_all(
        self,
        take: MemoryObjectReceiveStream[Event | ApiError],
        write: Callable[[Message], Awaitable[None]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        first: Event | ApiError | None = None
        with anyio.move_on_after(self._early_headers_s):
            try:
                first = await take.receive()
            except anyio.EndOfStream:
                first = None
        if isinstance(first, ApiError):
            await error_response(first)(scope, receive, send)
            return
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await write({"type": "http.response.start", "status": 200, "headers": headers})
        if first is not None:
            await write(_body(_line(first)))
        while True:
            item: Event | ApiError | None = None
            with anyio.move_on_after(self._keep_alive_s):
                try:
                    item = await take.receive()
                except anyio.EndOfStream:
                    break
            await write(_body(KEEP_ALIVE if item is None else _line(item)))
        await write({"type": "http.response.body", "body": DONE, "more_body": False})


def _bounded(send: Send, limit_s: float, scope: anyio.CancelScope) -> Callable[[Message], Awaitable[None]]:
    async def write(message: Message) -> None:
        try:
            with anyio.fail_after(limit_s):
                await send(message)
        except TimeoutError:
            log.info("a client took nothing for %g s and is let go", limit_s)
            scope.cancel()
            await anyio.sleep_forever()

    return write


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def _line(item: Event | ApiError) -> bytes:
    name, data = ("error", item.body()) if isinstance(item, ApiError) else item
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate, which a model can't write but a request may echo, has no UTF-8 form.
    payload = f"data: {text}\n\n".encode("utf-8", "replace")
    return payload if name is None or name == "error" else b"event: " + name.encode() + b"\n" + payload
