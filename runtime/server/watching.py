"""What a monitor asks of a server: status, events, and actions on sessions (`monitor.source` says the forms)."""

from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from serai.runtime.errors import SeraiError
from serai.runtime.monitor import acting, saying
from serai.runtime.monitor.detail import look, passage_json
from serai.runtime.monitor.in_process import InProcess
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused
from serai.runtime.server.errors import ApiError
from serai.runtime.server.extensions import own_tag
from serai.runtime.server.fields import Fields
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.requests import has_no_key, namespace_of, read_body
from serai.runtime.server.service import Service
from serai.runtime.server.streams import error_response
from serai.runtime.server.wire import Wire
from serai.runtime.sessions.events import SessionEvent

FROM_STORE = (ActionKind.RESUME, ActionKind.DELETE)
"""What can be done to a session that is not live."""


async def status(service: Service, request: Request) -> Response:
    """The runtime's status with the sessions of this key. Whoever has none, on this machine, sees the figures of all
    sessions, but neither what they are called nor whose they are, nor what each namespace has."""
    whole = service.runtime.status()
    if has_no_key(request):
        seen = replace(
            whole,
            sessions=tuple(replace(one, label="", namespace="") for one in whole.sessions),
            namespaces=(),
        )
    else:
        namespace = namespace_of(request)
        seen = replace(
            whole,
            sessions=tuple(one for one in whole.sessions if one.namespace == namespace),
            namespaces=tuple(one for one in whole.namespaces if one.namespace == namespace),
        )
    return JSONResponse(seen.to_json())


async def model(service: Service, request: Request) -> Response:
    """The memory that other kinds of attention would take, and whether the asker may act."""
    about = await InProcess(service.runtime).about()
    costs = [asdict(cost) for cost in about.comparison]
    return JSONResponse({"comparison": costs, "may_act": not has_no_key(request)})


async def detail(service: Service, request: Request) -> Response:
    """What a live session of this key says, and its nodes."""
    name = request.path_params["id"]
    await _check_owner(service, name, namespace_of(request), stored=False)
    session = service.runtime.find(name)
    if session is None:
        raise ApiError(404, f"there is no session {name!r:.80}", "not_found")
    return JSONResponse((await look(service.runtime, session, store=service.sessions.store)).to_json())


async def say(service: Service, request: Request) -> Response:
    """Say something to a live session of this key; the reply comes as a stream of passages. Leaving ends it."""
    name, namespace = request.path_params["id"], namespace_of(request)
    text = await read_body(service, request, lambda body: Fields(body).need_text("text"))
    await _check_owner(service, name, namespace, stored=False)
    if service.sessions.is_parked(name):
        raise ApiError(
            409, f"requests go on from session {name!r:.80} as it stands; fork it and talk to the fork", "refused"
        )

    async def produce(wire: Wire) -> None:
        try:
            async with service.work(namespace), aclosing(saying.say(service.runtime, name, text)) as pieces:
                async for piece in pieces:
                    await wire.emit(None, passage_json(piece))
        except ActionRefused as error:
            raise ApiError(409, str(error), "refused") from None

    return service.stream(produce)


async def act(service: Service, request: Request) -> Response:
    """Fork, pause, resume, cancel, tag, label or delete a session of this key."""
    action = await read_body(service, request, Action.from_json)
    namespace = namespace_of(request)
    await _check_owner(service, action.session_id, namespace, action.kind in FROM_STORE)
    if action.kind is ActionKind.TAG:
        action = replace(action, value=own_tag(namespace, action.value or ""))
    try:
        outcome = await acting.act(
            service.runtime,
            action,
            store=service.sessions.store,
            cancel=lambda session_id: service.runs.cancel_session(session_id),
        )
    except ActionRefused as error:
        raise ApiError(409, str(error), "refused") from None
    return JSONResponse({"message": outcome.message, "session": outcome.session_id})


async def _check_owner(service: Service, name: str, namespace: str, stored: bool) -> None:
    """Sessions of another key are as good as none. `stored`: one that is not live will do as well."""
    session = service.runtime.find(name)
    owner = None if session is None else session.namespace
    store = service.sessions.store
    if session is None and store is not None and stored:
        owner = (await anyio.to_thread.run_sync(lambda: store.node(store.resolve(name)))).namespace
    if owner != namespace:
        raise ApiError(404, f"there is no session {name!r:.80}", "not_found")


async def export(service: Service, request: Request) -> Response:
    """A session, live or stored, as a bundle that another store can import."""
    name = request.path_params["id"]
    await _check_owner(service, name, namespace_of(request), stored=True)
    return _Bundle(service, name)


class _Bundle(Response):
    """Written to a file first, which goes with the answer: a client that reads slowly holds no memory."""

    def __init__(self, service: Service, session_id: str) -> None:
        self._service = service
        self._session_id = session_id
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with TemporaryDirectory(prefix="serai-export-") as folder:
            path = Path(folder) / f"{self._session_id}.serai"
            try:
                await acting.export(self._service.runtime, self._session_id, path, store=self._service.sessions.store)
                answer: Response = FileResponse(path, media_type="application/octet-stream")
            except (ActionRefused, SeraiError) as error:
                answer = error_response(error)
            await answer(scope, receive, send)


async def events(service: Service, request: Request) -> Response:
    """What happens to sessions of this key, as it happens. A slow watcher misses events and is told how many."""
    namespace = namespace_of(request) if service.options.all_keys else None

    async def produce(wire: Wire) -> None:
        with service.runtime.watch(namespace=namespace) as watcher:
            async for event in watcher:
                await wire.emit(None, _event_json(event))

    return service.stream(produce, headers_at_once=True)


def _event_json(event: SessionEvent) -> dict[str, object]:
    return asdict(event) | {"kind": event.kind.value}


ROUTES = [
    ("GET", "/serai/status", status),
    ("GET", "/serai/model", model),
    ("GET", "/serai/events", events),
    ("POST", "/serai/actions", act),
    ("GET", "/serai/sessions/{id}/detail", detail),
    ("POST", "/serai/sessions/{id}/say", say),
    ("GET", "/serai/sessions/{id}/export", export),
]
