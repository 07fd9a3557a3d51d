"""A server watched over HTTP, or over HTTP on a Unix socket."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

from serai.runtime.errors import BadParameter
from serai.runtime.monitor.detail import SessionDetail
from serai.runtime.monitor.files import new_file
from serai.runtime.monitor.reading import (
    StatusUnreadable,
    about_from_json,
    detail_from_json,
    event_from_json,
    passage_from_json,
    status_from_json,
)
from serai.runtime.monitor.source import About, Action, ActionRefused, Outcome, SourceUnreachable
from serai.runtime.monitor.transcript import Passage
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
_NOT_SHOWN = (401, 403, _NOT_FOUND)
"""What a server says to a monitor without a key, or an older one to what it doesn't know."""


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

    async def about(self) -> About:
        async with self._mapped():
            answer = await self._client.get("/serai/model")
            return About() if answer.status_code == _NOT_FOUND else about_from_json(self._good(answer).json())

    async def detail(self, session_id: str) -> SessionDetail | None:
        async with self._mapped():
            answer = await self._client.get(f"/serai/sessions/{quote(session_id, safe='')}/detail")
            if answer.status_code in _NOT_SHOWN:
                return None
            return detail_from_json(self._good(answer).json())

    async def say(self, session_id: str, text: str) -> AsyncGenerator[Passage, None]:
        address = f"/serai/sessions/{quote(session_id, safe='')}/say"
        timeout = httpx.Timeout(TIMEOUT_S, read=QUIET_S)
        async with (
            self._mapped(),
            self._client.stream("POST", address, json={"text": text}, timeout=timeout) as answer,
        ):
            if answer.is_error:
                await answer.aread()
                raise ActionRefused(_reason(answer))
            async for body in _events(answer):
                if "error" in body:
                    raise ActionRefused(_sentence(body))
                yield passage_from_json(body)

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
            if answer.status_code in _NOT_SHOWN:
                return
            self._good(answer)
            async for body in _events(answer):
                event = event_from_json(body)
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
        except (StatusUnreadable, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise SourceUnreachable(source=self.name, problem=f"its answer can't be read: {error}") from error


async def _events(answer: httpx.Response) -> AsyncIterator[Mapping[str, object]]:
    """The objects of an event stream, up to its end."""
    async for text in answer.aiter_lines():
        data = text.removeprefix("data:").strip()
        if text.startswith("data:") and data != "[DONE]":
            body = json.loads(data)
            yield body if isinstance(body, dict) else {}


def _reason(answer: httpx.Response) -> str:
    """The sentence in an error's body, or what its number says."""
    if answer.status_code in _WANTS_KEY:
        return _WANTS_KEY[answer.status_code]
    try:
        return _sentence(answer.json())
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"the server answered {answer.status_code}"


def _sentence(body: Any) -> str:
    """The sentence of an error; raises `KeyError` or `TypeError` where there is none."""
    return str(body["error"]["message"])
