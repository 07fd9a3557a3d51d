"""What a client is told when something can't be done, in the shape of OpenAI's errors."""

from dataclasses import dataclass, field
from typing import Any

from serai.runtime.chat.errors import PromptInvalid
from serai.runtime.errors import (
    BadParameter,
    DeadlineMissed,
    EngineFailed,
    LogitsInvalid,
    ModelMismatch,
    NameInvalid,
    NodeInUse,
    NotOwner,
    OutOfBudget,
    OverQuota,
    PromptTooLong,
    SeraiError,
    SessionBusy,
    SessionClosed,
    SessionGone,
    ShuttingDown,
    StoreFull,
    TooManyWaiting,
    WaitedTooLong,
)

MOST_CHARACTERS = 1_000
"""Of a message: it may repeat a value that the client sent, of any size."""

RETRY_AFTER_S = 5
"""A turn of a typical agent takes seconds on a processor; asking again sooner only meets the same queue."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer that is an error: HTTP `status`, and what stands in the body's `error`."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        if self.status == 404:
            return "not_found"
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def shown(self) -> str:
        """The message, cut where it is too long to be sent."""
        whole = self.message
        return whole if len(whole) <= MOST_CHARACTERS else f"{whole[:MOST_CHARACTERS]}…"

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        return {"error": {"message": self.shown, "type": self.kind, "param": self.param, "code": self.code}}

    def __str__(self) -> str:
        return self.message


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The request is wrong at `param`."""
    return ApiError(400, message, code, param)


def busy(message: str) -> ApiError:
    """Try again later."""
    return ApiError(429, message, "overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})


def unavailable(message: str, code: str) -> ApiError:
    """The server can't serve now, whatever the request."""
    return ApiError(503, message, code)


def response_not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"no response {response_id[:80]!r} is known: it was never made here, was deleted, or was not to be stored",
        "previous_response_not_found",
    )


def api_error(error: Exception) -> ApiError:
    """Any error as a client is told it. What nobody foresaw says its kind and no more; the log has the rest."""
    match error:
        case ApiError():
            return error
        case PromptInvalid():
            where = None if error.message_index is None else f"messages[{error.message_index}]"
            return invalid(where, str(error))
        case PromptTooLong():
            return invalid(None, str(error), "context_length_exceeded")
        case BadParameter() | NameInvalid():
            return invalid(None, str(error))
        case OverQuota():
            return ApiError(429, str(error), "over_quota", headers={"Retry-After": str(RETRY_AFTER_S)})
        case TooManyWaiting() | WaitedTooLong() | OutOfBudget():
            return busy(str(error))
        case DeadlineMissed():
            # The time was the client's own choice: its library must not spend it again, as it does for every 408.
            return ApiError(408, str(error), "deadline_missed", headers={"x-should-retry": "false"})
        case SessionGone():
            return ApiError(404, str(error), "not_found")
        case SessionBusy() | SessionClosed() | NodeInUse() | ModelMismatch() | NotOwner():
            return ApiError(409, str(error), "conflict")
        case ShuttingDown():
            return unavailable(str(error), "shutting_down")
        case EngineFailed():
            return unavailable(str(error), "engine_failed")
        case LogitsInvalid():
            return ApiError(500, str(error), "logits_invalid")
        case StoreFull():
            return ApiError(507, str(error), "store_full")
        case SeraiError():
            return ApiError(500, str(error), type(error).__name__)
        case _:
            return ApiError(500, f"the server failed with {type(error).__name__}; its log says more", "internal_error")
