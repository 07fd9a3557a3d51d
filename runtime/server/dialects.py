"""How errors are spelled, and how a stream ends: OpenAI's way, and Anthropic's below `/v1/messages`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serai.runtime.server.errors import ApiError
from serai.runtime.server.wire import line_of

MESSAGES_PATH = "/v1/messages"


@dataclass(frozen=True, slots=True)
class Dialect:
    """`error_event` is an error within a stream; `end` is what the stream ends with, error or not."""

    error_body: Callable[[ApiError], dict[str, Any]]
    error_event: Callable[[ApiError], bytes]
    end: bytes


def _anthropic_kind(error: ApiError) -> str:
    """https://docs.anthropic.com/en/api/errors, whose statuses are OpenAI's but for 529, which is 503 here."""
    named = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
    }
    return named.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")


def _anthropic_body(error: ApiError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _anthropic_kind(error), "message": error.shown}}


# OpenAI's errors have no name in a stream: its clients look for them in the data.
OPENAI = Dialect(ApiError.body, lambda error: line_of(None, error.body()), b"data: [DONE]\n\n")
ANTHROPIC = Dialect(_anthropic_body, lambda error: line_of("error", _anthropic_body(error)), b"")


def dialect_of(path: str) -> Dialect:
    """What clients of this path speak."""
    return ANTHROPIC if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/") else OPENAI
