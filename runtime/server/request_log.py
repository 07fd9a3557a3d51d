"""A line in the log for each request, once its answer has ended."""

import logging
from urllib.parse import quote

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

ASKED_OFTEN = frozenset({"/health", "/is_paused", "/metrics", "/serai/status"})
"""What supervisors and monitors ask all the time is told at level debug."""


class RequestLog:
    """Says what was asked, how it was answered and how long that took: `POST /v1/responses: 200 in 1.24 s`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None
        began_s = anyio.current_time()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"]
            level = logging.DEBUG if path in ASKED_OFTEN else logging.INFO
            took_s = anyio.current_time() - began_s
            answer = "no answer" if status is None else str(status)
            # Quoted again, so that nothing a client sends can look like a line of its own.
            log.log(level, "%s %s: %s in %.2f s", scope["method"], quote(path), answer, took_s)
