"""The states one session has left on its way, and how it reads on: from the deepest state anybody has left there."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import anyio
import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import NodeRecord
from serai.runtime.driver import Stop
from serai.runtime.memory.accounts import Account
from serai.runtime.memory.admission import Aside, Reservation
from serai.runtime.memory.ledger import held_bytes
from serai.runtime.services import Services
from serai.runtime.sessions.deadline import Deadline
from serai.runtime.sessions.prefixes import Kept, digest_of, digests_at, thinned
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import Part, State, part_bytes, session_bytes


class OwnState(Protocol):
    """What reading on needs of the session: where it stands, what it holds in memory, and to have it there."""

    @property
    def position(self) -> int: ...

    @property
    def held(self) -> State | None: ...

    @property
    def account(self) -> Account: ...

    def needed_bytes(self, tokens: int) -> int:
        """What must be free for the session to be brought into memory and to have so many token ids in the end."""
        ...

    async def hot(self, reservation: Reservation | None = None) -> State: ...

    async def step_aside(self, is_called: Callable[[], bool]) -> bool:
        """Move the state to the store while the call waits, unless it `is_called` meanwhile; whether it was moved."""
        ...


@dataclass(slots=True)
class _Known:
    """Where an append may begin: a known prefix, and its state for as long as this holds it in memory."""

    found: Kept | None
    state: State | None

    @classmethod
    def hold(cls, found: Kept | None) -> "_Known":
        return cls(found, None if found is None or found.state is None else found.state.retain())

    def let_go(self) -> bool:
        """Hold the state no longer; whether one was held."""
        state, self.state = self.state, None
        if state is not None:
            state.release()
        return state is not None


class _Place(NamedTuple):
    """A prefix that is being computed; `ended` says that it no longer is."""

    position: int
    digest: bytes
    ended: Callable[[], None]


class Trail:
    """Belongs to one session. Kept states are shared through `Prefixes`; the trail thins out its own."""

    def __init__(self, services: Services, *, session_id: str, namespace: str, workflow: str) -> None:
        self._services = services
        self._session_id = session_id
        self._namespace = namespace
        self._workflow = workflow
        self._entries: dict[int, Kept] = {}
        self._nodes: dict[int, str] = {}  # the session's own, at which a state was offered to the store
        self._saved_at = 0
        self.reused_tokens = 0

    async def read(
        self,
        own: OwnState,
        timeline: Timeline,
        ids: NDArray[np.int32],
        *,
        shared: bool,
        weight: float = 1.0,
        deadline: Deadline | None = None,
    ) -> tuple[State, int]:
        """The state after `ids` (the caller owns it), and how many of them did not have to be computed.

        `own` is the state at the end of `timeline`. When it is `shared` with others, it begins at the deepest state
        anybody has left, and on the way one is left at every multiple of the policy's `snapshot_every`, where there is
        room to keep it.

        Who gets memory for it gets all, that of bringing the session's own state back included: so nobody waits half
        way for what another holds who waits, too. Meanwhile nobody is kept waiting who begins alike.
        """
        services, start = self._services, len(timeline)
        if not shared:
            return await self._read_alone(own, ids, weight), 0
        whole = np.concatenate([timeline.ids(), ids])
        while True:
            found = await services.keeper.nearest(self._namespace, whole, above=start)
            begin = start if found is None else found.position
            if deadline is not None:
                deadline.check("append", services.driver.reading_s(len(whole) - begin))
            known = _Known.hold(found)
            try:
                reservation = await self._room(own, whole, begin, known)
                if reservation is None:
                    continue
                with reservation.closing(), self._computing(whole, begin) as places:
                    mine = (await own.hot(reservation)).retain()  # its session may end while this waits
                    try:
                        if found is not None and known.state is None:
                            known = _Known.hold(found)  # it may be in memory again
                            known.state = known.state or await services.keeper.from_store(found, reservation)
                            if known.state is None:
                                continue  # what can't be used is forgotten
                        after = await self._compute(known.state or mine, whole, places, reservation, weight)
                    finally:
                        mine.release()
                reused = 0 if known.state is None else known.state.position - start
            finally:
                known.let_go()
            self.reused_tokens += reused
            services.driver.counters.reused_tokens += reused
            return after, reused

    async def _read_alone(self, own: OwnState, ids: NDArray[np.int32], weight: float) -> State:
        """The state after `ids`, with nothing taken from others or left for them."""
        services, end = self._services, own.position + len(ids)
        growth = services.pool.growth_bytes(own.position, len(ids))

        def needed() -> int:
            return own.needed_bytes(end) + growth

        reservation = await services.admission.enter(
            needed(),
            account=own.account,
            held_bytes=held_bytes(services.pool, own.held),
            going_on=False,
            aside=Aside(own.step_aside, needed, needed() + self._given_up(own)),
        )
        with reservation.closing():
            mine = await own.hot(reservation)
            state, _ = await services.driver.advance(
                self._workflow, mine, ids, prefill=True, weight=weight, reservation=reservation
            )
        return state

    def _given_up(self, own: OwnState) -> int:
        """What it takes to bring the session's own state back once it was moved out."""
        return 0 if own.held is None else session_bytes(self._services.pool.layout, own.position)

    async def _room(self, own: OwnState, whole: NDArray[np.int32], begin: int, known: _Known) -> Reservation | None:
        """All the memory for reading `whole` from `begin` on, where a state is `known` or stored if that is past the
        session's own; None when somebody has begun to compute some of it meanwhile."""
        pool, every = self._services.pool, self._services.policy.snapshot_every
        stops = (begin // every + 1) * every < len(whole)
        growth = pool.growth_bytes(begin, len(whole) - begin, stops=stops)

        def needed() -> int:
            read_in = known.state is None and begin > own.position
            return own.needed_bytes(len(whole)) + growth + (session_bytes(pool.layout, begin) if read_in else 0)

        async def step_aside(is_called: Callable[[], bool]) -> bool:
            # What is needed from here on counts at once: it may be called while its own state is still being stored.
            let_go = known.let_go()
            return await own.step_aside(is_called) or let_go

        given_up = self._given_up(own) + (0 if known.state is None else session_bytes(pool.layout, begin))
        with (
            anyio.CancelScope() as scope,
            self._services.prefixes.telling(self._namespace, whole, above=begin, tell=scope.cancel),
        ):
            reservation = await self._services.admission.enter(
                needed(),
                account=own.account,
                held_bytes=held_bytes(pool, own.held, known.state),
                going_on=False,
                aside=Aside(step_aside, needed, needed() + given_up),
            )
            if not scope.cancel_called:
                return reservation
            reservation.close()
        return None

    @contextmanager
    def _computing(self, whole: NDArray[np.int32], begin: int) -> Iterator[list[_Place]]:
        """The places on the way where states are left, the end the last. Until it is reached, or the block ends, each
        is said to be being computed."""
        every = self._services.policy.snapshot_every
        positions = [*range((begin // every + 1) * every, len(whole), every), len(whole)]
        places = [
            _Place(position, digest, self._services.prefixes.begin(self._namespace, position, digest))
            for position, digest in digests_at(whole, positions)
            if position > begin
        ]
        try:
            yield places
        finally:
            for place in places:
                place.ended()

    async def _compute(
        self,
        before: State,
        whole: NDArray[np.int32],
        places: Sequence[_Place],
        reservation: Reservation,
        weight: float,
    ) -> State:
        """The state after all of `whole`."""
        if before.position == len(whole):
            return before.retain()

        def reached(place: _Place, state: State) -> None:
            self._leave_on_the_way(state, place.digest, reservation)
            place.ended()

        state, _ = await self._services.driver.advance(
            self._workflow,
            before,
            whole[before.position :],
            prefill=True,
            weight=weight,
            stops=[Stop(place.position - before.position, partial(reached, place)) for place in places[:-1]],
            reservation=reservation,
        )
        prefixes = self._services.prefixes
        self._left(prefixes.keep(self._namespace, places[-1].digest, state, owner=self._session_id))
        return state

    def _leave_on_the_way(self, state: State, digest: bytes, reservation: Reservation) -> None:
        """Keep a state that would be let go of in the next step, if there is room, or some of older ones that are
        kept: what is promised to the append itself is not to be spent on it."""
        prefixes, pool = self._services.prefixes, self._services.pool
        size = part_bytes(pool.layout, Part.FIXED) + part_bytes(pool.layout, Part.LOGITS)  # its pages live on
        if reservation.widen(size) or (prefixes.reclaim(size, self._namespace) > 0 and reservation.widen(size)):
            self._left(prefixes.keep(self._namespace, digest, state, owner=self._session_id))

    def leave(self, state: State, digest: bytes, node: NodeRecord, *, first: bool) -> None:
        """Leave the present state for whoever has the same tokens, and have it written when that would save much."""
        services = self._services
        self._left(services.prefixes.keep(self._namespace, digest, state, owner=self._session_id))
        if state.position - self._saved_at > services.policy.save_after_tokens:
            self._saved_at = state.position
            services.saver.offer(node, state, digest, first=first)
            self._nodes[state.position] = node.id

    def on_the_way(self, start: int, ids: NDArray[np.int32]) -> list[tuple[int, bytes]]:
        """Where after `start` the session has left states of its tokens `ids`, short of their end, and their digests.

        A call that failed may have left states too, of what is not said now.
        """
        left = [(one, entry.digest) for one, entry in sorted(self._entries.items()) if start < one < len(ids)]
        return [(one, digest) for one, digest in left if digest == digest_of(ids[:one])]

    def save_on_the_way(self, nodes: Sequence[NodeRecord]) -> None:
        """Have the states written that lie at durable nodes inside of an append, each of many tokens."""
        for node in nodes:
            entry = self._entries.get(node.position)
            if entry is not None and entry.state is not None:
                self._saved_at = node.position
                self._services.saver.offer(node, entry.state, entry.digest, first=False, replaces=False)
                self._nodes[node.position] = node.id

    def cut(self, position: int) -> None:
        """The session went back to `position`."""
        self._saved_at = min(self._saved_at, position)
        for late in [one for one in self._entries if one > position]:
            self._services.prefixes.leave(self._entries.pop(late), self._session_id)
        self._nodes = {one: node for one, node in self._nodes.items() if one <= position}

    def kept_positions(self) -> frozenset[int]:
        """The positions of the states left that are in memory now."""
        return frozenset(position for position, entry in self._entries.items() if entry.state is not None)

    def _left(self, entry: Kept) -> None:
        self._entries[entry.position] = entry
        for position in thinned(tuple(self._entries), entry.position):
            self._leave(self._entries.pop(position), self._nodes.pop(position, None))

    def _leave(self, entry: Kept, node_id: str | None) -> None:
        """Keep a state no longer, neither in memory nor in the store if the session alone has had it written."""
        if node_id is not None and entry.owners == {self._session_id}:
            self._services.prefixes.lost(entry)
            self._services.saver.thin(node_id)
        self._services.prefixes.leave(entry, self._session_id)
