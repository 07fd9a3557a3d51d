"""The monitor over HTTP against a real runtime, behind the smallest server that it can watch."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
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
from serai.runtime.monitor import acting
from serai.runtime.monitor.http_source import HttpSource
from serai.runtime.monitor.in_process import InProcess
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused
from serai.runtime.runtime import Runtime
from tests.runtime.fake_runtime import fake_runtime

pytestmark = pytest.mark.anyio


def server(runtime: Runtime, store: Store | None, folder: Path) -> Starlette:
    """The smallest server that a monitor can watch."""

    async def status(request: Request) -> Response:
        return JSONResponse(runtime.status().to_json())

    async def model(request: Request) -> Response:
        about = await InProcess(runtime).about()
        return JSONResponse({"comparison": [asdict(cost) for cost in about.comparison]})

    async def actions(request: Request) -> Response:
        outcome = await acting.act(runtime, Action.from_json(await request.json()), store=store)
        return JSONResponse(outcome.to_json())

    async def export(request: Request) -> Response:
        file = folder / "to-send"
        await acting.export(runtime, request.path_params["id"], file, store=store)
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
        assert (await source.about()).comparison == ()
        fork = await source.act(Action(ActionKind.FORK, session.id, "two"))
        assert {one.id for one in (await source.status()).sessions} == {session.id, fork.session_id}
        with pytest.raises(ActionRefused, match="tags needs the store"):
            await source.act(Action(ActionKind.TAG, session.id, "v1"))
        paused = await source.act(Action(ActionKind.PAUSE, session.id))
        assert (await source.act(Action(ActionKind.RESUME, paused.session_id or ""))).session_id == session.id


async def test_an_exported_session_arrives_as_a_file_here(tmp_path: Path) -> None:
    async with fake_runtime(store=tmp_path / "store") as runtime:
        store = runtime.store
        async with served(runtime, tmp_path, store) as source:
            session = await runtime.session()
            await session.append([1, 2, 3])
            await source.export(session.id, tmp_path / "here")
        sent = await anyio.Path(tmp_path / "to-send").read_bytes()
        assert await anyio.Path(tmp_path / "here").read_bytes() == sent
        assert sent
