"""States kept where others may start from them: by the exact token ids before them, within a namespace.

An entry is a state in memory, or a snapshot in the store under a node, or both. A state's bits depend on the token ids
alone, so whoever has the same ids may start from it, whichever session computed it. The key is a digest of
all ids up to the position, compared whole: a state whose position or history differs can't be found.

Namespaces never see each other's entries: neither by what is found nor by how long it takes. Each has tables of its
own; a lookup, or a wait for somebody who is computing the same, touches no other's.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.runtime.state import State, StatePool


@dataclass(eq=False, slots=True)
class Kept:
    """What is known at one prefix. `state` is held while it is in memory; `node_id` names a stored snapshot; `owners`
    are the sessions that passed here."""

    namespace: str
    position: int
    digest: bytes
    used_s: float
    state: State | None = None
    node_id: str | None = None
    owners: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Tenant:
    """What is known within one namespace, by position and digest; `counts` are the entries at each position, `held`
    those whose state is in memory, in the order of their last use."""

    entries: dict[tuple[int, bytes], Kept] = field(default_factory=dict)
    held: dict[Kept, None] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    computing: dict[tuple[int, bytes], anyio.Event] = field(default_factory=dict)
    waiting: list["_Waiting"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Waiting:
    """Somebody who will compute `ids` beyond position `above` unless another begins to."""

    ids: NDArray[np.int32]
    above: int
    tell: Callable[[], None]

    def would_use(self, position: int, digest: bytes) -> bool:
        if not self.above < position <= len(self.ids):
            return False
        return next(digests_at(self.ids, [position])) == (position, digest)


class Prefixes:
    """All kept states of one runtime. `now_s` is the clock that ages them."""

    def __init__(self, pool: StatePool, now_s: Callable[[], float] = anyio.current_time) -> None:
        self._pool = pool
        self._now_s = now_s
        self._tenants: dict[str, _Tenant] = {}

    def __len__(self) -> int:
        return sum(len(tenant.entries) for tenant in self._tenants.values())

    def _all(self) -> Iterator[Kept]:
        return (entry for tenant in self._tenants.values() for entry in tenant.entries.values())

    def _tenant(self, namespace: str) -> _Tenant:
        return self._tenants.setdefault(namespace, _Tenant())

    @property
    def kept_bytes(self) -> int:
        """Bytes that only kept states hold."""
        return sum(self._pool.held_bytes(state)[0] for state in self.states())

    def states(self) -> Iterator[State]:
        """Every state that is kept in memory."""
        return (one.state for tenant in self._tenants.values() for one in tenant.held if one.state is not None)

    def keep(self, namespace: str, digest: bytes, state: State, *, owner: str = "") -> Kept:
        """Keep a state in memory; the caller's reference stays the caller's. An inexact one is never for others."""
        if state.inexact:
            raise AssertionError("an inexact state was to be kept for whoever has the same token ids")
        entry = self._entry(namespace, state.position, digest)
        entry.owners.add(owner)
        if entry.state is None:
            entry.state = state.retain()
            self._used(entry)
        return entry

    def leave(self, entry: Kept, owner: str) -> None:
        """An owner needs the entry no more; the last one takes the state in memory with it."""
        entry.owners.discard(owner)
        if not entry.owners:
            self.drop(entry)

    def stored(self, namespace: str, digest: bytes, position: int, node_id: str) -> None:
        """A snapshot of that prefix is in the store."""
        self._entry(namespace, position, digest).node_id = node_id

    def deepest(self, namespace: str, ids: NDArray[np.int32], *, above: int, at_most: int | None = None) -> Kept | None:
        """The longest known prefix of `ids` with a position over `above` (and up to `at_most`), or None."""
        found: Kept | None = None
        tenant = self._tenant(namespace)
        known = tenant.positions
        end = len(ids) if at_most is None else at_most
        for position, digest in digests_at(ids, known[bisect_right(known, above) : bisect_right(known, end)]):
            entry = tenant.entries.get((position, digest))
            if entry is not None and (entry.state is not None or entry.node_id is not None):
                found = entry
        if found is not None:
            self._used(found)
        return found

    def being_computed(self, namespace: str, ids: NDArray[np.int32], *, above: int) -> anyio.Event | None:
        """Set when somebody who is computing a prefix of `ids` beyond `above` has ended, the longest one first."""
        computing = self._tenant(namespace).computing
        found = None
        for key in digests_at(ids, sorted({position for position, _ in computing if above < position <= len(ids)})):
            found = computing.get(key, found)
        return found

    def begin(self, namespace: str, position: int, digest: bytes) -> Callable[[], None]:
        """Say that this prefix is being computed, until the function given back is called."""
        tenant, key, ended = self._tenant(namespace), (position, digest), anyio.Event()
        computing = tenant.computing
        if key in computing:
            return ended.set
        computing[key] = ended
        for one in tenant.waiting:
            if one.would_use(position, digest):
                one.tell()

        def end() -> None:
            if computing.get(key) is ended:
                del computing[key]
            ended.set()

        return end

    @contextmanager
    def telling(
        self, namespace: str, ids: NDArray[np.int32], *, above: int, tell: Callable[[], None]
    ) -> Iterator[None]:
        """Within, `tell` is called when somebody begins to compute a prefix of `ids` beyond position `above`."""
        waiting, one = self._tenant(namespace).waiting, _Waiting(ids, above, tell)
        waiting.append(one)
        try:
            yield
        finally:
            waiting.remove(one)

    def drop(self, entry: Kept) -> None:
        """Forget the state in memory; the entry goes too unless a snapshot is stored."""
        if entry.state is not None:
            entry.state.release()
            entry.state = None
            del self._tenant(entry.namespace).held[entry]
        if entry.node_id is None:
            self._forget(entry)

    def lost(self, entry: Kept) -> None:
        """The stored snapshot could not be used."""
        entry.node_id = None
        if entry.state is None:
            self._forget(entry)

    def distrust(self, state: State, node_id: str) -> None:
        """Nobody is to start from this state any more, nor from the snapshot stored under that node."""
        for entry in list(self._all()):
            if entry.state is state:
                self.drop(entry)
            if entry.node_id == node_id:
                self.lost(entry)

    def reclaim(self, needed_bytes: int, namespace: str | None = None) -> int:
        """Drop kept states, of one namespace or of all, those unused for longest first, until about so much is free;
        gives the bytes freed."""
        before = self._pool.live_bytes
        tenants = self._tenants.values() if namespace is None else (self._tenant(namespace),)
        while before - self._pool.live_bytes < needed_bytes:
            oldest = [next(iter(tenant.held)) for tenant in tenants if tenant.held]
            if not oldest:
                break
            self.drop(min(oldest, key=lambda one: one.used_s))
        return before - self._pool.live_bytes

    def clear(self) -> None:
        """Give back every state."""
        for entry in list(self._all()):
            entry.node_id = None
            self.drop(entry)

    def _entry(self, namespace: str, position: int, digest: bytes) -> Kept:
        tenant = self._tenant(namespace)
        entry = tenant.entries.get((position, digest))
        if entry is None:
            entry = tenant.entries[position, digest] = Kept(namespace, position, digest, self._now_s())
            counted = tenant.counts.get(position, 0)
            tenant.counts[position] = counted + 1
            if counted == 0:
                insort(tenant.positions, position)
        self._used(entry)
        return entry

    def _used(self, entry: Kept) -> None:
        entry.used_s = self._now_s()
        if entry.state is not None:
            held = self._tenant(entry.namespace).held
            held.pop(entry, None)
            held[entry] = None

    def _forget(self, entry: Kept) -> None:
        tenant, key = self._tenant(entry.namespace), (entry.position, entry.digest)
        if tenant.entries.get(key) is not entry:
            return  # forgotten before; what is there now is somebody else's
        del tenant.entries[key]
        tenant.counts[entry.position] -= 1
        if tenant.counts[entry.position] == 0:
            del tenant.counts[entry.position]
            tenant.positions.remove(entry.position)


def thinned(positions: Sequence[int], end: int, *, per_octave: int = 2) -> tuple[int, ...]:
    """Which of a session's kept positions to drop, as backups are: dense near the end, sparse far back.

    Distances from `end` fall into octaves (1, 2-3, 4-7, ...); of those in one octave the outermost `per_octave` stay.
    """
    octaves: dict[int, list[int]] = {}
    for position in sorted(positions):
        octaves.setdefault((end - position).bit_length(), []).append(position)
    drop: list[int] = []
    for members in octaves.values():
        keep = {members[0], *members[len(members) - per_octave + 1 :]} if per_octave > 1 else {members[-1]}
        drop.extend(position for position in members if position not in keep)
    return tuple(sorted(drop))


def digest_of(ids: NDArray[np.int32]) -> bytes:
    """The digest of a whole prefix."""
    return blake3(np.ascontiguousarray(ids, dtype="<i4").tobytes()).digest()


def digests_at(ids: NDArray[np.int32], positions: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """The digests of the prefixes of `ids` of those lengths, which ascend."""
    hasher, done = blake3(), 0
    data = np.ascontiguousarray(ids, dtype="<i4")
    for position in positions:
        hasher.update(data[done:position].tobytes())
        done = position
        yield position, hasher.digest()
