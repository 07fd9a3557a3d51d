"""The same runtime without `async`, for notebooks and scripts: each call waits for its end.

    from serai.runtime import blocking

    with blocking.open_runtime("nano", budget="1GiB") as rt:
        session = rt.session()
        session.append("Once")
        for token in session.generate():
            print(token.text, end="")

The event loop runs on a thread of its own, so calls may come from any thread. Names, arguments and errors are those of
the asynchronous classes, whose docstrings say what each does; what they hold besides is in `.asynchronous`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal
from numpy.typing import NDArray

from serai.runtime import opening
from serai.runtime import runtime as runtimes
from serai.runtime.chat.reply import Event, Reply
from serai.runtime.memory.accounts import Quota
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sessions import conversation
from serai.runtime.sessions import session as sessions
from serai.runtime.sessions.contents import Appended
from serai.runtime.sessions.generation import Completion, FinishReason, Token
from serai.runtime.sessions.journal import Point
from serai.runtime.status import Status

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Whole = TypeVar("Whole")
Content = str | Sequence[int] | NDArray[np.integer]


@contextmanager
def open_runtime(model: str | Path, **options: Any) -> "Iterator[Runtime]":
    """As `serai.runtime.open_runtime`, with the same options."""
    with start_blocking_portal() as portal:
        # Made on the loop's thread, because that is where it belongs.
        opened = portal.call(partial(opening.open_runtime, model, **options))
        with portal.wrap_async_context_manager(opened) as runtime:
            yield Runtime(portal, runtime)


class _Stream(Protocol[T_co]):
    """What the asynchronous generations and replies have in common."""

    @property
    def finish_reason(self) -> FinishReason | None: ...

    def __anext__(self) -> Awaitable[T_co]: ...

    async def aclose(self) -> None: ...


class Stream(Generic[T, Whole]):
    """Iterate over it for tokens (or a reply's events). Leaving the loop early ends it, as `close` does."""

    def __init__(self, portal: BlockingPortal, stream: _Stream[T], collect: Callable[[], Awaitable[Whole]]) -> None:
        self._portal = portal
        self._collect = collect
        self.asynchronous = stream

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.asynchronous.finish_reason

    def __iter__(self) -> Iterator[T]:
        async def next_one() -> tuple[T, ...]:
            try:
                return (await self.asynchronous.__anext__(),)
            except StopAsyncIteration:
                return ()

        try:
            while got := self._portal.call(next_one):
                yield got[0]
        finally:
            self.close()

    def collect(self) -> Whole:
        """Read to the end."""
        return self._portal.call(self._collect)

    def close(self) -> None:
        """End here; what was handed out stays."""
        self._portal.call(self.asynchronous.aclose)


class _Closing(ABC):
    """`with` closes it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Session(_Closing):
    """As `serai.runtime.Session`."""

    def __init__(self, portal: BlockingPortal, session: sessions.Session) -> None:
        self._portal = portal
        self.asynchronous = session

    @property
    def id(self) -> str:
        return self.asynchronous.id

    @property
    def position(self) -> int:
        return self.asynchronous.position

    @property
    def turn(self) -> int:
        return self.asynchronous.turn

    def tokens(self) -> NDArray[np.int32]:
        return self.asynchronous.tokens()

    def text(self) -> str:
        return self.asynchronous.text()

    def logits(self) -> NDArray[np.float32]:
        return self._portal.call(self.asynchronous.logits)

    def append(self, content: Content, *, metadata: Mapping[str, Any] | None = None) -> Appended:
        return self._portal.call(partial(self.asynchronous.append, content, metadata=metadata))

    def generate(self, params: SamplingParams | None = None) -> "Stream[Token, Completion]":
        generation = self._portal.call(self.asynchronous.generate, params)
        return Stream(self._portal, generation, generation.collect)

    def fork(
        self,
        *,
        turn: int | None = None,
        position: int | None = None,
        node: str | None = None,
        label: str | None = None,
    ) -> "Session":
        fork = partial(self.asynchronous.fork, turn=turn, position=position, node=node, label=label)
        return Session(self._portal, self._portal.call(fork))

    def fork_many(self, count: int) -> "list[Session]":
        forks = self._portal.call(self.asynchronous.fork_many, count)
        return [Session(self._portal, fork) for fork in forks]

    def replay_tokens(self, *, turn: int | None = None, position: int | None = None, node: str | None = None) -> int:
        return self._portal.call(partial(self.asynchronous.replay_tokens, turn=turn, position=position, node=node))

    def rewind(self, *, turn: int | None = None, position: int | None = None, node: str | None = None) -> None:
        self._portal.call(partial(self.asynchronous.rewind, turn=turn, position=position, node=node))

    def edit(self, turn: int, content: Content) -> Appended:
        return self._portal.call(partial(self.asynchronous.edit, turn, content))

    @contextmanager
    def waiting_for_tool(self, *, expected_s: float) -> Iterator[None]:
        waiting = self._portal.call(partial(self.asynchronous.waiting_for_tool, expected_s=expected_s))
        with self._portal.wrap_async_context_manager(waiting):
            yield

    def pause(self) -> Point:
        return self._portal.call(self.asynchronous.pause)

    def close(self) -> None:
        self._portal.call(self.asynchronous.close)

    def __repr__(self) -> str:
        return repr(self.asynchronous)


class Chat(_Closing):
    """As `serai.runtime.Chat`."""

    def __init__(self, portal: BlockingPortal, chat: conversation.Chat) -> None:
        self._portal = portal
        self.asynchronous = chat

    @property
    def session(self) -> Session:
        """The session under it."""
        return Session(self._portal, self.asynchronous.session)

    def send(self, *messages: Any, **options: Any) -> "Stream[Event, Reply]":
        stream = self._portal.call(partial(self.asynchronous.send, *messages, **options))
        return Stream(self._portal, stream, stream.collect)

    def fork(self, *, label: str | None = None) -> "Chat":
        return Chat(self._portal, self._portal.call(partial(self.asynchronous.fork, label=label)))

    def pause(self) -> Point:
        return self._portal.call(self.asynchronous.pause)

    def close(self) -> None:
        self._portal.call(self.asynchronous.close)

    def __repr__(self) -> str:
        return repr(self.asynchronous)


class Runtime:
    """As `serai.runtime.Runtime`."""

    def __init__(self, portal: BlockingPortal, runtime: runtimes.Runtime) -> None:
        self._portal = portal
        self.asynchronous = runtime

    def session(self, *, namespace: str = "", label: str = "") -> Session:
        made = self._portal.call(partial(self.asynchronous.session, namespace=namespace, label=label))
        return Session(self._portal, made)

    def resume(self, point: Point | str, *, as_is: bool = False) -> Session:
        return Session(self._portal, self._portal.call(partial(self.asynchronous.resume, point, as_is=as_is)))

    def chat(self, **options: Any) -> Chat:
        return Chat(self._portal, self._portal.call(partial(self.asynchronous.chat, **options)))

    def resume_chat(self, point: Point | str, *, as_is: bool = False) -> Chat:
        return Chat(self._portal, self._portal.call(partial(self.asynchronous.resume_chat, point, as_is=as_is)))

    def set_quota(self, namespace: str, quota: Quota | None) -> None:
        self._portal.call(self.asynchronous.set_quota, namespace, quota)

    def status(self) -> Status:
        return self._portal.call(self.asynchronous.status)

    def settle(self) -> None:
        self._portal.call(self.asynchronous.settle)

    def __repr__(self) -> str:
        return repr(self.asynchronous)
