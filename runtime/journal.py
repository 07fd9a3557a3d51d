"""What is written down of each session, and when: the asynchronous edge of the store.

An append is durable before it returns, a generation's parameters before its first token is shown and its tokens before
it is reported finished. Snapshots are larger and may come later; whatever lies between the last one and the end is
replayed from its token ids. Without a store nothing is written and `pause` says so.
"""

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.snapshot import Fingerprint, Snapshot, StateLayout
from serai.checkpoints.store import Store
from serai.runtime.errors import BadParameter, FormatUnknown, SnapshotCorrupt
from serai.runtime.state import State, snapshot_of
from serai.runtime.turns import Timeline, Turn

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

    node: NodeRecord
    timeline: Timeline
    is_head: bool
    snapshot: Snapshot | None
    inexact: bool
    append_metadata: Mapping[str, Any]


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

    def open_record(self, session_id: str, *, namespace: str, label: str) -> "Record":
        return Record(self, session_id, namespace=namespace, label=label)

    async def write(self, entries: Sequence[_Entry]) -> None:
        """Make the entries durable, in order. Cancellation waits for it: it is short, and half of it is no use."""
        store = self._store
        if store is None:
            return

        def work(nodes: Sequence[NodeRecord]) -> None:
            for node in nodes:
                store.record(node)

        with anyio.CancelScope(shield=True):
            async with self._writing:
                fresh = [entry for entry in entries if not entry.durable]
                if fresh:
                    await anyio.to_thread.run_sync(work, [entry.node for entry in fresh])
                    for entry in fresh:
                        entry.durable = True

    async def save(self, node: NodeRecord, state: State) -> Point:
        """Store the whole state under a node that is durable already."""
        store = self._store
        if store is None:
            raise BadParameter('pausing needs a place to keep the state; open the runtime with store="some/folder"')
        snapshot = snapshot_of(self._layout, state.retain())
        try:
            with anyio.CancelScope(shield=True):
                report = await anyio.to_thread.run_sync(
                    lambda: store.save(node.id, snapshot, self._fingerprint, reason="pause")
                )
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

    def _find(self, store: Store, name: str, *, as_is: bool) -> Stored:
        node_id = store.resolve(name)
        path = store.path(node_id)
        node = path[-1]
        timeline = timeline_of(path)
        snapshot, foreign = self._nearest(store, node_id, as_is=as_is)
        appends = [one for one in path if one.kind is NodeKind.APPEND]
        return Stored(
            node=node,
            timeline=timeline,
            is_head=store.session_head(node.session_id) == node_id,
            snapshot=snapshot,
            inexact=node.inexact or foreign,
            append_metadata=appends[-1].metadata if appends else {},
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
    """One session's part of the journal: what is still to be written, and the last durable node."""

    def __init__(self, journal: Journal, session_id: str, *, namespace: str, label: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._namespace = namespace
        self._label = label
        self._head: NodeRecord | None = None
        self._pending: list[_Entry] = []
        self._generated = array("i")
        self._sampler: Mapping[str, Any] | None = None
        self._inexact = False

    def point(self) -> str:
        """The id of the session's last node; durable once `flush` has returned."""
        node = self._last()
        if node is None:
            raise ValueError("a session's record has at least its first node")
        return node.id

    def continues(self, node: NodeRecord, *, inexact: bool) -> None:
        """The session goes on from a node that is durable already; `inexact` marks all that follows (DESIGN §6)."""
        self._head = node
        self._inexact = inexact

    def branched_from(self, other: "Record") -> None:
        """The session begins where another one stands now; what that one has not written yet is written by both."""
        self._head = other._head
        self._pending = list(other._pending)
        self._generated = other._generated[:]
        self._sampler = other._sampler
        self._inexact = other._inexact

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
        self._sampler = self._pending[-1].node.sampler

    def generated(self, token: int) -> None:
        self._generated.append(token)

    async def flush(self) -> None:
        """Make everything so far durable."""
        self._close_generation()
        entries = tuple(self._pending)
        await self._journal.write(entries)
        if entries:
            self._head = entries[-1].node
            del self._pending[: len(entries)]

    async def save(self, state: State) -> Point:
        """Make everything so far durable, and the state with it."""
        await self.flush()
        if self._head is None:
            raise ValueError("a session's record has at least its first node")
        return await self._journal.save(self._head, state)

    def _last(self) -> NodeRecord | None:
        return self._pending[-1].node if self._pending else self._head

    def _close_generation(self) -> None:
        """Turn the tokens generated since the last node into a node."""
        if not self._generated:
            return
        last = self._last()
        tokens = np.array(self._generated, dtype=np.int32)
        del self._generated[:]
        position = (0 if last is None else last.position) + len(tokens)
        facts = {**(self._sampler or {}), "generating": True}
        self._add_node(NodeKind.GENERATE, tokens, position, 0 if last is None else last.turn, facts)

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
        last = self._last()
        node = NodeRecord(
            session_id=self._session_id,
            kind=kind,
            position=position,
            tokens=tokens,
            parent_id=None if last is None else last.id,
            sampler=facts,
            turn=turn,
            label=self._label,
            namespace=self._namespace,
            metadata=metadata or {},
            inexact=self._inexact,
        )
        self._pending.append(_Entry(node))


def _facts_of(timeline: Timeline, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a node keeps of the timeline besides its token ids."""
    turn = timeline.turn
    return {
        "branch": timeline.branch,
        "forks": timeline.forks,
        "generation_start": turn.generation_start,
        "generating": turn.generating,
        "seed": turn.seed,
        "params": None if params is None else dict(params),
    }


def timeline_of(path: Sequence[NodeRecord]) -> Timeline:
    """The timeline that the nodes from the root to the last one of `path` describe."""
    last = path[-1]
    facts = last.sampler or {}
    timeline = Timeline(
        array("i", np.concatenate([node.tokens for node in path]).astype(np.int32).tobytes()),
        branch=int(facts.get("branch", 0)),
    )
    timeline.forks = int(facts.get("forks", 0))
    timeline.turn = Turn(
        index=last.turn,
        generation_start=int(facts.get("generation_start", 0)),
        generating=bool(facts.get("generating", False)),
        seed=facts.get("seed"),
    )
    # A turn ends where the first node of the next one begins.
    timeline.turn_ends = tuple(before.position for before, after in pairwise(path) if after.turn > before.turn)
    return timeline
