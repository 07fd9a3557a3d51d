"""What no client library knows: pausing the engine, and sessions as things to list, fork and name."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from serai.checkpoints.names import new_id
from serai.checkpoints.store import Store
from serai.runtime.errors import SeraiError
from serai.runtime.server.callers import TAG_BORDER
from serai.runtime.server.errors import ApiError, invalid
from serai.runtime.server.fields import Fields
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.places import Place
from serai.runtime.server.requests import caller_of, namespace_of, read_body
from serai.runtime.server.responses_request import PREFIX, place_of
from serai.runtime.server.service import Service
from serai.runtime.server.sessions import DELETED_TAG
from serai.runtime.server.streams import whole

log = logging.getLogger(__name__)

MAX_FORKS = 64


async def pause_engine(service: Service, request: Request) -> Response:
    """Stop at the next token border. `mode=keep` holds the replies under way, `wait` lets them end first, `abort` ends
    them now; those that come meanwhile are held. The names are vLLM's, so that training loops written for it work."""
    _check_may_pause(service, request)
    mode = request.query_params.get("mode", "abort")
    if mode not in ("abort", "wait", "keep"):
        raise invalid("mode", f"mode must be abort, wait or keep, and is {mode!r:.40}")

    async def pause() -> Mapping[str, Any]:
        if mode == "abort":
            service.fail_all(ApiError(503, "the engine was paused and its replies ended", "paused"))
        if mode in ("abort", "wait"):
            await service.wait_for_present()
        service.engine_gate.close()
        return {"status": "paused", "is_paused": True}

    return await whole(request, pause)  # who leaves while replies end has not paused anything


async def resume_engine(service: Service, request: Request) -> Response:
    _check_may_pause(service, request)
    service.engine_gate.open()
    return JSONResponse({"status": "resumed", "is_paused": False})


def _check_may_pause(service: Service, request: Request) -> None:
    """A pause holds or ends everybody's replies, so among several namespaces only a key that may can do it."""
    if not caller_of(request).key.may_pause and len({key.namespace for key in service.options.all_keys}) > 1:
        raise ApiError(403, "this key can't pause the engine that others use; give it may_pause = true", "not_allowed")


async def is_paused(service: Service, request: Request) -> Response:
    return JSONResponse({"is_paused": not service.engine_gate.is_open})


async def list_sessions(service: Service, request: Request) -> Response:
    """The sessions of this key that the store holds, latest last, and whether their state is in memory now."""
    namespace, store = namespace_of(request), _store(service)
    stored = await anyio.to_thread.run_sync(store.sessions)
    live = {one.id for one in service.runtime.status().sessions}
    data = [
        {
            "id": one.session_id,
            "object": "serai:session",
            "head": one.head_id,
            "label": one.label,
            "position": one.position,
            "turn": one.turn,
            "nodes": one.nodes,
            "created_at": int(one.created_s),
            "updated_at": int(one.updated_s),
            "live": one.session_id in live,
            "has_snapshot": one.has_snapshot,
        }
        for one in stored
        if one.namespace == namespace
    ]
    return JSONResponse({"object": "list", "data": data})


async def fork(service: Service, request: Request) -> Response:
    """Responses that say the same as this one and go on with random numbers of their own: as many as were asked for, or
    none. Copies no state."""
    place = await service.sessions.place(place_of(request.path_params["id"]), namespace_of(request))
    count = await read_body(service, request, lambda body: Fields(body).integer("count", 1, MAX_FORKS) or 1)
    forks: list[Place] = []
    try:
        for _ in range(count):
            forks.append(await _fork(service, place))
    except BaseException:
        with anyio.CancelScope(shield=True):
            for one in forks:
                try:
                    await service.sessions.forget(one.id)
                except SeraiError as error:  # what went wrong first is what the client is told
                    log.warning("response %s of a fork that failed is still there: %s", one.id, error)
        raise
    return JSONResponse({"object": "list", "data": [{"id": PREFIX + one.id, "object": "response"} for one in forks]})


async def _fork(service: Service, place: Place) -> Place:
    sessions = service.sessions
    stands_at, _ = await sessions.go_on(place)
    try:
        number = sessions.catalogue.next_fork(place.id)
        child = await sessions.branch(stands_at, number)
    finally:
        await sessions.end(stands_at)
    place_id = new_id()
    document = None if place.document is None else {**place.document, "id": PREFIX + place_id}
    copy = replace(place, id=place_id, previous=place.id, document=document, fork=number)
    return await sessions.keep(lambda _: copy, child, ending=None, store=True)


async def tag(service: Service, request: Request) -> Response:
    """Give a response a name; whoever had it before loses it."""
    namespace, store = namespace_of(request), _store(service)
    place = await service.sessions.place(place_of(request.path_params["id"]), namespace)
    name = await read_body(service, request, lambda body: Fields(body).need_text("tag"))
    await anyio.to_thread.run_sync(store.tag, own_tag(namespace, name), place.id)
    return JSONResponse({"object": "serai:tag", "tag": name, "response": PREFIX + place.id})


async def untag(service: Service, request: Request) -> Response:
    name = request.path_params["tag"]
    await anyio.to_thread.run_sync(_store(service).untag, own_tag(namespace_of(request), name))
    return JSONResponse({"object": "serai:tag", "tag": name, "deleted": True})


async def tags(service: Service, request: Request) -> Response:
    namespace, store = namespace_of(request), _store(service)
    found: Mapping[str, str] = await anyio.to_thread.run_sync(store.tags)
    own = own_tag(namespace, "")
    data: list[dict[str, Any]] = [
        {"object": "serai:tag", "tag": name.removeprefix(own), "response": PREFIX + node}
        for name, node in sorted(found.items())
        if name.startswith(own) and not name.startswith(DELETED_TAG) and service.sessions.catalogue.get(node, namespace)
    ]
    return JSONResponse({"object": "list", "data": data})


def own_tag(namespace: str, name: str) -> str:
    """A key's tag as the store knows it, where no other namespace's has the same name. Raises a 400 for the names
    that the server marks deleted places with."""
    if name.startswith(DELETED_TAG):
        raise invalid("tag", f"a tag can't begin with {DELETED_TAG!r}; the server keeps those for itself")
    return f"{namespace}{TAG_BORDER}{name}" if namespace else name


def _store(service: Service) -> Store:
    store = service.sessions.store
    if store is None:
        raise invalid(None, "this server keeps nothing on disk; start it with --store", "no_store")
    return store


ROUTES = [
    ("POST", "/pause", pause_engine),
    ("POST", "/resume", resume_engine),
    ("GET", "/is_paused", is_paused),
    ("GET", "/v1/serai:sessions", list_sessions),
    ("GET", "/v1/serai:tags", tags),
    ("DELETE", "/v1/serai:tags/{tag}", untag),
    ("POST", "/v1/responses/{id}/serai:fork", fork),
    ("POST", "/v1/responses/{id}/serai:tag", tag),
]
