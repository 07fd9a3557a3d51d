"""Nodes: the immutable points of a session tree, each with the exact token ids it adds, and how one is written down."""

import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.names import check_id, check_text, new_id
from serai.checkpoints.rows import NodeRow

MAX_METADATA_BYTES: Final = 1 << 20


class NodeKind(Enum):
    """Why a node was recorded."""

    ROOT = "root"
    APPEND = "append"
    GENERATE = "generate"
    FORK = "fork"
    PAUSE = "pause"
    REWIND = "rewind"
    MIGRATE = "migrate"
    IMPORT = "import"


def _no_tokens() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NodeRecord:
    """One point of a session tree.

    `tokens` (int32 `[n]`) are the ids added since `parent`; `position` counts all ids up to and including them and
    `visible_tokens` those a reader was shown. `sampler` and `metadata` are plain JSON objects. `created_s` is Unix
    time. `inexact` marks a state that comes from a lossy or foreign snapshot and is never used for reuse, as are all
    that continue from it.
    """

    session_id: str
    kind: NodeKind
    position: int
    tokens: NDArray[np.int32] = field(default_factory=_no_tokens)
    id: str = field(default_factory=new_id)
    parent_id: str | None = None
    visible_tokens: int | None = None
    sampler: Mapping[str, Any] | None = None
    turn: int = 0
    label: str = ""
    namespace: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    created_s: float = field(default_factory=time.time)
    inexact: bool = False

    def __post_init__(self) -> None:
        check_id(self.id, "node id")
        check_id(self.session_id, "session id")
        if self.parent_id is not None:
            check_id(self.parent_id, "node id")
        check_text(self.label, "label", may_be_empty=True)
        check_text(self.namespace, "namespace", may_be_empty=True)
        if self.tokens.dtype != np.int32 or self.tokens.ndim != 1:
            raise ValueError(f"a node's tokens are int32 [n], not {self.tokens.dtype} {list(self.tokens.shape)}")
        if self.position < len(self.tokens):
            raise ValueError(f"a node at position {self.position} cannot have added {len(self.tokens)} tokens")
        if self.visible_tokens is None:
            object.__setattr__(self, "visible_tokens", self.position)
        elif not 0 <= self.visible_tokens <= self.position:
            raise ValueError(f"{self.visible_tokens} of {self.position} tokens cannot be visible")
        if self.turn < 0:
            raise ValueError(f"turns count from 0, not {self.turn}")
        size = len(jsonio.encode({"sampler": self.sampler, "metadata": self.metadata}))
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"a node's sampler and metadata take {size} bytes and {MAX_METADATA_BYTES} are allowed")


def encode(node: NodeRecord, *, sequence: int, chain: str) -> bytes:
    """A node's document: JSON, token ids as base64 of little-endian int32.

    `sequence` orders the nodes of a store; `chain` is `chain_of` the whole path, so a node vouches for all tokens
    before it.
    """
    return jsonio.encode(
        {
            "id": node.id,
            "session": node.session_id,
            "parent": node.parent_id,
            "kind": node.kind.value,
            "position": node.position,
            "visible_tokens": node.visible_tokens,
            "tokens": b64encode(node.tokens.astype("<i4").tobytes()).decode("ascii"),
            "sampler": node.sampler,
            "turn": node.turn,
            "label": node.label,
            "namespace": node.namespace,
            "metadata": node.metadata,
            "created_s": node.created_s,
            "inexact": node.inexact,
            "sequence": sequence,
            "chain": chain,
        }
    )


@dataclass(frozen=True, slots=True, eq=False)
class StoredNode:
    """A node as found in its document."""

    node: NodeRecord
    sequence: int
    chain: str


def decode(body: bytes, what: str) -> StoredNode:
    """The node in a document's body; `SnapshotCorrupt` for anything `encode` would not have written."""
    value = jsonio.decode(body, what)
    try:
        tokens = np.frombuffer(b64decode(jsonio.field(value, "tokens", str, what), validate=True), "<i4").astype(
            np.int32
        )
        node = NodeRecord(
            id=jsonio.field(value, "id", str, what),
            session_id=jsonio.field(value, "session", str, what),
            parent_id=jsonio.optional_text(value, "parent", what),
            kind=NodeKind(jsonio.field(value, "kind", str, what)),
            position=jsonio.count(value, "position", what),
            visible_tokens=jsonio.count(value, "visible_tokens", what),
            tokens=tokens,
            sampler=None if value.get("sampler") is None else jsonio.field(value, "sampler", dict, what),
            turn=jsonio.count(value, "turn", what),
            label=jsonio.field(value, "label", str, what),
            namespace=jsonio.field(value, "namespace", str, what),
            metadata=jsonio.field(value, "metadata", dict, what),
            created_s=jsonio.field(value, "created_s", float, what),
            inexact=jsonio.field(value, "inexact", bool, what),
        )
    except ValueError as error:  # also NameInvalid and base64's own error
        raise SnapshotCorrupt(what=what, problem=str(error)) from error
    return StoredNode(node, jsonio.count(value, "sequence", what), jsonio.field(value, "chain", str, what))


def row_of(node: NodeRecord, *, sequence: int, chain: str, file_bytes: int) -> NodeRow:
    """What the index keeps of a node."""
    return NodeRow(
        sequence=sequence,
        id=node.id,
        session=node.session_id,
        parent=node.parent_id,
        kind=node.kind.value,
        position=node.position,
        turn=node.turn,
        label=node.label,
        namespace=node.namespace,
        created_s=node.created_s,
        inexact=node.inexact,
        chain=chain,
        file_bytes=file_bytes,
    )


def chain_of(parent_chain: str, tokens: NDArray[np.int32]) -> str:
    """The BLAKE3 (hex) of the parent's chain (empty at the root) and the ids added: one value for the whole path of
    nodes.
    """
    return blake3(parent_chain.encode("ascii")).update(tokens.astype("<i4").tobytes()).hexdigest()
