"""What a store tells about itself and its contents: frozen values."""

from dataclasses import dataclass
from typing import Final

from serai.checkpoints.files.manifest import Storage
from serai.checkpoints.snapshot import Fingerprint, StateLayout

IN_BACKGROUND: Final = "background"
"""The reason kept with snapshots that nobody asked for."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did.

    `raw_bytes` is the whole snapshot, `new_raw_bytes` its new parts, both unpacked; `written_bytes` is what reached the
    disk, manifest included.
    """

    raw_bytes: int
    new_raw_bytes: int
    written_bytes: int
    parts_new: int
    parts_shared: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """What a stored snapshot is, without loading it: enough to check budget, model and build first.

    `inexact` if it was so when it was made, was stored with loss, or is that of an inexact node.
    """

    node_id: str
    position: int
    fingerprint: Fingerprint
    layout: StateLayout
    storage: Storage
    raw_bytes: int
    reason: str
    created_s: float
    inexact: bool

    def is_exact_for(self, running: Fingerprint) -> bool:
        """Whether its bits are those that `running` computes from its token ids: the one place that decides this."""
        return not self.inexact and self.fingerprint == running


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One stored session at its head."""

    session_id: str
    head_id: str
    nodes: int
    position: int
    turn: int
    label: str
    namespace: str
    created_s: float
    updated_s: float
    has_snapshot: bool
    inexact: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the store holds; the bytes are those of files, each part counted once however many snapshots use it."""

    sessions: int
    nodes: int
    snapshots: int
    parts: int
    node_bytes: int
    manifest_bytes: int
    part_bytes: int
    tag_bytes: int
    unpacked_bytes: int

    @property
    def file_bytes(self) -> int:
        return self.node_bytes + self.manifest_bytes + self.part_bytes + self.tag_bytes


@dataclass(frozen=True, slots=True)
class Erased:
    """What a deletion removed."""

    nodes: int = 0
    snapshots: int = 0
    file_bytes: int = 0

    def __add__(self, other: "Erased") -> "Erased":
        return Erased(self.nodes + other.nodes, self.snapshots + other.snapshots, self.file_bytes + other.file_bytes)
