"""What is written down of each session, and when: the asynchronous edge of the store.

An append is durable before it returns, a generation's parameters before its first token is shown and its tokens before
it is reported finished. Snapshots are larger and may come later; whatever lies between the last one and the end is
replayed from its token ids. Without a store nothing is written and `pause` says so.
"""

import logging
import threading
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from serai.checkpoints.moving.handover import require_owned
from serai.checkpoints.moving.ownership import override_move, ownership
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.reports import IN_BACKGROUND, SaveReport
from serai.checkpoints.snapshot import Fingerprint, Snapshot, StateLayout
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.gc import GcPolicy, GcReport, collect
from serai.runtime.errors import BadParameter, FormatUnknown, SeraiError, SessionGone, SnapshotCorrupt, SnapshotMissing
from serai.runtime.memory.give_back import GiveBack
from serai.runtime.sessions.starts import OF_NO_USE, Accept, Start, Starts, Way
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
    """What the store knows of a point: the nodes on the way to it, without their token ids; its timeline; and the way
    to rebuild its state, with `accept` as it was asked for by."""

    path: tuple[NodeRecord, ...]
    timeline: Timeline
    is_head: bool
    way: Way
    accept: Accept

    @property
    def node(self) -> NodeRecord:
        return self.path[-1]

    @property
    def replay_tokens(self) -> int:
        """How many of its tokens lie past where its state begins."""
        return self.node.position - (0 if self.way.start is None else self.way.start.position)

    @property
    def append_metadata(self) -> Mapping[str, Any]:
        """What the last append on the way here was given to keep."""
        return append_metadata_of(self.path)

    def worth_storing(self, replayed: int, *, more_than: int) -> NodeRecord | None:
        """The node under which the exact state here is to be stored after so many tokens were replayed for it, if any.

        It is one here whose snapshot is of no use to anybody; or the point itself, if it has none and there were
        `more_than` so many. What somebody may want as it is, or to look at, is not written over.
        """
        here = [node for node in reversed(self.path) if node.position == self.node.position and not node.inexact]
        of_no_use = [node for node in here if self.way.passed.get(node.id) in OF_NO_USE]
        if of_no_use and replayed > 0:
            return of_no_use[0]
        has_none = not self.node.inexact and self.node.id not in self.way.passed
        return self.node if has_none and replayed > more_than else None


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A stored snapshot that anybody with the same token ids may start from."""

    namespace: str
    digest: bytes
    position: int
    node_id: str


@dataclass(eq=False, slots=True)
class Entry:
    """A node on its way to the store. Forks share their parent's entries; whoever flushes first writes them.

    A durable one keeps no token ids: they are in the store, and once more in the session's timeline.
    """

    node: NodeRecord
    durable: bool = False

    def written(self) -> None:
        """The node is in the store."""
        self.node = without_tokens(self.node)
        self.durable = True


def without_tokens(node: NodeRecord) -> NodeRecord:
    """The node, but for the ids it added; its position still says how many those were."""
    return replace(node, tokens=np.zeros(0, np.int32))


class Journal:
    """Writes sessions down, one store call at a time per session, never on the event loop."""

    def __init__(self, store: Store | None, fingerprint: Fingerprint, layout: StateLayout) -> None:
        self.store = store
        self._fingerprint = fingerprint
        self._layout = layout
        self._starts = Starts(fingerprint, layout)
        self.on_saved: Callable[[str], None] = lambda node_id: None  # told which node a state was stored under
        self._writing = anyio.Lock()
        self._give_back = GiveBack()
        self._counting = threading.Lock()
        self.saves = 0
        self.failed_saves = 0

    @property
    def is_durable(self) -> bool:
        """Whether there is a store behind it."""
        return self.store is not None

    def file_bytes(self) -> int:
        """What the store's files take; for a worker thread. 0 without a store."""
        return 0 if self.store is None else self.store.sizes().file_bytes

    async def write(self, entries: Sequence[Entry]) -> None:
        """Make the entries durable, all of them or none. Cancellation waits for it: it is short."""
        store = self.store
        if store is None or not entries:
            return

        def work() -> None:
            store.record(*(entry.node for entry in fresh))
            for entry in fresh:
                entry.written()

        with anyio.CancelScope(shield=True):
            async with self._writing:
                fresh = [entry for entry in entries if not entry.durable]
                if fresh:
                    await in_thread_to_the_end(work)

    async def save(self, node: NodeRecord, state: State, reason: str) -> Point:
        """Store the whole state under a node that is durable already."""
        store = self.store
        if store is None:
            raise BadParameter('pausing needs a place to keep the state; open the runtime with store="some/folder"')
        snapshot = snapshot_of(self._layout, state.retain())
        try:
            report = await in_thread_to_the_end(lambda: self._save(store, node.id, snapshot, reason))
        finally:
            state.release()
        self.on_saved(node.id)
        return Point(node.id, node.session_id, node.position, report.raw_bytes, report.written_bytes, report.elapsed_s)

    def _save(self, store: Store, node_id: str, snapshot: Snapshot, reason: str) -> SaveReport:
        try:
            report = store.save(node_id, snapshot, self._fingerprint, reason=reason)
        except SessionGone:
            raise  # it was deleted meanwhile, and need not be stored
        except BaseException:
            with self._counting:
                self.failed_saves += 1
            raise
        with self._counting:
            self.saves += 1
        self._give_back.moved(report.new_raw_bytes)
        return report

    async def find(self, name: str, accept: Accept, *, take_back: bool = False) -> Stored:
        """Look up a node, session or tag and read the snapshot its state is to be rebuilt from.

        Raises `SessionGone`, `ModelMismatch`, or `NotOwner` at the end of a session that was moved away, unless a
        person says to `take_back` what nobody else uses. A snapshot that is not to be accepted is not used, and one
        that lies otherwise in memory never: the token ids are replayed from the one before it.
        """
        store = self.store
        if store is None:
            raise BadParameter(
                'resuming needs the store that holds the point; open the runtime with store="its/folder"'
            )
        return await anyio.to_thread.run_sync(lambda: self._find(store, name, accept, take_back=take_back))

    async def is_head(self, node: NodeRecord) -> bool:
        """Whether a durable node is still the end of its session. Raises `SessionGone`, or `NotOwner` at the end of a
        session that was moved away."""
        store = self.store
        return store is not None and await anyio.to_thread.run_sync(self._is_head, store, node)

    async def own_start(self, node_id: str) -> Start | None:
        """The snapshot stored under a node, if it is of this model and build, and exact; None otherwise."""
        store = self.store
        return None if store is None else await anyio.to_thread.run_sync(self._starts.own, store, node_id)

    async def way_to(self, node_id: str, accept: Accept) -> Way:
        """The nearest snapshot on the way to a node that can be started from, by what is known now."""
        store = self.store
        if store is None:
            return Way(None, {})
        return await anyio.to_thread.run_sync(self._starts.way_to, store, node_id, accept)

    async def load(self, start: Start, into: Snapshot) -> bool:
        """Read a snapshot into memory that is there already, of its position, to the end even when cancelled.

        False when it turns out that it can't be used: it is set aside then if it is damaged, and `into` holds nothing.
        """
        store = self.store
        return store is not None and await in_thread_to_the_end(lambda: self._load(store, start, into))

    def _load(self, store: Store, start: Start, into: Snapshot) -> bool:
        try:
            loaded = store.load(start.node_id, self._fingerprint, allocate=lambda layout, position: into)
        except (SnapshotMissing, SessionGone):
            return False  # it was erased meanwhile
        except (SnapshotCorrupt, FormatUnknown) as error:
            log.warning("%s", error)
            store.set_aside(start.node_id, str(error))
            return False
        self._give_back.moved(into.size_bytes)
        return start.inexact or not loaded.inexact  # another may have been stored since

    async def thin(self, node_id: str) -> None:
        """Erase a snapshot that was written in the background, if it is still there; what was asked for stays."""
        store = self.store

        def work(store: Store) -> None:
            # The index is held: it must not be asked for in between.
            with suppress(SnapshotCorrupt, SnapshotMissing, FormatUnknown, SessionGone), store.reading_index():
                if store.snapshot_info(node_id).reason == IN_BACKGROUND:
                    store.drop_snapshot(node_id)

        if store is not None:
            await in_thread_to_the_end(lambda: work(store))

    async def collect(self, policy: GcPolicy, protected: Collection[str]) -> GcReport:
        """Let go of what a policy doesn't keep, sparing what the tagged nodes and those `protected` need: ids of nodes,
        sessions, or tags."""
        store = self.store
        if store is None:
            raise BadParameter('there is no store to collect in; open the runtime with store="some/folder"')

        def work(store: Store) -> GcReport:
            nodes = set()
            for name in protected:
                with suppress(SessionGone):  # whoever asked for that is told so
                    nodes.add(store.resolve(name))
            return collect(store, policy, protected=nodes)

        return await in_thread_to_the_end(lambda: work(store))

    async def set_aside(self, node_id: str, why: str) -> None:
        """Keep a node's snapshot for inspection and never load it again; its state is replayed from the token ids."""
        store = self.store
        if store is None:
            return
        log.warning("the snapshot of node %s is set aside: %s", node_id, why)
        try:
            await in_thread_to_the_end(lambda: store.set_aside(node_id, why))
        except SeraiError as error:
            log.warning("the snapshot of node %s could not be set aside: %s", node_id, error)

    async def children(self, node_id: str) -> tuple[str, ...]:
        """The ids of the nodes that continue from a node; none without a store."""
        store = self.store
        return () if store is None else tuple(await anyio.to_thread.run_sync(store.children, node_id))

    async def known_prefixes(self) -> list[StoredPrefix]:
        """Every prefix that a stored snapshot of this model and build can stand for."""
        store = self.store
        return [] if store is None else await anyio.to_thread.run_sync(self._known_prefixes, store)

    def _known_prefixes(self, store: Store) -> list[StoredPrefix]:
        found = []
        for info in store.snapshots():
            node = store.node(info.node_id)
            prefix = (node.sampler or {}).get("prefix")
            if prefix and info.is_exact_for(self._fingerprint):
                found.append(StoredPrefix(node.namespace, bytes.fromhex(prefix), node.position, node.id))
        return found

    def _find(self, store: Store, name: str, accept: Accept, *, take_back: bool) -> Stored:
        path = store.path(store.resolve(name))
        is_head = self._is_head(store, path[-1], take_back=take_back)
        timeline = timeline_of(path)
        way = self._starts.way_to(store, path[-1].id, accept)
        if way.passed:
            log.info("snapshots that are not used on the way to node %s: %s", path[-1].id, way)
        bare = tuple(without_tokens(one) for one in path)
        return Stored(path=bare, timeline=timeline, is_head=is_head, way=way, accept=accept)

    def _is_head(self, store: Store, node: NodeRecord, *, take_back: bool = False) -> bool:
        if store.session_head(node.session_id) != store.resolve(node.id):
            return False  # what comes before its end is history, from which anybody may branch off
        if take_back and not ownership(store, node.session_id).may_be_used:
            override_move(store, node.session_id)
        require_owned(store, node.session_id)
        return True


def append_metadata_of(path: Sequence[NodeRecord]) -> Mapping[str, Any]:
    """What the last append of a path was given to keep."""
    appends = [node.metadata for node in path if node.kind is NodeKind.APPEND]
    return appends[-1] if appends else {}


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
