"""The states one session has left on its way, and how it reads on: from the deepest state anybody has left there."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import NodeRecord
from serai.runtime.services import Services
from serai.runtime.sessions.deadline import Deadline
from serai.runtime.sessions.prefixes import Kept, digest_of, thinned
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State


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
        own: State,
        timeline: Timeline,
        ids: NDArray[np.int32],
        *,
        weight: float = 1.0,
        deadline: Deadline | None = None,
    ) -> tuple[State, int]:
        """The state after `ids` (the caller owns it), and how many of them did not have to be computed.

        `own` is the state at the end of `timeline`. On the way a state is left at every multiple of the policy's
        `snapshot_every`.
        """
        services, start = self._services, own.position
        whole = np.concatenate([timeline.ids(), ids])
        state = own.retain()  # its session may end while this waits
        try:
            found = await services.keeper.known(self._namespace, whole, above=start)
            if found is not None:
                state.release()
                state = found
            reused, every = state.position - start, services.policy.snapshot_every
            services.admission.check(services.pool.most_bytes((own, state), len(whole)), own.account)
            if deadline is not None:
                deadline.check("append", services.driver.reading_s(len(whole) - state.position))
            while state.position < len(whole):
                end = min((state.position // every + 1) * every, len(whole))
                going_on = state.position > start + reused
                before, state = state, await self._compute(state, whole[:end], weight, going_on=going_on)
                before.release()
        except BaseException:
            state.release()
            raise
        self.reused_tokens += reused
        services.driver.counters.reused_tokens += reused
        return state, reused

    async def _compute(self, before: State, whole: NDArray[np.int32], weight: float, *, going_on: bool) -> State:
        """The state after all of `whole`, left for others who are waiting for just that.

        `going_on` says that memory is held which only the end of the whole append gives back.
        """
        prefixes, digest = self._services.prefixes, digest_of(whole)
        ended = prefixes.begin(self._namespace, len(whole), digest)
        try:
            ids = whole[before.position :]
            state, _ = await self._services.driver.advance(
                self._workflow, before, ids, prefill=True, going_on=going_on, weight=weight
            )
            self._left(prefixes.keep(self._namespace, digest, state, owner=self._session_id))
        finally:
            ended()
        return state

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
