"""What is written down of each session, and when: the asynchronous edge of the store.

An append is durable before it returns, a generation's parameters before its first token is shown and its tokens before
it is reported finished. Snapshots are larger and may come later; whatever lies between the last one and the end is
replayed from its token ids. Without a store nothing is written and `pause` says so.
"""

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.snapshot import Fingerprint, Snapshot, StateLayout
from serai.checkpoints.store import Store
from serai.runtime.errors import BadParameter, FormatUnknown, SessionGone, SnapshotCorrupt, SnapshotMissing
from serai.runtime.sessions.turns import Span, Timeline
from serai.runtime.state import State, snapshot_of
from serai.runtime.to_the_end import in_thread_to_the_end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Point:
    """A durable point of a session to resume from; `str(point)` is its id."""

    id: str
    session_id: str
    position: int
    state_bytes: int
    written_bytes: int
    seconds: float

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store knows of a point: its timeline, and the nearest snapshot at or before it (None: replay it all)."""

    path: tuple[NodeRecord, ...]
    timeline: Timeline
    is_head: bool
    snapshot: Snapshot | None
    inexact: bool

    @property
    def node(self) -> NodeRecord:
        return self.path[-1]

    @property
    def append_metadata(self) -> Mapping[str, Any]:
        """What the last append on the way here was given to keep."""
        return _append_metadata(self.path)


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored snapshot that anybody with the same token ids may start from."""

    namespace: str
    digest: bytes
    position: int
    node_id: str


@dataclass(eq=False, slots=True)
class _Entry:
    """A node on its way to the store. Forks share their parent's entries; whoever flushes first writes them."""

    node: NodeRecord
    durable: bool = False


class Journal:
    """Writes sessions down, one store call at a time per session, never on the event loop."""

    def __init__(self, store: Store | None, fingerprint: Fingerprint, layout: StateLayout) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._layout = layout
        self._writing = anyio.Lock()

    @property
    def is_durable(self) -> bool:
        """Whether there is a store behind it."""
        return self._store is not None

    @property
    def store(self) -> Store | None:
        """Where it writes to."""
        return self._store

    def file_bytes(self) -> int:
        """What the store's files take; for a worker thread. 0 without a store."""
        if self._store is None:
            return 0
        sizes = self._store.sizes()
        return sizes.node_bytes + sizes.manifest_bytes + sizes.part_bytes + sizes.tag_bytes

    def open_record(self, session_id: str, *, namespace: str, label: str) -> "Record":
        return Record(self, session_id, namespace=namespace, label=label)

    async def write(self, entries: Sequence[_Entry]) -> None:
        """Make the entries durable, in order. Cancellation waits for it: it is short, and half of it is no use."""
        store = self._store
        if store is None or not entries:
            return

        def work() -> None:
            for entry in fresh:
                store.record(entry.node)
                entry.durable = True

        with anyio.CancelScope(shield=True):
            async with self._writing:
                fresh = [entry for entry in entries if not entry.durable]
                if fresh:
                    await in_thread_to_the_end(work)

    async def save(self, node: NodeRecord, state: State, reason: str) -> Point:
        """Store the whole state under a node that is durable already."""
        store = self._store
        if store is None:
            raise BadParameter('pausing needs a place to keep the state; open the runtime with store="some/folder"')
        snapshot = snapshot_of(self._layout, state.retain())
        try:
            report = await in_thread_to_the_end(lambda: store.save(node.id, snapshot, self._fingerprint, reason=reason))
        finally:
            state.release()
        return Point(node.id, node.session_id, node.position, report.raw_bytes, report.written_bytes, report.elapsed_s)

    async def find(self, name: str, *, as_is: bool) -> Stored:
        """Look up a node, session or tag and read the snapshot its state is to be rebuilt from.

        Raises `SessionGone` or `ModelMismatch`. A snapshot of another build or SIMD path is used
        only `as_is`; otherwise the token ids are replayed.
        """
        store = self._store
        if store is None:
            raise BadParameter(
                'resuming needs the store that holds the point; open the runtime with store="its/folder"'
            )
        return await anyio.to_thread.run_sync(lambda: self._find(store, name, as_is=as_is))

    async def snapshot(self, node_id: str) -> Snapshot | None:
        """The snapshot stored under a node, if it is of this model and build, whole and exact; None otherwise."""
        store = self._store
        return None if store is None else await anyio.to_thread.run_sync(self._own_snapshot, store, node_id)

    def _own_snapshot(self, store: Store, node_id: str) -> Snapshot | None:
        try:
            info = store.snapshot_info(node_id)
            if info.storage.lossy or info.fingerprint != self._fingerprint:
                return None
            return store.load(node_id, self._fingerprint)
        except (SnapshotCorrupt, SnapshotMissing, FormatUnknown, SessionGone) as error:
            log.warning("%s", error)
            return None

    async def children(self, node_id: str) -> tuple[str, ...]:
        """The ids of the nodes that continue from a node; none without a store."""
        store = self._store
        return () if store is None else tuple(await anyio.to_thread.run_sync(store.children, node_id))

    async def known_prefixes(self) -> list[StoredPrefix]:
        """Every prefix that a stored snapshot of this model and build can stand for."""
        store = self._store
        return [] if store is None else await anyio.to_thread.run_sync(self._known_prefixes, store)

    def _known_prefixes(self, store: Store) -> list[StoredPrefix]:
        found = []
        for info in store.snapshots():
            node = store.node(info.node_id)
            prefix = (node.sampler or {}).get("prefix")
            if prefix and not node.inexact and not info.storage.lossy and info.fingerprint == self._fingerprint:
                found.append(StoredPrefix(node.namespace, bytes.fromhex(prefix), node.position, node.id))
        return found

    def _find(self, store: Store, name: str, *, as_is: bool) -> Stored:
        node_id = store.resolve(name)
        path = store.path(node_id)
        node = path[-1]
        timeline = timeline_of(path)
        snapshot, foreign = self._nearest(store, node_id, as_is=as_is)
        return Stored(
            path=tuple(path),
            timeline=timeline,
            is_head=store.session_head(node.session_id) == node_id,
            snapshot=snapshot,
            inexact=node.inexact or foreign,
        )

    def _nearest(self, store: Store, node_id: str, *, as_is: bool) -> tuple[Snapshot | None, bool]:
        """The latest usable snapshot on the way to the node, and whether using it makes what follows inexact.

        A damaged one is set aside and the one before it is tried: the token ids give the same state, only later.
        """
        while (holder := store.nearest_snapshot(node_id)) is not None:
            try:
                info = store.snapshot_info(holder)
                foreign = bool(info.fingerprint.build_differences(self._fingerprint))
                if foreign and not as_is:
                    log.info("the snapshot of node %s is of another build or SIMD path: replaying its tokens", holder)
                    return None, False
                return store.load(holder, self._fingerprint), foreign or info.storage.lossy
            except (SnapshotCorrupt, FormatUnknown) as error:
                log.warning("%s", error)
                store.set_aside(holder, str(error))
        return None, False


class Record:
    """One session's part of the journal: its nodes so far, and those still to be written."""

    def __init__(self, journal: Journal, session_id: str, *, namespace: str, label: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._namespace = namespace
        self._label = label
        self._path: list[_Entry] = []
        self._generated = array("i")
        self._facts: Mapping[str, Any] = {}
        self._inexact = False

    def label_is(self, label: str) -> None:
        """What the nodes to come are called."""
        self._label = label

    def point(self) -> str:
        """The id of the session's last node; durable once `flush` has returned."""
        return self._path[-1].node.id

    def append_metadata(self) -> Mapping[str, Any]:
        """What the last append on the way here was given to keep."""
        return _append_metadata(self.nodes())

    def settled(self, timeline: Timeline) -> None:
        """Note what has changed since the last node without a token: how many forks were made."""
        self._close_generation()
        if (self._path[-1].node.sampler or {}).get("forks") != timeline.forks:
            self.started(timeline, NodeKind.PAUSE)

    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes from the root to the last one."""
        return tuple(entry.node for entry in self._path)

    def continues(self, path: Sequence[NodeRecord], *, inexact: bool) -> None:
        """The session goes on from the end of a path that is durable; `inexact` marks all that follows (DESIGN §6)."""
        self._path = [_Entry(node, durable=True) for node in path]
        self._inexact = inexact

    def branched_from(self, other: "Record") -> None:
        """The session begins where another one stands now; what that one has not written yet is written by both."""
        self._path = list(other._path)
        self._generated = other._generated[:]
        self._facts = other._facts
        self._inexact = other._inexact

    def take_back(self, timeline: Timeline) -> None:
        """The last append did not succeed: go on from where `timeline` ends, even if its node reached the store."""
        if self._path[-1].durable:
            self.cut(timeline, NodeKind.REWIND)
        else:
            self._path.pop()

    def cut(self, timeline: Timeline, kind: NodeKind) -> None:
        """Go on from an earlier position, where `timeline` now ends: under the last node at or before it."""
        self._close_generation()
        while self._path and self._path[-1].node.position > len(timeline):
            self._path.pop()
        start = self._path[-1].node.position if self._path else 0
        self._add(kind, timeline.ids(start), timeline)

    def started(self, timeline: Timeline, kind: NodeKind) -> None:
        """The session's first node of its own."""
        self._close_generation()
        self._add(kind, np.zeros(0, np.int32), timeline)

    def appended(self, ids: NDArray[np.int32], timeline: Timeline, metadata: Mapping[str, Any]) -> None:
        self._close_generation()
        self._add(NodeKind.APPEND, ids, timeline, metadata=metadata)

    def generation_begins(self, params: Mapping[str, Any], timeline: Timeline) -> None:
        """Parameters, seed and branch, to be durable before the first token is shown."""
        self._close_generation()
        self._add(NodeKind.GENERATE, np.zeros(0, np.int32), timeline, params=params)

    def generated(self, token: int, timeline: Timeline) -> None:
        self._generated.append(token)
        self._facts = _facts_of(timeline, None)

    async def flush(self) -> None:
        """Make everything so far durable."""
        self._close_generation()
        await self._journal.write([entry for entry in self._path if not entry.durable])

    async def save(self, state: State, reason: str) -> Point:
        """Make everything so far durable, and the state, which is that of the last node, with it."""
        state.retain()  # whoever ends the session while this waits does not take it away
        try:
            await self.flush()
            return await self._journal.save(self._path[-1].node, state, reason)
        finally:
            state.release()

    def _close_generation(self) -> None:
        """Turn the tokens generated since the last node into a node."""
        if not self._generated:
            return
        last = self._path[-1].node
        tokens = np.array(self._generated, dtype=np.int32)
        del self._generated[:]
        self._add_node(NodeKind.GENERATE, tokens, last.position + len(tokens), last.turn, self._facts)

    def _add(
        self,
        kind: NodeKind,
        tokens: NDArray[np.int32],
        timeline: Timeline,
        *,
        params: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._add_node(kind, tokens, len(timeline), timeline.turn.index, _facts_of(timeline, params), metadata)

    def _add_node(
        self,
        kind: NodeKind,
        tokens: NDArray[np.int32],
        position: int,
        turn: int,
        facts: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        node = NodeRecord(
            session_id=self._session_id,
            kind=kind,
            position=position,
            tokens=tokens,
            parent_id=self._path[-1].node.id if self._path else None,
            sampler=facts,
            turn=turn,
            label=self._label,
            namespace=self._namespace,
            metadata=metadata or {},
            inexact=self._inexact,
        )
        self._path.append(_Entry(node))


def _append_metadata(path: Sequence[NodeRecord]) -> Mapping[str, Any]:
    """What the last append of a path was given to keep."""
    appends = [node.metadata for node in path if node.kind is NodeKind.APPEND]
    return appends[-1] if appends else {}


def _facts_of(timeline: Timeline, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a node keeps of the timeline besides its token ids. `prefix` is the digest of all ids up to the node."""
    turn = timeline.turn
    return {
        "branch": timeline.branch,
        "forks": timeline.forks,
        "generated": turn.generating,
        "seed": turn.seed,
        "prefix": timeline.digest().hex(),
        "params": None if params is None else dict(params),
    }


def timeline_of(path: Sequence[NodeRecord]) -> Timeline:
    """The timeline that the nodes from the root to the last one of `path` describe."""
    spans: list[Span] = []
    for node in path:
        facts = node.sampler or {}
        generated = bool(facts.get("generated"))
        if len(node.tokens) == 0 and node.kind is not NodeKind.GENERATE:
            continue  # a root, a fork or a pause says nothing about turns
        span = Span(node.position - len(node.tokens), node.turn, generated, facts.get("seed") if generated else None)
        if spans and (spans[-1].turn, spans[-1].generated) == (span.turn, span.generated):
            spans[-1] = replace(spans[-1], seed=span.seed)
        else:
            spans.append(span)
    facts = path[-1].sampler or {}
    ids = array("i", np.concatenate([node.tokens for node in path]).astype(np.int32).tobytes())
    timeline = Timeline(ids, spans, branch=int(facts.get("branch", 0)))
    timeline.forks = int(facts.get("forks", 0))
    return timeline
