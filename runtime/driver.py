"""The loop that turns waiting requests into steps: the asynchronous shell around `scheduler.plan`.

A session asks for one thing only, `advance`: feed these tokens after this state, then perhaps draw one. The driver
collects such requests, lets the scheduler share the next step among them, runs it on the engine thread and hands out
the results. A request that nobody waits for any more is dropped; what it had written is abandoned with its draft.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.lowlevel
import numpy as np
from numpy.typing import NDArray

from serai.runtime.engine_thread import EngineThread
from serai.runtime.errors import EngineFailed, LogitsNotFinite, SeraiError, ShuttingDown
from serai.runtime.memory.admission import Admission, Reservation
from serai.runtime.sampling.sample import Sampled
from serai.runtime.scheduler import Limits, Ready, Share, plan, plan_wide
from serai.runtime.state import Draft, State, StatePool
from serai.runtime.step import AbortFlag, Draw, Segment, SegmentResult, Slice, StepEngine, StepPlan, StepResult

T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """What the engine has done since it was opened."""

    steps: int = 0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    reused_tokens: int = 0
    guessed_tokens: int = 0
    right_guesses: int = 0
    aborted_steps: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """A point on the way through a prompt: after `tokens` of it, `reached` is told the state, with its logits.

    The state is the driver's; who wants it longer retains it and sees to the room for it.
    """

    tokens: int
    reached: Callable[[State], None]


@dataclass(eq=False, slots=True)
class _Request:
    """One `advance` under way. It holds a reference to `state` until it ends; then the waiter does."""

    workflow: str
    state: State
    tokens: NDArray[np.int32]
    draws: tuple[Draw, ...]
    prefill: bool
    reservation: Reservation
    weight: float
    stops: deque[Stop]
    done: anyio.Event = field(default_factory=anyio.Event)
    fed: int = 0
    drawn: tuple[Sampled, ...] = ()
    error: SeraiError | None = None
    cancelled: bool = False
    draft: Draft | None = None
    broke_engine: bool = False  # it was part of the step in which the engine failed

    @property
    def next_end(self) -> int:
        """How many of the tokens are fed when its next stop, or its end, is reached."""
        return self.stops[0].tokens if self.stops else len(self.tokens)


@dataclass(eq=False, slots=True)
class _Flight:
    """A step under way: its requests by key, in the order of the plan's segments, and its seconds on the engine."""

    requests: dict[int, _Request]
    plan: StepPlan
    spent_s: float = 0.0


class Driver:
    """Owns the order of steps. `run` is the one task that executes them; `advance` is what sessions call."""

    def __init__(
        self, engine: StepEngine, thread: EngineThread, pool: StatePool, admission: Admission, limits: Limits
    ) -> None:
        self.counters = Counters()
        self.engine = engine
        self._thread = thread
        self._pool = pool
        self._admission = admission
        self.limits = limits
        self._waiting: dict[int, _Request] = {}
        self._next_key = 0
        self._work = anyio.Event()
        self._served: dict[str, float] = {}
        self._now = 0.0  # the virtual time of the least served workflow in the last step
        self._refusal: SeraiError | None = None
        self._narrow: _Flight | None = None  # an ordinary step, from when it is put together until it has ended
        self._wide: _Flight | None = None  # a wide one, which goes on in slices between ordinary ones
        self._open_turn: Slice | None = None  # the wide step's slice while nothing else is ready
        self._row_s = 0.0
        # Called with a state read from the store when the first step after it fails as a bad state would make it.
        self.first_use_failed: Callable[[State, SeraiError], Awaitable[None]] = _nothing_kept

    async def advance(
        self,
        workflow: str,
        state: State,
        tokens: NDArray[np.int32],
        draws: tuple[Draw, ...] = (),
        *,
        prefill: bool = False,
        weight: float = 1.0,
        stops: Sequence[Stop] = (),
        reservation: Reservation | None = None,
    ) -> tuple[State, tuple[Sampled, ...]]:
        """Feed `tokens` (int32 `[n]`, n may be 0) after `state`, then draw when asked to.

        `state` stays the caller's; the state given back is a new reference the caller owns. On any error, and on
        cancellation, there is no new state and everything taken meanwhile is given back. A prompt (`prefill`) may be
        fed in several steps, with `stops` on the way; everything else is fed in one, and goes before prompts when
        memory is short. `weight` is what its rows are shared out by (`scheduler.weight_of`). With a `reservation` that
        holds all it needs (`StatePool.growth_bytes`) it waits for no memory; that one stays the caller's.

        With several `draws` the last `len(draws) - 1` tokens are guesses (see `Segment`). When one was wrong, fewer
        tokens come back than draws went in, nothing has been fed, and the state given back is `state` again.
        """
        if self._refusal is not None:
            raise self._refusal
        state.retain()  # its session may end while this waits, and its buffers would be another's by then
        taken: Reservation | None = None
        try:
            if reservation is None:
                reservation = taken = await self._admission.enter(
                    self._pool.growth_bytes(state.position, len(tokens), stops=bool(stops)),
                    account=state.account,
                    held_bytes=sum(self._pool.held_bytes(state)),
                    going_on=not prefill,
                )
            request = _Request(workflow, state.retain(), tokens, draws, prefill, reservation, weight, deque(stops))
            return await self._advance(request)
        finally:
            if taken is not None:
                taken.close()
            state.release()

    async def _advance(self, request: _Request) -> tuple[State, tuple[Sampled, ...]]:
        before = request.state
        if self._refusal is not None:  # since the wait for memory began; `run` may have ended by now
            request.state.release()
            raise self._refusal
        # A workflow that was idle isn't repaid for the time it did not ask; one of the last step's was not idle.
        self._served[request.workflow] = max(self._served.get(request.workflow, 0.0), self._now)
        key = self._next_key
        self._next_key += 1
        self._waiting[key] = request
        self._work.set()
        if self._open_turn is not None:
            self._open_turn.is_over = True
        try:
            await request.done.wait()
        except BaseException:
            self._leave(key, request)
            raise
        if request.error is not None:
            request.state.release()
            if before.source is not None and (isinstance(request.error, LogitsNotFinite) or request.broke_engine):
                await self.first_use_failed(before, request.error)
            raise request.error
        return request.state, request.drawn

    @property
    def refusal(self) -> SeraiError | None:
        """Why no more calls are taken, if so: the runtime closes, or the engine has failed."""
        return self._refusal

    @property
    def waiting(self) -> int:
        """Calls that are admitted and not finished."""
        return len(self._waiting)

    @property
    def served(self) -> Mapping[str, float]:
        """Each workflow's virtual time, in rows over weight."""
        return self._served

    def reading_s(self, tokens: int) -> float:
        """Seconds that reading so many tokens takes at the speed of the latest whole steps; 0 before there was one."""
        return tokens * self._row_s

    @property
    def is_stepping(self) -> bool:
        """Whether a step is on the engine thread."""
        return self._narrow is not None or self._wide is not None

    def forget(self, workflow: str) -> None:
        """Drop the virtual time of a workflow that has no session any more."""
        self._served.pop(workflow, None)

    def close(self) -> None:
        """Take no more requests; `run` fails those that wait and returns."""
        if self._refusal is None:
            self._refusal = ShuttingDown()
        for flight in self._flights():
            flight.plan.abort.set()
        self._work.set()

    async def run(self) -> None:
        """Execute steps until `close`. Must run in a task group that outlives every session."""
        try:
            while self._refusal is None:
                await self._work.wait()
                # Those just handed a token get two turns of the loop to ask for their next, and so share the step.
                for _ in range(2):
                    await anyio.lowlevel.checkpoint()
                if self._refusal is None:
                    await self._one_step()
        finally:
            self.close()
            if self._narrow is not None:  # this was cancelled; the engine thread is done with the step all the same
                self._land(self._narrow, StepResult((), aborted=True))
            await self._drop_wide()
            for key in list(self._waiting):
                self._end(key, self._refusal)

    async def _one_step(self) -> None:
        """An ordinary step of what is ready, then a slice of the wide one, if there is one under way or to begin."""
        if self._wide is None:
            self._wide = self._flight(plan_wide(self._ready(), self.limits))
        flight = self._narrow = self._flight(plan(self._ready(), self.limits))
        turn = Slice()
        if flight is not None:
            self._land(flight, await self._call(flight, self.engine.step))
            # Answers and prompts share the engine evenly.
            turn.until_s = time.monotonic() + flight.spent_s
        elif self._wide is not None:
            self._open_turn = turn
        elif not self._waiting:
            self._work = anyio.Event()
        if self._wide is not None and self._refusal is None:
            result = await self._call(self._wide, self.engine.go_on, turn)
            self._open_turn = None
            if result is not None:
                self._land(self._wide, result)

    async def _call(self, flight: _Flight, function: Callable[..., T], *args: object) -> T | StepResult:
        """Run the flight's plan on the engine thread. When that breaks it, the step counts as aborted, and no more are
        taken."""
        began_s = time.monotonic()
        try:
            return await self._thread.call(function, flight.plan, *args)
        except Exception as error:  # noqa: BLE001  # whatever broke, everybody who waits must hear of it
            self._refusal = EngineFailed(cause=error)
            self._refusal.__cause__ = error
            for request in flight.requests.values():
                request.broke_engine = True
            return StepResult((), aborted=True)
        finally:
            flight.spent_s += time.monotonic() - began_s

    def _land(self, flight: _Flight, result: StepResult) -> None:
        """The step has ended."""
        if flight is self._wide:
            self._wide = None
        else:
            self._narrow = None
        if result.aborted:
            self.counters.aborted_steps += 1
            for request in flight.requests.values():
                self._abandon(request)
            return
        self.counters.steps += 1
        self._note_speed(flight)
        for (key, request), segment, outcome in zip(
            flight.requests.items(), flight.plan.segments, result.segments, strict=True
        ):
            self._apply(key, request, segment, outcome)

    async def _drop_wide(self) -> None:
        """Have the engine let go of a wide step that nobody will go on with."""
        if self._wide is not None:
            self._wide.plan.abort.set()
            try:
                with anyio.CancelScope(shield=True):
                    await self._thread.call(self.engine.go_on, self._wide.plan, Slice())
            except Exception as error:  # noqa: BLE001  # these requests are ended with the refusal there is
                if self._refusal is not None:
                    self._refusal.add_note(f"and letting go of a prompt's step failed: {error}")
            self._land(self._wide, StepResult((), aborted=True))

    def _note_speed(self, flight: _Flight) -> None:
        rows = flight.plan.rows
        if rows >= max(self.limits.step_rows, self.limits.wide_rows):  # smaller steps are slower than a long prompt's
            row_s = flight.spent_s / rows
            self._row_s = row_s if self._row_s == 0.0 else self._row_s + 0.2 * (row_s - self._row_s)

    def _ready(self) -> list[Ready]:
        """What the next step may hold. Beside a wide step long prompts wait: one would take many ordinary steps, and
        each of them read most experts."""
        ready = [
            Ready(
                key=key,
                tokens=request.next_end - request.fed,
                served=self._served.get(request.workflow, 0.0),
                decoding=not request.prefill,
                workflow=request.workflow,
                weight=request.weight,
                untried=request.state.source,
            )
            for key, request in self._waiting.items()
            if self._wide is None or key not in self._wide.requests
        ]
        if self._wide is None:
            return ready
        return [one for one in ready if one.decoding or one.tokens <= self.limits.prefill_rows_beside_decode]

    def _flight(self, shares: tuple[Share, ...]) -> _Flight | None:
        """The step of these shares; None if there are none."""
        if not shares:
            return None
        requests = {share.key: self._waiting[share.key] for share in shares}
        segments = tuple(self._segment(requests[share.key], share) for share in shares)
        self._now = min(self._served.get(request.workflow, 0.0) for request in requests.values())
        return _Flight(requests, StepPlan(segments, AbortFlag()))

    def _segment(self, request: _Request, share: Share) -> Segment:
        end = request.fed + share.tokens
        tokens = request.tokens[request.fed : end]
        last = end == len(request.tokens)
        if len(tokens):
            with request.reservation.counting():
                request.draft = self._pool.draft(request.state, len(tokens), with_logits=end == request.next_end)
        return Segment(request.state, tokens, request.draft, request.draws if last else ())

    def _apply(self, key: int, request: _Request, segment: Segment, outcome: SegmentResult) -> None:
        rows = len(segment.tokens)
        if request.workflow in self._served:  # not if its last session ended during the step
            self._served[request.workflow] += max(rows, 1) / request.weight
        if request.prefill:
            self.counters.prefilled_tokens += rows
        else:
            right = rows if len(outcome.drawn) == len(segment.draws) else 0
            self.counters.decoded_tokens += right
            self.counters.guessed_tokens += segment.guesses
            self.counters.right_guesses += max(len(outcome.drawn) - 1, 0)
        if request.cancelled or outcome.error is not None:
            self._abandon(request)
            if not request.cancelled:
                self._end(key, outcome.error)
            return
        if len(outcome.drawn) < len(segment.draws):
            self._abandon(request)
            request.drawn = outcome.drawn
            self._end(key, None)
            return
        if request.draft is not None:
            before, request.state = request.state, request.draft.commit()
            request.draft = None
            before.source = None  # what was read from the store has been used, and is sound
            with request.reservation.counting():
                before.release()
        request.fed += rows
        if request.stops and request.fed == request.stops[0].tokens:
            request.stops.popleft().reached(request.state)
        if request.fed == len(request.tokens):
            request.drawn = outcome.drawn
            self._end(key, None)

    def _leave(self, key: int, request: _Request) -> None:
        """The waiter was cancelled. A step in flight keeps its arrays until it ends; the rest goes back at once."""
        self._waiting.pop(key, None)
        for flight in self._flights():
            if key in flight.requests:
                request.cancelled = True
                if all(other.cancelled for other in flight.requests.values()):
                    flight.plan.abort.set()
                return
        request.state.release()

    def _flights(self) -> list[_Flight]:
        """The steps under way."""
        return [flight for flight in (self._narrow, self._wide) if flight is not None]

    def _abandon(self, request: _Request) -> None:
        if request.draft is not None:
            with request.reservation.counting():
                request.draft.abandon()
            request.draft = None
        if request.cancelled:
            request.state.release()

    def _end(self, key: int, error: SeraiError | None) -> None:
        request = self._waiting.pop(key)
        request.error = error
        request.done.set()


async def _nothing_kept(state: State, error: SeraiError) -> None:
    """No store from which the state could have come."""
