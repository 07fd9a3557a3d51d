"""`/v1/messages`: the API of Anthropic's clients, over the same sessions as chat completions."""

from starlette.requests import Request
from starlette.responses import Response

from serai.runtime.server.dialects import MESSAGES_PATH
from serai.runtime.server.json_answers import JSONResponse
from serai.runtime.server.messages_output import MessageAnswer
from serai.runtime.server.messages_request import read_messages_request
from serai.runtime.server.requests import caller_of, read_body
from serai.runtime.server.service import Service
from serai.runtime.server.streams import whole


async def create(service: Service, request: Request) -> Response:
    caller, stored = caller_of(request), service.options.stored_chats
    asked = await read_body(
        service, request, lambda body: read_messages_request(body, caller, stored=stored, counts=False)
    )
    answer = MessageAnswer(service, asked)
    if asked.stream:
        return service.stream(lambda wire: answer.stream(wire.emit))
    return await whole(request, answer.whole)


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens a request would have, without answering it."""
    caller = caller_of(request)
    asked = await read_body(
        service, request, lambda body: read_messages_request(body, caller, stored=False, counts=True)
    )
    return JSONResponse({"input_tokens": await service.asking.count(asked.ask)})


ROUTES = [("POST", MESSAGES_PATH, create), ("POST", f"{MESSAGES_PATH}/count_tokens", count_tokens)]
