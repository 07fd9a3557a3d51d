"""Where a stream's events go: written together, at a moment when nobody waits for the event loop.

After a step every reply has a token, and the next step begins once their readers have asked for more. Spelling events
as JSON and HTTP before that would hold it up by as much for each client; so events are kept until it has begun.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
from starlette.types import Message, Send

MOST_HELD = 16
"""Events that may wait to be written; then whoever brings more waits for the client."""

POLL_S = 0.001
PATIENCE_S = 0.005
"""Events wait no longer than this for a step to begin."""

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Moments:
    """Tells all wires that wait when to write: once it `is_good`, looked at every `POLL_S`, or out of patience."""

    def __init__(self, is_good: Callable[[], bool]) -> None:
        self._is_good = is_good
        self._waiting: list[anyio.Event] = []
        self._wanted = anyio.Event()

    def tell(self, due: anyio.Event) -> None:
        """Set `due` at the next one. It is all that is done for a wire before the step that its events wait for."""
        self._waiting.append(due)
        if len(self._waiting) == 1:
            self._wanted.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._wanted.wait()
            until_s = anyio.current_time() + PATIENCE_S
            await anyio.sleep(POLL_S)
            while not self._is_good() and anyio.current_time() < until_s:  # noqa: ASYNC110  # a step tells nobody
                await anyio.sleep(POLL_S)
            self._wanted = anyio.Event()
            waiting, self._waiting = self._waiting, []
            for due in waiting:
                due.set()


class Wire:
    """One stream's way to its client. `run` must run beside; whoever brings events waits while the client is slow."""

    def __init__(self, send: Send, moments: Moments) -> None:
        self._send = send
        self._moments = moments
        self._turn = anyio.Lock(fast_acquire=True)
        self._held: list[tuple[str | None, Mapping[str, Any]] | bytes] = []
        self._due = anyio.Event()
        self._headers_sent = False
        self.last_s = anyio.current_time()
        self.puts_since_s: float | None = None

    @property
    def begun(self) -> bool:
        """Whether the answer can't be another one any more."""
        return self._headers_sent or bool(self._held)

    async def emit(self, name: str | None, data: Mapping[str, Any]) -> None:
        """Bring an event: its name, where the protocol names them, and its data."""
        await self._bring((name, data))

    async def put(self, line: bytes) -> None:
        """Bring an event that `line_of` has spelled."""
        await self._bring(line)

    async def _bring(self, item: "tuple[str | None, Mapping[str, Any]] | bytes") -> None:
        self._held.append(item)
        if len(self._held) >= MOST_HELD:
            await self.pass_on()
        elif len(self._held) == 1:
            self._moments.tell(self._due)

    async def run(self) -> None:
        """Write what is brought, at good moments; until cancelled."""
        while True:
            await self._due.wait()
            self._due = anyio.Event()
            await self.pass_on()

    async def pass_on(self, more: bytes = b"") -> None:
        """Write what is held, and `more` after it; without either, the headers."""
        async with self._turn:
            await self._write(more, last=False)

    async def end(self, last: bytes) -> None:
        """Write what is held and `last`, after which nothing follows."""
        async with self._turn:
            await self._write(last, last=True)

    async def instead(self, answer: Callable[[], Awaitable[None]]) -> None:
        """Answer in another way than by events. Only for one that has not `begun`."""
        async with self._turn:
            self._headers_sent = True
            await answer()

    async def _write(self, more: bytes, *, last: bool) -> None:
        held, self._held = self._held, []
        lines = [item if isinstance(item, bytes) else line_of(*item) for item in held]
        if not self._headers_sent:
            self._headers_sent = True
            await self._pass({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        if lines or more or last:
            await self._pass({"type": "http.response.body", "body": b"".join([*lines, more]), "more_body": not last})

    async def _pass(self, message: Message) -> None:
        self.puts_since_s = anyio.current_time()
        try:
            await self._send(message)
        finally:
            self.last_s, self.puts_since_s = anyio.current_time(), None


def line_of(name: str | None, data: Mapping[str, Any]) -> bytes:
    """One event as it goes over the wire."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    # A lone surrogate, which a model can't write but a request may echo, has no UTF-8 form.
    payload = f"data: {text}\n\n".encode("utf-8", "replace")
    return payload if name is None else b"event: " + name.encode() + b"\n" + payload
