"""Which snapshots and sessions to let go: a pure choice by policy, and its execution.

Letting a snapshot go costs time, never content: its node keeps the token ids and a replay rebuilds the state. Whole
sessions go only by `session_idle_s`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from serai.checkpoints.errors import NodeInUse, SessionGone
from serai.checkpoints.reports import Erased
from serai.checkpoints.rows import NodeRow
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import remove_unowned


@dataclass(frozen=True, slots=True)
class GcPolicy:
    """What to keep; None sets no limit.

    `snapshots_per_session`: the latest so many of each session. `snapshot_idle_s`: those used or made within that time.
    `max_bytes`: as many as fit the files' total, those of least value gone first. `session_idle_s`: sessions with any
    activity within that time; others are erased with their token ids. The snapshots of tagged and protected nodes (or
    those a replay for them starts from) are kept in any case, and a session's head goes by `max_bytes` alone.
    """

    snapshots_per_session: int | None = None
    snapshot_idle_s: float | None = None
    max_bytes: int | None = None
    session_idle_s: float | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot as the choice sees it.

    `own_bytes` are freed if it alone goes; `replay_tokens` must be fed again to rebuild it from the nearest snapshot
    before it. `is_head`: its session goes on from here. `is_usable`: it can be loaded; what can't, being damaged or set
    aside, is of no value, counts for nobody and is kept for nobody.
    """

    node_id: str
    session_id: str
    sequence: int
    used_s: float
    own_bytes: int
    replay_tokens: int
    is_head: bool
    is_kept: bool
    is_usable: bool = True


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did; `orphan_files` were left by killed saves."""

    snapshots: int
    sessions: int
    orphan_files: int
    freed_bytes: int


def value(candidate: Candidate, now_s: float) -> float:
    """How much a snapshot is worth keeping: tokens it saves from replay per byte, halved for every hour unused.

    A head counts ten times: it is where a session is most likely resumed.
    """
    idle_h = max(0.0, now_s - candidate.used_s) / 3600
    weight = 10.0 if candidate.is_head else 1.0
    return weight * candidate.replay_tokens / max(1, candidate.own_bytes) * math.exp2(-min(idle_h, 1000.0))


def surplus(candidates: Sequence[Candidate], policy: GcPolicy, now_s: float) -> list[str]:
    """Node ids of the snapshots that the limits on number and idleness let go, oldest first. Pure."""
    gone: set[str] = set()
    free = [candidate for candidate in candidates if not candidate.is_kept]
    if policy.snapshots_per_session is not None:
        by_session: dict[str, list[Candidate]] = {}
        for candidate in (one for one in candidates if one.is_usable):
            by_session.setdefault(candidate.session_id, []).append(candidate)
        for of_session in by_session.values():
            latest = sorted(of_session, key=lambda candidate: candidate.sequence, reverse=True)
            gone |= {candidate.node_id for candidate in latest[policy.snapshots_per_session :]}
    if policy.snapshot_idle_s is not None:
        gone |= {candidate.node_id for candidate in free if now_s - candidate.used_s > policy.snapshot_idle_s}
    return [candidate.node_id for candidate in free if candidate.node_id in gone and not candidate.is_head]


def least_valuable(candidates: Sequence[Candidate], now_s: float) -> str | None:
    """The node id of the snapshot to let go first when bytes must be freed, or None if all are kept. Pure."""
    free = [candidate for candidate in candidates if not candidate.is_kept]
    return min(free, key=lambda candidate: (value(candidate, now_s), candidate.sequence)).node_id if free else None


def collect(store: Store, policy: GcPolicy, *, protected: Collection[str] = ()) -> GcReport:
    """Apply a policy to a store, and remove what killed saves left.

    `protected` are the nodes that live sessions and pending resumes stand on; with the tagged ones they keep their
    snapshots, or those a replay for them would start from. Safe beside other work on the store: what is recorded from
    now on is never erased.
    """
    now_s = store.now()
    with store.reading_index() as index:
        known = {row.id for row in index.nodes()}
    kept = set(protected) | set(store.tags().values())
    freed, snapshots, sessions = 0, 0, 0
    if policy.session_idle_s is not None:
        for session in store.sessions():
            if now_s - session.updated_s > policy.session_idle_s:
                erased = _erase_session(store, session.session_id, kept, known)
                sessions, freed = sessions + (erased.nodes > 0), freed + erased.file_bytes
    for node_id in surplus(candidates_of(store, kept), policy, now_s):
        freed, snapshots = freed + _drop(store, node_id), snapshots + 1
    while policy.max_bytes is not None and store.sizes().file_bytes > policy.max_bytes:
        victim = least_valuable(candidates_of(store, kept), now_s)
        if victim is None:
            break
        freed, snapshots = freed + _drop(store, victim), snapshots + 1
    return GcReport(snapshots, sessions, len(remove_unowned(store)), freed)


def candidates_of(store: Store, kept: Collection[str]) -> list[Candidate]:
    """Every snapshot of a store with what the choice needs to know of it."""
    with store.reading_index() as index:
        rows = {row.id: row for row in index.nodes()}
        saved, unusable = index.snapshots(), index.unusable()
        own = index.own_bytes()
        heads = {row.session: row.id for row in rows.values()}  # in order of sequence, so the last one stays
    found = {row.node for row in saved if row.node not in unusable}
    needed = {_nearest(rows, found, node_id) for node_id in kept if node_id in rows}
    return [
        Candidate(
            node_id=row.node,
            session_id=rows[row.node].session,
            sequence=rows[row.node].sequence,
            used_s=row.used_s,
            own_bytes=own.get(row.node, 0) + row.file_bytes,
            replay_tokens=row.position - _position_before(rows, found, rows[row.node].parent)
            if row.node in found
            else 0,
            is_head=heads[rows[row.node].session] == row.node and row.node in found,
            is_kept=row.node in needed,
            is_usable=row.node in found,
        )
        for row in saved
    ]


def _nearest(rows: dict[str, NodeRow], found: Collection[str], node_id: str | None) -> str | None:
    while node_id is not None and node_id not in found:
        node_id = rows[node_id].parent
    return node_id


def _position_before(rows: dict[str, NodeRow], found: Collection[str], parent: str | None) -> int:
    before = _nearest(rows, found, parent)
    return 0 if before is None else rows[before].position


def _drop(store: Store, node_id: str) -> int:
    try:
        return store.drop_snapshot(node_id).file_bytes
    except SessionGone:
        return 0  # erased by someone else since the choice was made


def _erase_session(store: Store, session_id: str, kept: Collection[str], known: Collection[str]) -> Erased:
    """Erase those of a session's nodes that are `known` from its leaves on, sparing the kept ones and all they continue
    from."""
    nodes = snapshots = file_bytes = 0
    with store.reading_index() as index:
        ids = [row.id for row in reversed(index.nodes(session_id)) if row.id in known]
    for node_id in ids:
        if node_id not in kept:
            try:
                erased = store.delete(node_id)
            except (NodeInUse, SessionGone):
                continue
            nodes, snapshots = nodes + erased.nodes, snapshots + erased.snapshots
            file_bytes += erased.file_bytes
    return Erased(nodes, snapshots, file_bytes)
