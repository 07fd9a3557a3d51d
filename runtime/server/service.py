"""What all endpoints share: the sessions, who is at work, what is paused, and whether the engine lives."""

import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from serai.runtime.errors import BadParameter
from serai.runtime.runtime import Runtime
from serai.runtime.sampling.grammar import Grammars
from serai.runtime.server.asking import Asking
from serai.runtime.server.callers import quotas_of
from serai.runtime.server.errors import ApiError, busy, unavailable
from serai.runtime.server.gate import Gate
from serai.runtime.server.metrics import Metrics
from serai.runtime.server.options import ServerOptions
from serai.runtime.server.runs import Runs
from serai.runtime.server.sessions import Sessions
from serai.runtime.server.streams import EventStream, Produce
from serai.runtime.server.wire import Moments

log = logging.getLogger(__name__)

WATCH_EVERY_S = 1.0


@dataclass(eq=False, slots=True)
class Work:
    """One request at work."""

    namespace: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    error: ApiError | None = None

    def fail(self, error: ApiError) -> None:
        """End it with an error for its client."""
        self.error = error
        self.scope.cancel()


class Service:
    """One server's state. `tasks` owns whatever outlives the request that began it."""

    def __init__(self, runtime: Runtime, options: ServerOptions, tasks: TaskGroup, grammars: Grammars) -> None:
        self.runtime = runtime
        self.options = options
        self.tasks = tasks
        self.sessions = Sessions(
            runtime,
            keep_hot=options.keep_hot,
            unstored_ttl_s=options.unstored_ttl_s,
        )
        self.asking = Asking(self.sessions, grammars)
        self.engine_gate = Gate()
        self.moments = Moments(lambda: runtime.is_stepping)
        self.runs = Runs(self)
        self.metrics = Metrics()
        self.closing = False
        self.stalled: str | None = None
        self._told = False
        self._work: set[Work] = set()
        self._left = anyio.Event()
        self._by_namespace: Counter[str] = Counter()
        self._steps = -1
        self._progress_s = 0.0

    @property
    def active(self) -> int:
        """Requests at work."""
        return len(self._work)

    def trouble(self) -> ApiError | None:
        """Why nothing can be asked of the engine now, if that is so."""
        if self.closing:
            return unavailable("the server is shutting down; ask again when it is back", "shutting_down")
        error = self.sessions.engine_error
        if error is not None:
            return unavailable(str(error), "engine_failed")
        if self.stalled is not None:
            return unavailable(self.stalled, "engine_stalled")
        return None

    @asynccontextmanager
    async def work(self, namespace: str) -> AsyncIterator[Work]:
        """Count a request as at work for the length of the block, or refuse it before anything is done for it."""
        trouble = self.trouble()
        if trouble is not None:
            raise trouble
        if len(self._work) >= self.options.max_active:
            raise busy(f"{len(self._work):,} requests are at work, which is all that may; ask again later")
        if self._by_namespace[namespace] >= self.options.max_active_per_key:
            raise busy(f"this key has {self._by_namespace[namespace]:,} requests at work, which is all it may have")
        work = Work(namespace)
        self._work.add(work)
        self._by_namespace[namespace] += 1
        try:
            with work.scope:
                yield work
            if work.error is not None:
                raise work.error
        finally:
            self._work.discard(work)
            left, self._left = self._left, anyio.Event()
            left.set()
            self._by_namespace[namespace] -= 1
            if not self._by_namespace[namespace]:
                del self._by_namespace[namespace]

    def stream(self, produce: Produce, *, headers_at_once: bool = False) -> EventStream:
        """A response that streams what is produced."""
        options = self.options
        return EventStream(
            produce,
            self.moments,
            keep_alive_s=options.keep_alive_s,
            slow_reader_s=options.slow_reader_s,
            early_headers_s=0.0 if headers_at_once else options.early_headers_s,
        )

    def fail_all(self, error: ApiError) -> None:
        """End every request at work with an error."""
        for work in list(self._work):
            work.fail(error)

    async def wait_idle(self) -> None:
        """Until nothing is at work."""
        while self._work:
            await self._left.wait()

    async def wait_for_present(self) -> None:
        """Until whatever is at work now has ended; what comes meanwhile, on a busy server without a gap, isn't waited
        for."""
        present = set(self._work)
        while present & self._work:
            await self._left.wait()

    async def watch(self) -> None:
        """Upkeep, and an eye on the engine; ends with the server."""
        while True:
            await anyio.sleep(WATCH_EVERY_S)
            self.look(anyio.current_time())
            await self.tidy()

    async def tidy(self, *, now_s: float | None = None) -> None:
        """Forget what was not to be stored, and end what was not used for longest."""
        now_s = anyio.current_time() if now_s is None else now_s
        self.runs.tidy(now_s)
        await self.sessions.tidy(now_s=now_s)

    def look(self, now_s: float) -> None:
        """Notice an engine that has failed or finishes no step though somebody waits for it."""
        error = self.sessions.engine_error
        if error is not None and not self.closing and not self._told:
            self._told = True
            log.error("%s", error, exc_info=error)
        steps = self.sessions.counters.steps
        if steps != self._steps or not self.sessions.engine_waiting:
            self._steps, self._progress_s, self.stalled = steps, now_s, None
        elif now_s - self._progress_s >= self.options.stall_s and self.stalled is None:
            self.stalled = f"the engine has finished no step for {now_s - self._progress_s:.0f} s though calls wait"
            log.error("%s", self.stalled)
            self.fail_all(unavailable(self.stalled, "engine_stalled"))

    async def close(self) -> None:
        """Take no more requests, let those at work go on for a while, then end them and store what is parked."""
        self.closing = True
        self.engine_gate.open()
        with anyio.move_on_after(self.options.shutdown_s):
            await self.wait_idle()
        self.fail_all(unavailable("the server was shut down before the reply was complete", "shutting_down"))
        with anyio.move_on_after(self.options.shutdown_s + 1):
            await self.wait_idle()
        await self.sessions.close(save_s=self.options.shutdown_s)


@asynccontextmanager
async def at_service(runtime: Runtime, options: ServerOptions) -> AsyncIterator[Service]:
    """A service over an open runtime; leaving ends what is at work and stores what is parked.

    What the block raises comes out as it is, not in a group with the service's own tasks.
    """
    # Before anybody can ask: it takes seconds for a large vocabulary, and the interpreter for part of them.
    tokenizer = runtime.tokenizer
    if tokenizer is None:
        raise BadParameter("the model's folder has no tokenizer, so it can't be talked to; add its tokenizer files")
    grammars = await anyio.to_thread.run_sync(lambda: Grammars(tokenizer))
    failure: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        service = Service(runtime, options, tasks, grammars)
        for namespace, quota in quotas_of(options.all_keys).items():
            runtime.set_quota(namespace, quota)
        await service.sessions.load()
        tasks.start_soon(service.watch)
        tasks.start_soon(service.moments.run)
        try:
            yield service
        except BaseException as error:  # noqa: BLE001  # raised again below, cancellation included
            failure = error
        with anyio.CancelScope(shield=True):
            await service.close()
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
