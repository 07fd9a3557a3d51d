"""Reading request bodies: bounded, and off the event loop once they are large."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from serai.runtime.server.callers import Caller
from serai.runtime.server.errors import ApiError
from serai.runtime.server.fields import read_object
from serai.runtime.server.service import Service

T = TypeVar("T")

INLINE_BYTES = 32_768
"""Reading so much JSON takes under a millisecond; more is read in a worker thread."""


def caller_of(request: Request) -> Caller:
    """Who sent the request."""
    caller: Caller = request.state.caller
    return caller


def namespace_of(request: Request) -> str:
    """Whose sessions the request may see."""
    return caller_of(request).namespace


def has_no_key(request: Request) -> bool:
    """Whether it was let through without one of the keys that this server asks for."""
    return bool(getattr(request.state, "has_no_key", False))


async def read_body(service: Service, request: Request, read: Callable[[Mapping[str, Any]], T]) -> T:
    """What `read` makes of the body's JSON object. Raises a 413 for a body that is too large, without keeping it."""
    limit = service.options.max_request_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(int(announced), limit)
    parts: list[bytes] = []
    size = 0
    try:
        with anyio.fail_after(service.options.arrive_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(size, limit)
                parts.append(part)
    except TimeoutError:
        waited_s = service.options.arrive_s
        raise ApiError(408, f"the request had not come whole after {waited_s:g} s", "request_timeout") from None
    body = b"".join(parts)
    if size <= INLINE_BYTES:
        return read(read_object(body))
    return await anyio.to_thread.run_sync(lambda: read(read_object(body)))


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the request has {size:,} bytes or more, and at most {limit:,} are read", "request_too_large")
