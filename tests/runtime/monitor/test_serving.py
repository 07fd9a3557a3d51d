"""The monitor over HTTP against a real runtime: both sides of the contract meet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from serai.checkpoints.store import Store
from serai.runtime.errors import SeraiError
from serai.runtime.events import EventKind
from serai.runtime.monitor import serving
from serai.runtime.monitor.http_source import HttpSource
from serai.runtime.monitor.reading import event_from_json
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused
from serai.runtime.runtime import Runtime
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


def server(runtime: Runtime, store: Store | None, folder: Path) -> Starlette:
    """The smallest server that a monitor can watch."""

    async def status(request: Request) -> Response:
        return JSONResponse(serving.status_body(runtime))

    async def model(request: Request) -> Response:
        return JSONResponse(serving.model_body(runtime))

    async def actions(request: Request) -> Response:
        return JSONResponse(await serving.action_body(runtime, await request.json(), store=store))

    async def export(request: Request) -> Response:
        file = folder / "to-send"
        await serving.export_file(runtime, request.path_params["id"], file, store=store)
        return FileResponse(file)

    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, 409)

    return Starlette(
        routes=[
            Route("/serai/status", status),
            Route("/serai/model", model),
            Route("/serai/actions", actions, methods=["POST"]),
            Route("/serai/sessions/{id}/export", export),
        ],
        exception_handlers={SeraiError: failed},
    )


@asynccontextmanager
async def served(runtime: Runtime, folder: Path, store: Store | None = None) -> AsyncIterator[HttpSource]:
    transport = httpx.ASGITransport(server(runtime, store, folder))
    async with HttpSource("http://host", transport=transport) as source:
        yield source


async def test_figures_actions_and_refusals_cross_the_wire(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store") as runtime, served(runtime, tmp_path) as source:
        session = await runtime.session(label="[/b] 字")
        await session.append([1, 2, 3])
        (seen,) = (await source.status()).sessions
        assert (seen.id, seen.label, seen.position) == (session.id, "[/b] 字", 3)
        assert await source.comparison() == ()
        fork = await source.act(Action(ActionKind.FORK, session.id, "two"))
        assert {one.id for one in (await source.status()).sessions} == {session.id, fork.session_id}
        with pytest.raises(ActionRefused, match="tags needs the store"):
            await source.act(Action(ActionKind.TAG, session.id, "v1"))
        paused = await source.act(Action(ActionKind.PAUSE, session.id))
        assert (await source.act(Action(ActionKind.RESUME, paused.session_id or ""))).session_id == session.id


async def test_an_exported_session_arrives_as_a_file_here(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store") as runtime:
        store = runtime._services.journal._store
        async with served(runtime, tmp_path, store) as source:
            session = await runtime.session()
            await session.append([1, 2, 3])
            await source.export(session.id, tmp_path / "here")
        sent = await anyio.Path(tmp_path / "to-send").read_bytes()
        assert await anyio.Path(tmp_path / "here").read_bytes() == sent
        assert sent


async def test_the_event_stream_tells_events_and_that_it_is_alive() -> None:
    async with fake_runtime() as runtime:
        lines = serving.event_lines(runtime, keep_alive_s=0.0)
        assert await anext(lines) == ": watching\n\n"
        assert await anext(lines) == ": keep\n\n"
        await lines.aclose()
        lines = serving.event_lines(runtime)
        await anext(lines)
        session = await runtime.session(label="a")
        told = await anext(lines)
        await lines.aclose()
    assert told.endswith("\n\n")
    event = event_from_json(httpx.Response(200, text=told.removeprefix("data:")).json())
    assert event is not None
    assert (event.kind, event.session_id, event.detail) == (EventKind.OPENED, session.id, "a")
