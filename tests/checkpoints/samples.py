"""Small stores, states and nodes for the tests of this folder."""

from dataclasses import replace
from pathlib import Path

from serai.checkpoints import NodeRecord, Snapshot, Store
from serai.checkpoints.harness.samples import FINGERPRINT, LAYOUT, same_bits
from serai.checkpoints.harness.samples import sample_node as make_node
from serai.checkpoints.harness.samples import sample_state as make_snapshot

__all__ = ["FINGERPRINT", "LAYOUT", "all_files", "grown", "make_node", "make_snapshot", "same_bits", "saved"]


def grown(snapshot: Snapshot, tokens: int, seed: int = 1) -> Snapshot:
    """The state `tokens` later: other fixed state, the same full pages, more rows."""
    later = make_snapshot(snapshot.position + tokens, seed, snapshot.layout)
    full = snapshot.position // snapshot.layout.page_tokens if snapshot.pages else 0
    return replace(later, pages=snapshot.pages[:full] + later.pages[full:])


def saved(store: Store, snapshot: Snapshot, parent: NodeRecord | None = None) -> NodeRecord:
    """A new node at the snapshot's position, with the snapshot."""
    node = make_node(snapshot.position - (0 if parent is None else parent.position), parent)
    store.record(node)
    store.save(node.id, snapshot, FINGERPRINT, reason="test")
    return node


def all_files(folder: Path) -> set[str]:
    """The files of a store, from which its index could be made again."""
    kinds = ("nodes", "manifests", "parts", "tags", "tmp")
    return {str(file.relative_to(folder)) for kind in kinds for file in (folder / kind).rglob("*") if file.is_file()}
