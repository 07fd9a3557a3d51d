"""The routes, and what every request passes first: its key, its size, its place among those at work."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from serai.runtime.runtime import Runtime
from serai.runtime.server import completions, extensions, messages, responses, watching
from serai.runtime.server.callers import ANYBODY, Caller, Keys
from serai.runtime.server.chat_output import ChatAnswer
from serai.runtime.server.chat_request import read_chat
from serai.runtime.server.dialects import dialect_of
from serai.runtime.server.errors import ApiError
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.metrics import StatusCollector
from serai.runtime.server.options import ServerOptions, is_loopback
from serai.runtime.server.request_log import RequestLog
from serai.runtime.server.requests import caller_of, read_body
from serai.runtime.server.service import Service, at_service
from serai.runtime.server.streams import error_response, whole

log = logging.getLogger(__name__)

Endpoint: TypeAlias = Callable[[Service, Request], Awaitable[Response]]

OPEN_PATHS = frozenset({"/health", "/is_paused"})
"""What whoever watches over a server may ask without a key: nothing of anybody's sessions."""

FIGURE_PATHS = frozenset({"/serai/status", "/serai/model"})
"""What may be asked without a key from this machine: figures, for a monitor that only looks on."""


@asynccontextmanager
async def serving(runtime: Runtime, options: ServerOptions) -> AsyncIterator[Starlette]:
    """The application over an open runtime; leaving ends what is at work and stores what is parked."""
    async with at_service(runtime, options) as service:
        service.metrics.registry.register(StatusCollector(lambda: (runtime.status(), _gauges(service))))
        yield make_app(service)


def _gauges(service: Service) -> dict[str, float]:
    return {
        "serai_requests_active": service.active,
        "serai_places_hot": service.sessions.parked,
        "serai_places_known": len(service.sessions.catalogue),
    }


def make_app(service: Service) -> Starlette:
    """The application of one service."""
    table: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", health),
        ("GET", "/metrics", metrics),
        ("GET", "/v1/models", models),
        ("GET", "/v1/models/{model:path}", one_model),
        ("POST", "/v1/chat/completions", chat_completions),
        *completions.ROUTES,
        *responses.ROUTES,
        *messages.ROUTES,
        *extensions.ROUTES,
        *watching.ROUTES,
    ]
    routes = [Route(path, _guarded(service, path, endpoint), methods=[method]) for method, path, endpoint in table]
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
    app.state.service = service
    app.add_middleware(KeyCheck, keys=Keys(service.options.all_keys))
    app.add_middleware(RequestLog)
    return app


def _guarded(service: Service, path: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            response = await endpoint(service, request)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client gets an answer in its API's shape
            response = error_response(error, dialect_of(path))
        service.metrics.requests.labels(path, str(response.status_code)).inc()
        return response

    return handle


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    path = request.url.path
    return error_response(
        ApiError(status, f"there is no {request.method} {path} here", "unknown_url"), dialect_of(path)
    )


class KeyCheck:
    """Lets through who sends one of the keys, compared in constant time, and tells requests of different keys apart."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state, key = scope.setdefault("state", {}), ANYBODY
            if self._keys and scope["path"] not in OPEN_PATHS:
                header = _shown_key(dict(scope["headers"]))
                holder = self._keys.holder(header or b"")
                if holder is not None:
                    key = holder
                elif header is None and scope["path"] in FIGURE_PATHS and _is_local(scope):
                    state["has_no_key"] = True
                else:
                    error = ApiError(
                        401,
                        "send one of the server's keys as Authorization: Bearer KEY, or as x-api-key",
                        "invalid_api_key",
                    )
                    error.headers["WWW-Authenticate"] = "Bearer"
                    await error_response(error, dialect_of(scope["path"]))(scope, receive, send)
                    return
            state["caller"] = Caller(key, anyio.current_time())
        await self._app(scope, receive, send)


def _shown_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """As a Bearer header: Anthropic's clients send a key as `x-api-key`."""
    header, plain = headers.get(b"authorization"), headers.get(b"x-api-key")
    return b"Bearer " + plain if header is None and plain is not None else header


def _is_local(scope: Scope) -> bool:
    """Whether the client is on this machine. A proxy here that speaks for others says so in a header."""
    client = scope.get("client")
    names = {name for name, _ in scope["headers"]}
    if names & {b"x-forwarded-for", b"forwarded", b"x-real-ip", b"via"}:
        return False
    return client is None or not client[0] or is_loopback(client[0])


async def health(service: Service, request: Request) -> Response:
    """Whether requests can be served, and if not, why; `degraded` when some fail because experts can't be read."""
    trouble = service.trouble()
    if trouble is not None:
        return JSONResponse({"status": "unavailable", "reason": trouble.message}, 503)
    watch = service.runtime.facts.degraded
    unreadable = "" if watch is None else watch()
    return JSONResponse(
        {
            "status": "degraded" if unreadable else "ok",
            **({"reason": unreadable} if unreadable else {}),
            "model": service.runtime.facts.name,
            "active": service.active,
            "paused": not service.engine_gate.is_open,
        }
    )


async def metrics(service: Service, request: Request) -> Response:
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")


def model_json(service: Service) -> dict[str, Any]:
    return {
        "id": service.runtime.facts.name,
        "object": "model",
        "created": 0,
        "owned_by": "serai",
        "max_model_len": service.sessions.max_positions,
    }


async def models(service: Service, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [model_json(service)]})


async def one_model(service: Service, request: Request) -> Response:
    name = request.path_params["model"]
    if name != service.runtime.facts.name:
        raise ApiError(
            404, f"there is no model {name!r:.80} here, only {service.runtime.facts.name!r}", "model_not_found"
        )
    return JSONResponse(model_json(service))


async def chat_completions(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    stored = service.options.stored_chats
    asked = await read_body(service, request, lambda body: read_chat(body, caller, stored=stored))
    answer = ChatAnswer(service, asked, asked.model or service.runtime.facts.name)
    if asked.stream:
        return service.stream(lambda wire: answer.stream(wire.emit))
    return await whole(request, answer.whole)
