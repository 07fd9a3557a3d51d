"""Stores far away: a place of named objects to push sessions to and pull them from, such as a bucket or another disk.

Objects have the names and the content of the files of a store, and none of them changes once it is written:

    nodes/ID  manifests/HASH  parts/ab/cdef...    as in `format`
    points/ID                                     how to pull this node: a point document, replaced by a later push
    owners/SESSION/EPOCH                          who owns a session that was moved here (see `handover`)

A point is written last, so whatever can be named can be pulled. Objects that are there in their full size are not sent
again. What is pulled is verified like any bundle.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Protocol

from blake3 import blake3

from serai.checkpoints.errors import SessionGone, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.files.manifest import is_hash
from serai.checkpoints.files.streams import BUFFER_BYTES
from serai.checkpoints.format import DocumentKind, frame_document, unframe_document
from serai.checkpoints.moving.places import Place
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import (
    BUNDLE_ENTRY,
    BUNDLE_HEADER,
    BUNDLE_MAGIC,
    BUNDLE_VERSION,
    EntryKind,
    Moved,
    Stopped,
    go_on,
    never,
    parts_of,
    wanted,
)
from serai.checkpoints.names import check_id, is_id
from serai.checkpoints.store import Store


@dataclass(frozen=True, slots=True)
class _Point:
    """A node's path from the root on, the manifest of its nearest snapshot, and that one's parts, bases first."""

    path: tuple[str, ...]
    manifest: str | None
    parts: tuple[str, ...]

    def document(self) -> bytes:
        value = {"path": self.path, "manifest": self.manifest, "parts": self.parts}
        return frame_document(DocumentKind.POINT, jsonio.encode(value)).data


def push(store: Store, place: Place, node_id: str, stopped: Stopped = never) -> Moved:
    """Send a node, all it continues from and its nearest snapshot; only what the place lacks. One part is in memory.

    It is what there was at the beginning, whatever is erased or saved anew meanwhile.
    `TransferStopped` if it was called off; what was sent by then is found by the next push.
    """
    with store._holding("pushing") as pin:
        point = _local_point(store, node_id, pin)
        path, parts = point.path, point.parts
        folders = store._folders
        documents: list[tuple[str, Folder, str]] = [(f"nodes/{node}", folders.nodes, node) for node in path]
        if point.manifest is not None:
            documents.append((f"manifests/{point.manifest}", folders.manifests, point.manifest))
        sent = _send_parts(store, place, parts, stopped)
        bytes_sent = sum(sent)
        for name, folder, file in documents:
            data = _read(folder, file, name, stopped)
            if not place.existing({name: len(data)}):
                place.put(name, data)
                bytes_sent += len(data)
        data = point.document()
        go_on(stopped)
        place.put(f"points/{node_id}", data)
    states = int(point.manifest is not None)
    return Moved(node_id, len(path), states, len(sent), len(parts) - len(sent), bytes_sent + len(data))


def _local_point(store: Store, node_id: str, pin: Callable[[str], None]) -> _Point:
    """How to pull a node that this store holds; all that it names is pinned."""
    with store.reading_index() as index:  # all of it, or what is erased meanwhile would be missing in part only
        path, step = store.ancestry(node_id), store.nearest_snapshot(node_id)
        parts = parts_of(store, node_id)
        manifest = None if step is None or (row := index.snapshot(step)) is None else row.manifest
        for name in (*path, *parts, *([] if manifest is None else [manifest])):
            pin(name)
    return _Point(tuple(path), manifest, tuple(parts))


def _send_parts(store: Store, place: Place, parts: Sequence[str], stopped: Stopped) -> list[int]:
    sent = []
    for part in parts:
        name = _part_object(part)
        with store._files.folder.child(part[:2], create=False) as folder:
            data = _read(folder, part[2:], name, stopped)
        go_on(stopped)
        if not place.existing({name: len(data)}):
            place.put(name, data)
            sent.append(len(data))
    return sent


def _part_object(part: str) -> str:
    return f"parts/{part[:2]}/{part[2:]}"


def _read(folder: Folder, file: str, what: str, stopped: Stopped) -> bytes:
    """A whole file, once in memory; asks before each buffer of it."""
    try:
        with folder.reading(file, what) as reader, BytesIO() as whole:
            while (left := reader.size_bytes - whole.tell()) > 0:
                go_on(stopped)
                whole.write(reader.take(min(left, BUFFER_BYTES)))
            return whole.getvalue()  # shares its memory, where a join would be a copy
    except FileNotFoundError as error:
        raise SnapshotCorrupt(what=what, problem="its file is missing") from error


class Objects(Protocol):
    """Where objects are read from; a `Place` is one."""

    def get(self, name: str) -> bytes:
        """An object's bytes; `FileNotFoundError` if there is none."""
        ...


class StoreAsPlace:
    """Another store of this machine, read as if each of its nodes had been pushed to a place."""

    def __init__(self, store: Store, pin: Callable[[str], None], stopped: Stopped = never) -> None:
        """`pin` keeps all that a point names until it has been read; `stopped` calls reading off."""
        self._store = store
        self._pin = pin
        self._stopped = stopped

    def get(self, name: str) -> bytes:
        kind, _, rest = name.partition("/")
        folders = self._store._folders
        match kind:
            case "points":
                return _local_point(self._store, rest, self._pin).document()
            case "parts":
                with folders.parts.child(rest[:2], create=False) as folder:
                    return _read(folder, rest[3:], name, self._stopped)
            case "nodes":
                return _read(folders.nodes, rest, name, self._stopped)
            case _:
                return _read(folders.manifests, rest, name, self._stopped)


def pull(store: Store, place: Objects, node_id: str, stopped: Stopped = never) -> Moved:
    """Fetch a node that was pushed: only the parts the store lacks, all or nothing as by `import_bundle`.

    `SessionGone` if no such node was pushed there; `SnapshotCorrupt` if what is there is not what was pushed;
    `TransferStopped` if it was called off.
    """
    check_id(node_id, "node id")
    go_on(stopped)
    point = _point(place, node_id)
    return import_bundle(store, _Stream(_bundle(place, point, set(wanted(store, point.parts))), stopped), stopped)


def _point(place: Objects, node_id: str) -> _Point:
    what = f"the point of node {node_id}"
    try:
        data = place.get(f"points/{node_id}")
    except FileNotFoundError as error:
        raise SessionGone(name=node_id) from error
    value = jsonio.decode(unframe_document(data, DocumentKind.POINT, what).data, what)
    path, parts = jsonio.field(value, "path", list, what), jsonio.field(value, "parts", list, what)
    manifest = jsonio.optional_text(value, "manifest", what)
    names = [*parts, *([] if manifest is None else [manifest])]
    ids_right = all(isinstance(item, str) and is_id(item) for item in path) and path[-1:] == [node_id]
    if not ids_right or not all(isinstance(item, str) and is_hash(item) for item in names):
        raise SnapshotCorrupt(what=what, problem="it names things by something that is no id or hash")
    return _Point(tuple(path), manifest, tuple(parts))


def _bundle(place: Objects, point: _Point, chosen: set[str]) -> Iterator[bytes]:
    """The pieces of a bundle made of a place's objects."""
    objects = [(EntryKind.NODE, node, f"nodes/{node}") for node in point.path]
    if point.manifest is not None:
        objects.append((EntryKind.MANIFEST, point.manifest, f"manifests/{point.manifest}"))
    objects += [(EntryKind.PART, part, _part_object(part)) for part in point.parts if part in chosen]
    digest = blake3()
    for piece in _pieces(place, objects):
        digest.update(piece)
        yield piece
    yield BUNDLE_ENTRY.pack(EntryKind.END, len(objects), digest.hexdigest().encode("ascii"))


def _pieces(place: Objects, objects: list[tuple[EntryKind, str, str]]) -> Iterator[bytes]:
    yield BUNDLE_HEADER.pack(BUNDLE_MAGIC, BUNDLE_VERSION)
    for kind, name, path in objects:
        try:
            data = place.get(path)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(what=path, problem="it is missing where it was pushed to") from error
        yield BUNDLE_ENTRY.pack(kind, len(data), name.encode("ascii"))
        yield data


class _Stream:
    """Pieces, read like a file, and asked before each read whether that is called off."""

    def __init__(self, pieces: Iterator[bytes], stopped: Stopped) -> None:
        self._pieces = pieces
        self._stopped = stopped
        self._rest = memoryview(b"")

    def read(self, count: int, /) -> bytes:
        go_on(self._stopped)
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        data = bytes(self._rest[:count])
        self._rest = self._rest[count:]
        return data
