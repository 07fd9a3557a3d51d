"""A server watched over HTTP: by the contract in `source.py`, and over a real Unix socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path

import anyio
import httpx
import pytest

from serai.runtime.errors import BadParameter
from serai.runtime.memory.attention import PUBLISHED
from serai.runtime.monitor.http_source import HttpSource
from serai.runtime.monitor.source import About, Action, ActionKind, ActionRefused, Outcome, SourceUnreachable
from serai.runtime.sessions.events import EventKind
from tests.runtime.monitor.scripted import event, names_in, status

pytestmark = pytest.mark.anyio

Handler = Callable[[httpx.Request], httpx.Response]


def source(handler: Handler, *, key: str | None = None, target: str = "http://host/base") -> HttpSource:
    return HttpSource(target, key=key, transport=httpx.MockTransport(handler))


class Pieces(httpx.AsyncByteStream):
    """A body that comes in pieces, and may break off."""

    def __init__(self, *pieces: bytes, breaks: bool = False) -> None:
        self._pieces = pieces
        self._breaks = breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        if self._breaks:
            raise httpx.RemoteProtocolError("peer closed connection")


@pytest.mark.parametrize("target", ["http://host/base", "http://host/base/", "http://host/base/v1"])
async def test_a_status_is_asked_for_below_the_address_with_the_key(target: str) -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((str(request.url), request.headers.get("authorization", "")))
        return httpx.Response(200, json=status().to_json())

    async with source(answer, key="secret", target=target) as watched:
        assert await watched.status() == status()
    assert asked == [("http://host/base/serai/status", "Bearer secret")]


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (httpx.Response(401), "http://host/base can't be watched: it wants a key"),
        (httpx.Response(403), "it doesn't accept this key"),
        (httpx.Response(404), "it answers 404 to /base/serai/status; is it a serai server?"),
        (httpx.Response(200, text="<html>"), "its answer can't be read"),
        (httpx.Response(200, text="[" * 100_000), "its answer can't be read"),
        (httpx.Response(200, json={}), "its answer can't be read: model must be str"),
    ],
)
async def test_what_keeps_a_status_from_coming_is_one_sentence(response: httpx.Response, told: str) -> None:
    async with source(lambda request: response) as watched:
        with pytest.raises(SourceUnreachable) as caught:
            await watched.status()
    assert told in str(caught.value)


async def test_an_action_is_sent_and_its_outcome_read() -> None:
    sent: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json=Outcome("forked", "new").to_json())

    async with source(answer) as watched:
        assert await watched.act(Action(ActionKind.FORK, "a")) == Outcome("forked", "new")
    assert sent == [{"action": "fork", "session": "a", "value": None}]


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (httpx.Response(409, json={"error": {"message": "session a is busy", "type": "x"}}), "session a is busy"),
        (httpx.Response(401, text="no"), "it wants a key (--key or SERAI_API_KEY)"),
        (httpx.Response(500, json={"error": "no object"}), "the server answered 500"),
    ],
)
async def test_a_refusal_carries_the_servers_own_sentence(response: httpx.Response, told: str) -> None:
    async with source(lambda request: response) as watched:
        with pytest.raises(ActionRefused) as caught:
            await watched.act(Action(ActionKind.PAUSE, "a"))
    assert str(caught.value) == told


async def test_events_are_read_as_they_come_however_they_are_cut() -> None:
    made = [event(EventKind.FORKED, "a", "x"), event(EventKind.CLOSED, "b", "y", missed=3)]
    lines = ": keep\n\n" + "".join(f"data: {json.dumps(asdict(one) | {'kind': one.kind.value})}\n\n" for one in made)
    unknown = 'data: {"kind": "of next year"}\n\n'
    body = (unknown + lines).encode()
    stream = Pieces(body[:50], body[50:51], body[51:])
    async with source(lambda request: httpx.Response(200, stream=stream)) as watched:
        assert [one async for one in watched.events()] == made


async def test_a_server_without_events_or_comparison_is_fine() -> None:
    async with source(lambda request: httpx.Response(404)) as watched:
        assert [one async for one in watched.events()] == []
        assert await watched.about() == About()


async def test_a_stream_of_events_that_breaks_off_says_so() -> None:
    broken = httpx.Response(200, stream=Pieces(b": keep\n", breaks=True))
    async with source(lambda request: broken) as watched:
        with pytest.raises(SourceUnreachable, match="peer closed connection"):
            assert [one async for one in watched.events()] == []


async def test_the_comparison_is_the_servers() -> None:
    body = {"comparison": [asdict(cost) for cost in PUBLISHED]}
    async with source(lambda request: httpx.Response(200, json=body)) as watched:
        assert await watched.about() == About(PUBLISHED)


async def test_an_export_is_whole_or_not_there(tmp_path: Path) -> None:
    whole, broken, refused = tmp_path / "whole", tmp_path / "broken", tmp_path / "refused"
    async with source(lambda request: httpx.Response(200, stream=Pieces(b"abc", b"def"))) as watched:
        assert (await watched.export("a/b", whole)).message == f"6 bytes written to {whole}"
    async with source(lambda request: httpx.Response(200, stream=Pieces(b"abc", breaks=True))) as watched:
        with pytest.raises(SourceUnreachable):
            await watched.export("a", broken)
    no = httpx.Response(404, json={"error": {"message": "there is no session a"}})
    async with source(lambda request: no) as watched:
        with pytest.raises(ActionRefused, match="there is no session a"):
            await watched.export("a", refused)
    assert names_in(tmp_path) == ["whole"]
    assert await anyio.Path(whole).read_bytes() == b"abcdef"


async def test_a_unix_socket_is_spoken_to_and_its_absence_said(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        body = json.dumps(status().to_json()).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, path), HttpSource(f"unix:{path}") as watched:
        assert await watched.status() == status()
        assert await watched.status() == status()
    assert [line.split(b"\r\n")[0] for line in asked] == [b"GET /serai/status HTTP/1.1"] * 2
    async with HttpSource(path) as watched:
        with pytest.raises(SourceUnreachable):
            await watched.status()


@pytest.mark.parametrize("target", ["ftp://host", "file:///etc/passwd", "http://[::1"])
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(BadParameter, match="no address to watch"):
        HttpSource(target)
