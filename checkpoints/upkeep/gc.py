"""Which snapshots and sessions to let go: a pure choice by policy, and its execution.

Letting a snapshot go costs time, never content: its node keeps the token ids and a replay rebuilds the state. Whole
sessions go only by `session_idle_s`.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final

from serai.checkpoints.index import Index
from serai.checkpoints.reports import Erased
from serai.checkpoints.rows import NodeRow
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import remove_unowned

_STEP_CHANGES: Final = 3000
"""A step of erasing ends once so many rows of the index have changed: those of about a thousand parts, or of one
snapshot that has more. All that is written to the store waits for the step that is under way."""

_BETWEEN_STEPS_S: Final = 0.001
"""What waits for the index comes to it in between: a lock that is given up and asked for again at once would go to
whoever had it before."""


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
    before it, which is that of node `before`, if any. `parts` are the numbers of those it uses, alone or with others.
    `is_head`: its session goes on from here. `is_usable`: it can be loaded; what can't, being damaged or set aside, is
    of no value, counts for nobody and is kept for nobody. `manifest` tells it from one that is saved in its place
    later.
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
    before: str | None = None
    parts: tuple[int, ...] = ()
    manifest: str = ""


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


def least_valuable(
    candidates: Sequence[Candidate], needed_bytes: int, now_s: float, part_bytes: Mapping[int, int]
) -> list[str]:
    """Node ids of the snapshots to let go, the least valuable first, until `needed_bytes` are freed or only kept ones
    are left. `part_bytes` are those of each part's file, by its number. Pure.

    Whatever goes changes what others are worth: a part that one alone still uses is freed with that one, and what was
    to be replayed from the one that goes is replayed from the one before it.
    """
    left = dict(enumerate(candidates))
    after: dict[str | None, list[int]] = {}
    users: dict[int, tuple[int, int]] = {}  # how many use a part, and the sum of their numbers: of one, which it is
    for number, candidate in left.items():
        after.setdefault(candidate.before, []).append(number)
        for part in candidate.parts:
            count, total = users.get(part, (0, 0))
            users[part] = count + 1, total + number
    # One whose value has changed is in it once more; what it was before is passed over.
    queue = [(value(one, now_s), one.sequence, number) for number, one in left.items() if not one.is_kept]
    heapify(queue)
    gone: list[str] = []
    while needed_bytes > 0 and queue:
        worth, _, number = heappop(queue)
        victim = left.get(number)
        if victim is None or worth != value(victim, now_s):
            continue
        del left[number]
        gone.append(victim.node_id)
        needed_bytes -= victim.own_bytes
        changed = set()
        for part in victim.parts:
            count, total = users[part]
            users[part] = count - 1, total - number
            if count == 2:
                last = total - number
                left[last] = replace(left[last], own_bytes=left[last].own_bytes + part_bytes[part])
                changed.add(last)
        for later in after.pop(victim.node_id, ()):
            if (one := left.get(later)) is not None:
                tokens = one.replay_tokens + victim.replay_tokens
                left[later] = replace(one, replay_tokens=tokens, before=victim.before)
                after.setdefault(victim.before, []).append(later)
                changed.add(later)
        for other in changed:
            if not left[other].is_kept:
                heappush(queue, (value(left[other], now_s), left[other].sequence, other))
    return gone


def collect(store: Store, policy: GcPolicy, *, protected: Collection[str] = ()) -> GcReport:
    """Apply a policy to a store, and remove what killed saves left.

    `protected` are the nodes that live sessions and pending resumes stand on; with the tagged ones they keep their
    snapshots, or those a replay for them would start from. Safe beside other work on the store: what is recorded from
    now on is never erased, nor counted against `max_bytes`.
    """
    now_s = store.now()
    with store.reading_index() as index:
        known = {row.id for row in index.nodes()}
    kept = set(protected) | set(store.tags().values())
    gone, sessions = Erased(), 0
    if policy.session_idle_s is not None:
        idle = [one.session_id for one in store.sessions() if now_s - one.updated_s > policy.session_idle_s]
        gone, sessions = _erase_sessions(store, idle, kept, known)
    freed_bytes, snapshots = gone.file_bytes, 0
    if policy.snapshots_per_session is not None or policy.snapshot_idle_s is not None:
        candidates, _ = candidates_of(store, kept, with_parts=False)
        gone = _drop(store, _chosen(candidates, surplus(candidates, policy, now_s)))
        freed_bytes, snapshots = freed_bytes + gone.file_bytes, snapshots + gone.snapshots
    if policy.max_bytes is not None and (excess_bytes := store.sizes().file_bytes - policy.max_bytes) > 0:
        candidates, part_bytes = candidates_of(store, kept)
        gone = _drop(store, _chosen(candidates, least_valuable(candidates, excess_bytes, now_s, part_bytes)))
        freed_bytes, snapshots = freed_bytes + gone.file_bytes, snapshots + gone.snapshots
    return GcReport(snapshots, sessions, len(remove_unowned(store)), freed_bytes)


def candidates_of(
    store: Store, kept: Collection[str], *, with_parts: bool = True
) -> tuple[list[Candidate], dict[int, int]]:
    """Every snapshot of a store with what the choice needs to know of it, and the bytes of each part's file.

    Without the parts, which `surplus` has no use for, `own_bytes` are those of the manifest alone.
    """
    with store.reading_index() as index:
        rows = {row.id: row for row in index.nodes()}
        saved, unusable = index.snapshots(), index.unusable()
        uses, part_bytes = (index.uses(), index.part_bytes()) if with_parts else ([], {})
    heads = {row.session: row.id for row in rows.values()}  # in order of sequence, so the last one stays
    found = {row.node for row in saved if row.node not in unusable}
    needed = {_nearest(rows, found, node_id) for node_id in kept if node_id in rows}
    parts: dict[str, list[int]] = {}
    for node_id, part in uses:
        parts.setdefault(node_id, []).append(part)
    users = Counter(part for _, part in uses)
    candidates = []
    for row in saved:
        node, is_usable = rows[row.node], row.node in found
        before = _nearest(rows, found, node.parent) if is_usable else None
        its_parts = tuple(parts.get(node.id, ()))
        candidates.append(
            Candidate(
                node_id=node.id,
                session_id=node.session,
                sequence=node.sequence,
                used_s=row.used_s,
                own_bytes=row.file_bytes + sum(part_bytes[part] for part in its_parts if users[part] == 1),
                replay_tokens=row.position - (0 if before is None else rows[before].position) if is_usable else 0,
                is_head=is_usable and heads[node.session] == node.id,
                is_kept=node.id in needed,
                is_usable=is_usable,
                before=before,
                parts=its_parts,
                manifest=row.manifest,
            )
        )
    return candidates, part_bytes


def _nearest(rows: dict[str, NodeRow], found: Collection[str], node_id: str | None) -> str | None:
    while node_id is not None and node_id not in found:
        node_id = rows[node_id].parent
    return node_id


def _chosen(candidates: Sequence[Candidate], node_ids: Sequence[str]) -> dict[str, str]:
    """The snapshots to let go: by node, in the order of `node_ids`, each with its manifest."""
    manifests = {candidate.node_id: candidate.manifest for candidate in candidates}
    return {node_id: manifests[node_id] for node_id in node_ids}


def _drop(store: Store, chosen: Mapping[str, str]) -> Erased:
    """Erase the chosen snapshots, those that are still there: what was saved anew after the choice stays."""

    def remove(node_id: str) -> Erased:
        row = store._index.snapshot(node_id)
        is_there = row is not None and row.manifest == chosen[node_id]
        return store._index.remove_snapshot(node_id) if is_there else Erased()

    return _erase(store, "erasing snapshots", list(chosen), remove)


def _erase_sessions(
    store: Store, session_ids: Sequence[str], kept: Collection[str], known: Collection[str]
) -> tuple[Erased, int]:
    """Erase those of the sessions' nodes that are `known` from their leaves on, sparing the kept ones and all they
    continue from; and of how many sessions anything went.

    Their snapshots, which may be large, go first. The nodes of a session then go at once: with half of them left,
    somebody would go on half way.
    """
    touched = set()

    def remove(session_id: str) -> Erased:
        gone = Erased()
        for node_id in _removable(store._index, session_id, kept, known):
            gone += store._index.remove_node(node_id)
            touched.add(session_id)
        return gone

    snapshots: list[str] = []
    for session_id in session_ids:
        with store.reading_index() as index:
            snapshots += _removable(index, session_id, kept, known)
    gone = _erase(store, "erasing idle sessions' snapshots", snapshots, store._index.remove_snapshot)
    return gone + _erase(store, "erasing idle sessions", session_ids, remove), len(touched)


def _removable(index: Index, session_id: str, kept: Collection[str], known: Collection[str]) -> list[str]:
    """The nodes of a session that may go, each before the one it continues from."""
    gone: dict[str, None] = {}
    for row in reversed(index.nodes(session_id)):  # children are younger than their parents
        if row.id in known and row.id not in kept and gone.keys() >= set(index.children(row.id)):
            gone[row.id] = None
    return list(gone)


def _erase(store: Store, doing: str, names: Sequence[str], remove: Callable[[str], Erased]) -> Erased:
    """Have `remove` take each name's rows, then unlink their files, some at a time; what has gone."""
    left, gone = deque(names), Erased()

    def step() -> Erased:
        taken, end = Erased(), store._index.changes + _STEP_CHANGES
        while left and store._index.changes < end:
            taken += remove(left.popleft())
        return taken

    while left:
        gone += store._erase(doing, step)
        time.sleep(_BETWEEN_STEPS_S)
    return gone
