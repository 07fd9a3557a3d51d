"""What two nodes have in common: token ids, and the bytes of their snapshots."""

from dataclasses import dataclass

import numpy as np

from serai.checkpoints.errors import SnapshotMissing
from serai.checkpoints.store import Store


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two nodes beside each other.

    Their first `common_tokens` ids are equal; `common_node` is the last node on both paths, if any. Bytes are those of
    part files: in both snapshots, and in one alone; a node without a snapshot has none.
    """

    positions: tuple[int, int]
    common_tokens: int
    common_node: str | None
    shared_bytes: int
    own_bytes: tuple[int, int]


def compare(store: Store, one: str, other: str) -> Comparison:
    """Compare two nodes of a store; `SessionGone` for an unknown one."""
    tokens = store.tokens(one), store.tokens(other)
    length = min(tokens[0].size, tokens[1].size)
    different = np.flatnonzero(tokens[0][:length] != tokens[1][:length])
    paths = store.ancestry(one), store.ancestry(other)
    common = [mine for mine, theirs in zip(*paths, strict=False) if mine == theirs]
    parts = _parts(store, one), _parts(store, other)
    shared = parts[0].keys() & parts[1].keys()
    return Comparison(
        positions=(tokens[0].size, tokens[1].size),
        common_tokens=int(different[0]) if different.size else length,
        common_node=common[-1] if common else None,
        shared_bytes=sum(parts[0][name] for name in shared),
        own_bytes=(_sum_without(parts[0], shared), _sum_without(parts[1], shared)),
    )


def _parts(store: Store, node_id: str) -> dict[str, int]:
    """The parts a node's snapshot uses, with the bytes of their files."""
    try:
        with store.reading_index() as index:
            rows = [index.part(name) for name in store._manifest(node_id).parts]
    except SnapshotMissing:
        return {}
    return {row.hash: row.file_bytes for row in rows if row is not None}


def _sum_without(parts: dict[str, int], shared: set[str]) -> int:
    return sum(size for name, size in parts.items() if name not in shared)
