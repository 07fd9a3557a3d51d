"""A server watched over HTTP, or over HTTP on a Unix socket."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

import httpx

from serai.runtime.errors import BadParameter
from serai.runtime.memory.attention import AttentionCost
from serai.runtime.monitor.files import new_file
from serai.runtime.monitor.reading import StatusUnreadable, comparison_from_json, event_from_json, status_from_json
from serai.runtime.monitor.source import Action, ActionRefused, Outcome, SourceUnreachable
from serai.runtime.sessions.events import SessionEvent
from serai.runtime.status import Status

TIMEOUT_S = 5.0
"""A server that is alive answers a status within milliseconds; its loop is never blocked."""
ACTION_TIMEOUT_S = 120.0
"""Pausing writes a state: half a gigabyte to a slow disk."""
QUIET_S = 45.0
"""An event stream sends a comment every 15 s at least; three missed ones mean that it is dead."""

_WANTS_KEY = {401: "it wants a key (--key or SERAI_API_KEY)", 403: "it doesn't accept this key"}
_NOT_FOUND = 404


class HttpSource:
    """`target` is an address as "http://host:port/prefix", or the path of a Unix socket ("unix:" before it or not).

    Proxies of the environment are not used. Raises `BadParameter` for a target that is neither.
    """

    def __init__(
        self, target: str, *, key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = target
        if "://" in target:
            base = target.rstrip("/").removesuffix("/v1")  # as serve prints it, for other clients
            if not target.startswith(("http://", "https://")):
                raise BadParameter(f"{target} is no address to watch: it must begin with http:// or https://")
        else:
            base = "http://localhost"
            transport = transport or httpx.AsyncHTTPTransport(uds=target.removeprefix("unix:"))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.AsyncClient(
                base_url=base, headers=headers, timeout=TIMEOUT_S, transport=transport, trust_env=False
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise BadParameter(f"{target} is no address to watch: {error}") from None

    async def __aenter__(self) -> "HttpSource":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def status(self) -> Status:
        async with self._mapped():
            return status_from_json(self._good(await self._client.get("/serai/status")).json())

    async def comparison(self) -> tuple[AttentionCost, ...]:
        async with self._mapped():
            answer = await self._client.get("/serai/model")
            return () if answer.status_code == _NOT_FOUND else comparison_from_json(self._good(answer).json())

    async def act(self, action: Action) -> Outcome:
        async with self._mapped():
            answer = await self._client.post("/serai/actions", json=action.to_json(), timeout=ACTION_TIMEOUT_S)
            if answer.is_error:
                raise ActionRefused(_reason(answer))
            body = answer.json()
        message, session_id = (body.get("message"), body.get("session")) if isinstance(body, dict) else (None, None)
        return Outcome(str(message or "done"), session_id if isinstance(session_id, str) else None)

    async def export(self, session_id: str, path: Path) -> Outcome:
        address = f"/serai/sessions/{quote(session_id, safe='')}/export"
        size = 0
        async with self._mapped(), self._client.stream("GET", address, timeout=ACTION_TIMEOUT_S) as answer:
            if answer.is_error:
                await answer.aread()
                raise ActionRefused(_reason(answer))
            with new_file(path) as file:
                async for piece in answer.aiter_bytes():
                    size += file.write(piece)
        return Outcome(f"{size:,} bytes written to {path}", session_id)

    async def events(self) -> AsyncGenerator[SessionEvent, None]:
        timeout = httpx.Timeout(TIMEOUT_S, read=QUIET_S)
        async with self._mapped(), self._client.stream("GET", "/serai/events", timeout=timeout) as answer:
            if answer.status_code == _NOT_FOUND:
                return
            self._good(answer)
            async for text in answer.aiter_lines():
                if text.startswith("data:"):
                    event = event_from_json(json.loads(text.removeprefix("data:")))
                    if event is not None:
                        yield event

    def _good(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_error:
            code = answer.status_code
            problem = _WANTS_KEY.get(code, f"it answers {code} to {answer.request.url.path}; is it a serai server?")
            raise SourceUnreachable(source=self.name, problem=problem)
        return answer

    @asynccontextmanager
    async def _mapped(self) -> AsyncIterator[None]:
        """Errors of the connection, and of what came over it, as one of ours."""
        try:
            yield
        except httpx.HTTPError as error:
            problem = str(error) or type(error).__name__
            raise SourceUnreachable(source=self.name, problem=problem) from error
        except (StatusUnreadable, ValueError, OverflowError, RecursionError) as error:
            raise SourceUnreachable(source=self.name, problem=f"its answer can't be read: {error}") from error


def _reason(answer: httpx.Response) -> str:
    """The sentence in an error's body, or what its number says."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _WANTS_KEY.get(answer.status_code, f"the server answered {answer.status_code}")
    return str(message)
