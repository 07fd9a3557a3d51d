"""Durable, verified snapshots of sessions: the store, its format, and the plain values that cross into it.

Start at `store.Store`; `format` states what is on disk. This package imports nothing else of serai.
"""

from serai.checkpoints.errors import SeraiError
from serai.checkpoints.files.codec import Packing
from serai.checkpoints.files.manifest import LOSSLESS, Storage, StoredAs
from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.checkpoints.reports import Erased, SaveReport, SessionInfo, Sizes, SnapshotInfo
from serai.checkpoints.snapshot import Fingerprint, LatentPage, LatentType, PageIdentity, Snapshot, StateLayout
from serai.checkpoints.store import Store

__all__ = [
    "LOSSLESS",
    "Erased",
    "Fingerprint",
    "LatentPage",
    "LatentType",
    "NodeKind",
    "NodeRecord",
    "Packing",
    "PageIdentity",
    "SaveReport",
    "SeraiError",
    "SessionInfo",
    "Sizes",
    "Snapshot",
    "SnapshotInfo",
    "StateLayout",
    "Storage",
    "Store",
    "StoredAs",
    "new_id",
]
