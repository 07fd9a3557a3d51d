"""Moving sessions between stores: one self-contained stream, or only what the other side lacks.

A bundle is a header, entries, and an end:

    header   8  magic b"SERAIBDL"; 4 format version; 4 zero
    entry    4  kind: 1 node, 2 manifest, 3 part; 4 zero; 8 length in bytes; 64 name, filled with zeros; then the file
    end      4  kind 0; 4 zero; 8 number of entries; 64 the BLAKE3 (hex) of all bytes before this entry

Nodes come first, parents before children, then manifests, then parts, bases before the parts that are deltas to them;
the entries are the store's files as they are. A bundle may leave out parts that the receiver has.
"""

import struct
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, TypeAlias

from blake3 import blake3

from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt, TransferStopped
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.files.streams import BUFFER_BYTES
from serai.checkpoints.rows import PartRow
from serai.checkpoints.store import Store

BUNDLE_VERSION: Final = 1
BUNDLE_MAGIC: Final = b"SERAIBDL"
BUNDLE_HEADER: Final = struct.Struct("<8sI4x")
BUNDLE_ENTRY: Final = struct.Struct("<I4xQ64s")


Stopped: TypeAlias = Callable[[], bool]
"""Asked between two objects of a transfer, and within one that is read from a store or written to one: whether it is
called off. No object is half there then, and no node seen. A place is given an object, or asked for it, in one call."""


def never() -> bool:
    """A transfer that is gone through with."""
    return False


def go_on(stopped: Stopped) -> None:
    """`TransferStopped` if it is called off."""
    if stopped():
        raise TransferStopped


class EntryKind(IntEnum):
    """What an entry holds."""

    END = 0
    NODE = 1
    MANIFEST = 2
    PART = 3


class Sink(Protocol):
    """Where a bundle goes: a file, a pipe, a request's body."""

    def write(self, data: bytes, /) -> object: ...


class Source(Protocol):
    """Where a bundle comes from; `read` may return fewer bytes than asked for, and none at the end."""

    def read(self, count: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Moved:
    """What a transfer moved; `parts_had` were there before."""

    node_id: str
    nodes: int
    snapshots: int
    parts: int
    parts_had: int
    bytes: int


def parts_of(store: Store, node_id: str) -> list[str]:
    """The parts a transfer of this node consists of, bases first: what to ask the receiver about with `wanted`."""
    with store.reading_index() as index:
        step = store.nearest_snapshot(node_id)
        if step is None:
            return []
        entry = store._manifest(step)
        rows = [index.part(name) for name in entry.parts]
    bases = [row.base for row in rows if row is not None and row.base is not None]
    return list(dict.fromkeys([*bases, *entry.parts]))


def wanted(store: Store, names: Iterable[str]) -> list[str]:
    """Which of these parts the store lacks. Those a broken transfer left count as there, and are verified on import."""
    names = list(names)
    with store.reading_index() as index:
        rows = {name: index.part(name) for name in names}
    return [name for name in names if not (_is_sound(rows[name]) or (rows[name] is None and _is_left(store, name)))]


def _is_sound(row: PartRow | None) -> bool:
    return row is not None and not row.damaged


def _is_left(store: Store, name: str) -> bool:
    try:
        head = store._files.head(name)
    except (SnapshotCorrupt, FormatUnknown):
        return False
    return head is not None and head.hash == name


def export(store: Store, node_id: str, sink: Sink, *, parts: Collection[str] | None = None) -> Moved:
    """Write a node, all it continues from and its nearest snapshot as a bundle.

    `parts` limits the parts written to those the receiver wants. It is what there was at the beginning, whatever is
    erased or saved anew meanwhile. At most one buffer of the store's files is in memory.
    """
    with store._holding("exporting") as pin:
        with store.reading_index() as index:  # all of it, or what is erased meanwhile would be missing in part only
            path, step = store.ancestry(node_id), store.nearest_snapshot(node_id)
            needed = parts_of(store, node_id)
            row = None if step is None else index.snapshot(step)
            for name in (*path, *needed, *([] if row is None else [row.manifest])):
                pin(name)
        out = _Writer(sink)
        for node in path:
            out.file(EntryKind.NODE, node, store._folders.nodes, node)
        if row is not None:
            out.file(EntryKind.MANIFEST, row.manifest, store._folders.manifests, row.manifest)
        chosen = [name for name in needed if parts is None or name in parts]
        for name in chosen:
            with store._files.folder.child(name[:2], create=False) as folder:
                out.file(EntryKind.PART, name, folder, name[2:])
        out.end()
    return Moved(node_id, len(path), int(step is not None), len(chosen), len(needed) - len(chosen), out.bytes)


class _Writer:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._digest = blake3()
        self._entries = 0
        self.bytes = 0
        self._put(BUNDLE_HEADER.pack(BUNDLE_MAGIC, BUNDLE_VERSION))

    def _put(self, data: bytes) -> None:
        self._sink.write(data)
        self._digest.update(data)
        self.bytes += len(data)

    def file(self, kind: EntryKind, name: str, folder: Folder, file_name: str) -> None:
        what = f"{kind.name.lower()} {name}"
        try:
            with folder.reading(file_name, what, direct=kind is EntryKind.PART) as reader:
                self._put(BUNDLE_ENTRY.pack(kind, reader.size_bytes, name.encode("ascii")))
                left = reader.size_bytes
                while left:
                    data = bytes(reader.take(min(left, BUFFER_BYTES)))
                    self._put(data)
                    left -= len(data)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(what=what, problem="its file is missing") from error
        self._entries += 1

    def end(self) -> None:
        self._put(BUNDLE_ENTRY.pack(EntryKind.END, self._entries, self._digest.hexdigest().encode("ascii")))
