"""Which snapshots and sessions to let go: a pure choice by policy, and its execution.

Letting a snapshot go costs time, never content: its node keeps the token ids and a replay rebuilds the state. Whole
sessions go only by `session_idle_s`.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Final

from serai.checkpoints.reports import Erased
from serai.checkpoints.rows import NodeRow
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import remove_unowned

_AT_ONCE: Final = 64
"""So many are erased in one step. Each step adds up what the store holds, and keeps others from the index meanwhile."""


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
    of no value, counts for nobody and is kept for nobody.
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
    gone, sessions = Erased(0, 0, 0), 0
    if policy.session_idle_s is not None:
        idle = [one.session_id for one in store.sessions() if now_s - one.updated_s > policy.session_idle_s]
        gone, sessions = _erase_sessions(store, idle, kept, known)
    freed_bytes, snapshots = gone.file_bytes, 0
    if policy.snapshots_per_session is not None or policy.snapshot_idle_s is not None:
        gone = _drop(store, surplus(candidates_of(store, kept)[0], policy, now_s))
        freed_bytes, snapshots = freed_bytes + gone.file_bytes, snapshots + gone.snapshots
    if policy.max_bytes is not None and (excess_bytes := store.sizes().file_bytes - policy.max_bytes) > 0:
        candidates, part_bytes = candidates_of(store, kept)
        gone = _drop(store, least_valuable(candidates, excess_bytes, now_s, part_bytes))
        freed_bytes, snapshots = freed_bytes + gone.file_bytes, snapshots + gone.snapshots
    return GcReport(snapshots, sessions, len(remove_unowned(store)), freed_bytes)


_USES: Final = """SELECT s.node, p.number, p.file_bytes FROM uses u
                  JOIN snapshots s ON s.number = u.snapshot JOIN parts p ON p.number = u.part"""


def candidates_of(store: Store, kept: Collection[str]) -> tuple[list[Candidate], dict[int, int]]:
    """Every snapshot of a store with what the choice needs to know of it, and the bytes of each part's file."""
    with store.reading_index() as index:
        rows = {row.id: row for row in index.nodes()}
        saved, unusable = index.snapshots(), index.unusable()
        own, uses = index.own_bytes(), index._rows(_USES)
        heads = {row.session: row.id for row in rows.values()}  # in order of sequence, so the last one stays
    found = {row.node for row in saved if row.node not in unusable}
    needed = {_nearest(rows, found, node_id) for node_id in kept if node_id in rows}
    parts: dict[str, list[int]] = {}
    for node_id, part, _ in uses:
        parts.setdefault(node_id, []).append(part)
    candidates = []
    for row in saved:
        node, is_usable = rows[row.node], row.node in found
        before = _nearest(rows, found, node.parent) if is_usable else None
        candidates.append(
            Candidate(
                node_id=node.id,
                session_id=node.session,
                sequence=node.sequence,
                used_s=row.used_s,
                own_bytes=own.get(node.id, 0) + row.file_bytes,
                replay_tokens=row.position - (0 if before is None else rows[before].position) if is_usable else 0,
                is_head=is_usable and heads[node.session] == node.id,
                is_kept=node.id in needed,
                is_usable=is_usable,
                before=before,
                parts=tuple(parts.get(node.id, ())),
            )
        )
    return candidates, {part: file_bytes for _, part, file_bytes in uses}


def _nearest(rows: dict[str, NodeRow], found: Collection[str], node_id: str | None) -> str | None:
    while node_id is not None and node_id not in found:
        node_id = rows[node_id].parent
    return node_id


def _drop(store: Store, node_ids: Sequence[str]) -> Erased:
    """Erase the snapshots of these nodes, those that are still there."""
    return _erase(store, "erasing snapshots", node_ids, store._index.remove_snapshot)


def _erase_sessions(
    store: Store, session_ids: Sequence[str], kept: Collection[str], known: Collection[str]
) -> tuple[Erased, int]:
    """Erase those of the sessions' nodes that are `known` from their leaves on, sparing the kept ones and all they
    continue from; and of how many sessions anything went."""
    touched = set()

    def remove(session_id: str) -> None:
        for row in reversed(store._index.nodes(session_id)):  # children are younger than their parents
            if row.id in known and row.id not in kept and not store._index.children(row.id):
                store._index.remove_node(row.id)
                touched.add(session_id)

    return _erase(store, "erasing idle sessions", session_ids, remove), len(touched)


def _erase(store: Store, doing: str, names: Sequence[str], remove: Callable[[str], None]) -> Erased:
    """Have `remove` take each name's rows, then erase their files, some at a time; what has gone."""
    nodes = snapshots = file_bytes = 0
    for start in range(0, len(names), _AT_ONCE):
        some = names[start : start + _AT_ONCE]

        def remove_some(some: Sequence[str] = some) -> None:
            for name in some:
                remove(name)

        gone = store._erase(doing, remove_some)
        nodes, snapshots, file_bytes = nodes + gone.nodes, snapshots + gone.snapshots, file_bytes + gone.file_bytes
    return Erased(nodes, snapshots, file_bytes)
