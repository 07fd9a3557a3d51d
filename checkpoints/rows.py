"""What the index keeps: one frozen value per kind of row."""

from dataclasses import dataclass
from enum import Enum


class FileKind(Enum):
    """The kinds of files a row can stand for."""

    NODE = "node"
    MANIFEST = "manifest"
    PART = "part"
    TAG = "tag"


@dataclass(frozen=True, slots=True)
class NodeRow:
    """What the index knows of a node (all but its token ids and JSON)."""

    sequence: int
    id: str
    session: str
    parent: str | None
    kind: str
    position: int
    turn: int
    label: str
    namespace: str
    created_s: float
    inexact: bool
    chain: str
    file_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """What the index knows of a snapshot; `raw_bytes` is its size unpacked, `file_bytes` that of its manifest.

    `set_aside` says why it is kept for inspection but never loaded again.
    """

    node: str
    manifest: str
    position: int
    raw_bytes: int
    reason: str
    lossy: bool
    created_s: float
    used_s: float
    file_bytes: int
    set_aside: str | None = None


@dataclass(frozen=True, slots=True)
class PartRow:
    """A part in use by at least one snapshot; `base` is the part it is a delta to, used by the same snapshots.

    `file_bytes` is its size on disk, `damaged` says that its file must be written anew.
    """

    hash: str
    raw_bytes: int
    file_bytes: int
    base: str | None = None
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Erasure:
    """A file whose row is gone and that is still to be unlinked."""

    kind: FileKind
    name: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How many there are of each; `unpacked_bytes` is over all parts, each once."""

    sessions: int
    nodes: int
    snapshots: int
    parts: int
    unpacked_bytes: int
