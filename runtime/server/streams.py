"""Answers over HTTP: one JSON object or a stream of events, for a client that may leave or stop reading at any time.

Whoever produces the events waits while the client is slow, so nothing piles up beyond what the socket holds; a client
that takes nothing for long is let go. When the client leaves, the producer is cancelled.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serai.runtime.server.dialects import OPENAI, Dialect, dialect_of
from serai.runtime.server.errors import ApiError, api_error
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.wire import Moments, Wire

log = logging.getLogger(__name__)

Emit: TypeAlias = Callable[[str | None, Mapping[str, Any]], Awaitable[None]]
"""Takes an event's name, where the protocol names them, and its data."""
Produce: TypeAlias = Callable[[Wire], Awaitable[None]]

KEEP_ALIVE = b": keep-alive\n\n"


def tell(error: Exception) -> ApiError:
    """The error as the client is told it; one that nobody foresaw is logged."""
    told = api_error(error)
    if told.code == "internal_error":
        log.error("a request failed", exc_info=error)
    return told


def error_response(error: Exception, dialect: Dialect = OPENAI) -> Response:
    told = tell(error)
    return JSONResponse(dialect.error_body(told), told.status, headers=told.headers)


async def whole(request: Request, produce: Callable[[], Awaitable[Mapping[str, Any]]]) -> Response:
    """One JSON object; a client that leaves meanwhile cancels the work for it."""
    result: Response | None = None

    async def work() -> None:
        nonlocal result
        try:
            result = JSONResponse(await produce())
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer
            result = error_response(error, dialect_of(request.url.path))
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
    """Server-sent events of whatever `produce` emits, and the end that the path's dialect has.

    An error before the first event, if it comes within `early_headers_s`, is an answer with its own status; a later
    one is an event. A comment is sent after `keep_alive_s` of silence.
    """

    def __init__(
        self,
        produce: Produce,
        moments: Moments,
        *,
        keep_alive_s: float,
        slow_reader_s: float,
        early_headers_s: float,
    ) -> None:
        self._produce = produce
        self._moments = moments
        self._keep_alive_s = keep_alive_s
        self._slow_reader_s = slow_reader_s
        self._early_headers_s = early_headers_s
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire, dialect = Wire(send, self._moments), dialect_of(scope["path"])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_until_left, receive, tasks.cancel_scope)
            tasks.start_soon(self._watch, wire, tasks.cancel_scope)
            tasks.start_soon(wire.run)
            try:
                await self._produce(wire)
            except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
                told = tell(error)
                if not wire.begun:
                    await wire.instead(lambda: error_response(told, dialect)(scope, receive, send))
                    tasks.cancel_scope.cancel()
                    return
                await wire.put(dialect.error_event(told))
            await wire.end(dialect.end)
            tasks.cancel_scope.cancel()

    async def _watch(self, wire: "Wire", scope: anyio.CancelScope) -> None:
        """Fill silences, and let go of a client that takes nothing."""
        began_s = anyio.current_time()
        stuck = False
        while not stuck:
            now_s = anyio.current_time()
            if wire.puts_since_s is not None:
                due_s = wire.puts_since_s + self._slow_reader_s
                stuck = now_s >= due_s
            elif wire.begun:
                due_s = wire.last_s + self._keep_alive_s
            else:
                due_s = began_s + self._early_headers_s
            if now_s < due_s:
                await anyio.sleep_until(min(due_s, now_s + self._slow_reader_s))  # a write may begin meanwhile
            elif not stuck:
                with anyio.move_on_after(self._slow_reader_s) as waited:
                    await (wire.pass_on(KEEP_ALIVE) if wire.begun else wire.pass_on())
                stuck = waited.cancelled_caught
        log.info("a client took nothing for %g s and is let go", self._slow_reader_s)
        scope.cancel()
