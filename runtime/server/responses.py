"""`/v1/responses`: responses whose ids are immutable places.

Using one twice forks; using one after a restart resumes.
"""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import anyio.lowlevel
from starlette.requests import Request
from starlette.responses import Response

from serai.runtime.server.errors import ApiError, invalid, response_not_found
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.places import Place
from serai.runtime.server.requests import caller_of, namespace_of, read_body
from serai.runtime.server.responses_request import PREFIX, place_of, read_responses
from serai.runtime.server.runs import Run
from serai.runtime.server.service import Service
from serai.runtime.server.streams import whole
from serai.runtime.server.wire import Wire

MOST_ITEMS = 100
"""Of an input, at a time."""


async def create(service: Service, request: Request) -> Response:
    caller = caller_of(request)
    asked = await read_body(service, request, lambda body: read_responses(body, caller))
    run = await service.runs.prepare(asked)
    if asked.background:
        await service.tasks.start(service.runs.execute, run)
        if asked.stream:
            return service.stream(lambda wire: follow(run, -1, wire))
        return JSONResponse(run.document.document() | {"status": "queued"})
    if asked.stream:

        async def produce(wire: Wire) -> None:
            run.hear = lambda _, line: wire.put(line)
            await service.runs.execute(run)

        return service.stream(produce)

    async def answer() -> Mapping[str, Any]:
        await service.runs.execute(run)
        if run.failure is not None:
            raise run.failure
        return run.document.document()

    return await whole(request, answer)


async def follow(run: Run, after: int, wire: Wire) -> None:
    """The events of a response from outside: leaving doesn't disturb it."""
    async with aclosing(run.log.after(after)) as events:
        async for line in events:
            await wire.put(line)
            await anyio.lowlevel.checkpoint()  # those that are there already would hold the loop, thousands at once


async def get(service: Service, request: Request) -> Response:
    place_id, namespace = place_of(request.path_params["id"]), namespace_of(request)
    run = service.runs.get(place_id, namespace)
    if request.query_params.get("stream") in ("true", "1"):
        if run is None:
            await _document(service, place_id, namespace)  # a 404 if it isn't known at all
            raise invalid("stream", "the events of this response are not kept any more; get it without stream")
        chosen = run
        after = _starting_after(request)
        return service.stream(lambda wire: follow(chosen, after, wire))
    if run is not None and not run.ended.is_set():
        document: Mapping[str, Any] = run.document.document()
    else:
        document = await _document(service, place_id, namespace)
    children = [PREFIX + child for child in service.sessions.catalogue.children(place_id)]
    return JSONResponse({**document, "next_response_ids": children})


def _starting_after(request: Request) -> int:
    text = request.query_params.get("starting_after", "-1")
    if text != "-1" and not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise invalid("starting_after", f"starting_after must be a sequence number, and is {text!r:.40}")
    return int(text)


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", "20")
    if not text.isdecimal() or len(text) > 3 or not 1 <= int(text) <= MOST_ITEMS:
        raise invalid("limit", f"limit must be an integer from 1 to {MOST_ITEMS}, and is {text!r:.40}")
    return int(text)


async def _document(service: Service, place_id: str, namespace: str) -> Mapping[str, Any]:
    run = service.runs.get(place_id, namespace)
    if run is not None and service.sessions.catalogue.get(place_id, namespace) is None:
        return run.document.document()  # ended before there was a place
    document = (await _place(service, place_id, namespace)).document
    if document is None:
        raise response_not_found(PREFIX + place_id)
    return document


async def _place(service: Service, place_id: str, namespace: str) -> Place:
    try:
        return await service.sessions.place(place_id, namespace)
    except ApiError:
        raise response_not_found(PREFIX + place_id) from None


async def delete(service: Service, request: Request) -> Response:
    """Forget a response. Those that go on from it keep what it said; it can't be gone on from any more."""
    place_id, namespace = place_of(request.path_params["id"]), namespace_of(request)
    await _document(service, place_id, namespace)
    run = service.runs.get(place_id, namespace)
    if run is not None:
        await run.cancel()
    service.runs.remove(place_id)
    await service.sessions.forget(place_id)
    return JSONResponse({"id": PREFIX + place_id, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> Response:
    """End a response where it is. What was said so far is a place like any other."""
    place_id, namespace = place_of(request.path_params["id"]), namespace_of(request)
    run = service.runs.get(place_id, namespace)
    if run is not None:
        await run.cancel()
    return JSONResponse(await _document(service, place_id, namespace))


def _running(service: Service, request: Request) -> Run:
    place_id = place_of(request.path_params["id"])
    run = service.runs.get(place_id, namespace_of(request))
    if run is None:
        raise response_not_found(PREFIX + place_id)
    if run.ended.is_set():
        raise ApiError(409, f"response {PREFIX}{place_id} has ended, so it can't be paused or resumed", "conflict")
    return run


async def pause(service: Service, request: Request) -> Response:
    """Hold a response at its next token border; its state stays as it is."""
    run = _running(service, request)
    run.gate.close()
    return JSONResponse({**run.document.document(), "serai:paused": True})


async def resume(service: Service, request: Request) -> Response:
    run = _running(service, request)
    run.gate.open()
    return JSONResponse({**run.document.document(), "serai:paused": False})


async def input_items(service: Service, request: Request) -> Response:
    place = await _place(service, place_of(request.path_params["id"]), namespace_of(request))
    if place.input is None:
        raise ApiError(404, "the input of this response was too large to be kept with it", "input_not_kept")
    items = list(place.input)
    if request.query_params.get("order", "desc") != "asc":
        items.reverse()
    after = request.query_params.get("after")
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        items = items[places[0] + 1 :] if places else []
    page = items[: (limit := _limit(request))]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, "has_more": len(items) > limit, **ends})


async def input_tokens(service: Service, request: Request) -> Response:
    """How many tokens a request would have, without answering it."""
    caller = caller_of(request)
    asked = await read_body(service, request, lambda body: read_responses(body, caller))
    prepared = await service.runs.prepare(asked)
    count = await service.asking.count(prepared.request.ask)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


async def compact(service: Service, request: Request) -> Response:
    raise ApiError(404, "responses can't be compacted here: what was read is never rewritten", "unsupported")


ROUTES = [
    ("POST", "/v1/responses/compact", compact),
    ("POST", "/v1/responses", create),
    ("POST", "/v1/responses/input_tokens", input_tokens),
    ("GET", "/v1/responses/{id}", get),
    ("DELETE", "/v1/responses/{id}", delete),
    ("POST", "/v1/responses/{id}/cancel", cancel),
    ("POST", "/v1/responses/{id}/pause", pause),
    ("POST", "/v1/responses/{id}/resume", resume),
    ("GET", "/v1/responses/{id}/input_items", input_items),
]
