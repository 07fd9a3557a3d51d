"""Taking a bundle (see `transfer`) into a store: nothing of it is seen there before all of it has been verified."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
from blake3 import blake3

from serai.checkpoints import nodes
from serai.checkpoints.errors import FormatUnknown, PlaceFailed, SnapshotCorrupt, TransferBroken, TransferStopped
from serai.checkpoints.files import manifest
from serai.checkpoints.files.manifest import Manifest, part_specs
from serai.checkpoints.files.streams import BUFFER_BYTES
from serai.checkpoints.format import (
    MAX_DOCUMENT_BYTES,
    PART_HEADER_BYTES,
    DocumentKind,
    PartHeader,
    TensorSpec,
    unframe_document,
    unpack_part_header,
)
from serai.checkpoints.moving.transfer import (
    BUNDLE_ENTRY,
    BUNDLE_HEADER,
    BUNDLE_MAGIC,
    BUNDLE_VERSION,
    EntryKind,
    Moved,
    Source,
    Stopped,
    go_on,
    never,
)
from serai.checkpoints.names import is_id
from serai.checkpoints.nodes import StoredNode, chain_of
from serai.checkpoints.pins import SavedPart
from serai.checkpoints.store import Store

_WHAT = "the bundle"


def import_bundle(store: Store, source: Source, stopped: Stopped = never) -> Moved:
    """Take a bundle into a store: its nodes, and the snapshot if the store has no sound one for that node.

    All or nothing: `SnapshotCorrupt` or `FormatUnknown` if anything is not right, and then nothing is kept. After
    `TransferBroken` (the source ended early), `TransferStopped` or a Ctrl-C, or `PlaceFailed` (it can't be reached now)
    the parts that came whole are kept unseen, so that the next attempt need not bring them; `fsck` and `collect` remove
    them. The next attempt reads them, and asks `stopped` before each; what comes is for the source to end.
    """
    bundle = _Bundle(source)
    with store._holding("importing") as pin:
        arriving = _Arriving(store, bundle, pin, stopped)
        try:
            for kind, name, size_bytes in bundle.entries():
                arriving.take(kind, name, size_bytes)
            return arriving.commit()
        except (TransferBroken, TransferStopped, PlaceFailed, KeyboardInterrupt):
            raise
        except BaseException:
            store._shelf.discard(arriving.written)
            raise


class _Bundle:
    """A bundle read from front to back, its end verified."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._digest = blake3()
        self.read_bytes = 0

    def take(self, count: int) -> bytes:
        """Exactly the next `count` bytes; `TransferBroken` if the source ends first."""
        pieces, left = [], count
        while left:
            piece = self._source.read(min(left, BUFFER_BYTES))
            if not piece:
                raise TransferBroken(received_bytes=self.read_bytes + count - left)
            pieces.append(piece)
            left -= len(piece)
        data = b"".join(pieces)
        self._digest.update(data)
        self.read_bytes += count
        return data

    def pieces(self, count: int) -> Iterator[bytes]:
        """The next `count` bytes, a buffer at a time."""
        while count:
            data = self.take(min(count, BUFFER_BYTES))
            yield data
            count -= len(data)

    def entries(self) -> Iterator[tuple[EntryKind, str, int]]:
        """Kind, name and length of each entry; the caller takes its bytes before going on."""
        magic, version = BUNDLE_HEADER.unpack(self.take(BUNDLE_HEADER.size))
        if magic != BUNDLE_MAGIC:
            raise SnapshotCorrupt(what=_WHAT, problem="it does not begin like one")
        if not 1 <= version <= BUNDLE_VERSION:
            raise FormatUnknown(what=_WHAT, found=version, supported=f"1 to {BUNDLE_VERSION}")
        count = 0
        while True:
            digest = self._digest.hexdigest()
            number, size_bytes, name = BUNDLE_ENTRY.unpack(self.take(BUNDLE_ENTRY.size))
            text = name.rstrip(b"\0").decode("ascii", "replace")
            if number == EntryKind.END:
                if size_bytes != count or text != digest:
                    raise SnapshotCorrupt(what=_WHAT, problem="its end does not match what came before")
                return
            try:
                kind = EntryKind(number)
            except ValueError as error:
                raise FormatUnknown(what=_WHAT, found=f"entry kind {number}", supported="kinds 0 to 3") from error
            yield kind, text, size_bytes
            count += 1


class _Arriving:
    """What has come of a bundle so far."""

    def __init__(self, store: Store, bundle: _Bundle, pin: Callable[[str], None], stopped: Stopped) -> None:
        self._store = store
        self._bundle = bundle
        self._pin = pin
        self._stopped = stopped
        self._nodes: dict[str, StoredNode] = {}
        self._manifests: list[Manifest] = []
        self._specs: dict[str, tuple[TensorSpec, ...]] = {}
        self.written: list[str] = []
        self._left: set[str] = set()  # those among them that an attempt before had brought

    def take(self, kind: EntryKind, name: str, size_bytes: int) -> None:
        """Take one entry; `SnapshotCorrupt` if it is not what its name says or does not belong here."""
        match kind:
            case EntryKind.NODE:
                self._take_node(name, self._document(size_bytes))
            case EntryKind.MANIFEST:
                self._take_manifest(name, self._document(size_bytes))
            case EntryKind.PART:
                self._take_part(name, size_bytes)
            case EntryKind.END:
                raise AssertionError("the end is no entry")

    def _document(self, size_bytes: int) -> bytes:
        if size_bytes > MAX_DOCUMENT_BYTES:
            raise SnapshotCorrupt(what=_WHAT, problem=f"it claims a document of {size_bytes} bytes")
        return self._bundle.take(size_bytes)

    def _take_node(self, name: str, data: bytes) -> None:
        what = f"node {name!r}"
        if not is_id(name):
            raise SnapshotCorrupt(what=what, problem="its name is no id")
        stored = nodes.decode(unframe_document(data, DocumentKind.NODE, what).data, what)
        node = stored.node
        start, before, inexact = (0, "", False) if node.parent_id is None else self._end_of(node.parent_id, what)
        ends_right = stored.chain == chain_of(before, node.tokens) and node.position == start + len(node.tokens)
        if node.id != name or not ends_right:
            raise SnapshotCorrupt(what=what, problem="it does not continue its parent")
        if inexact and not node.inexact:
            raise SnapshotCorrupt(what=what, problem="it says that it is exact, and its parent is inexact")
        self._nodes[name] = stored

    def _end_of(self, node_id: str, what: str) -> tuple[int, str, bool]:
        """Position and chain of a node that came before, or that the store has, and whether it is inexact."""
        if (stored := self._nodes.get(node_id)) is not None:
            return stored.node.position, stored.chain, stored.node.inexact
        with self._store.reading_index() as index:
            row = index.node(node_id)
        if row is None:
            raise SnapshotCorrupt(what=what, problem=f"its parent {node_id} is neither in the bundle nor in the store")
        return row.position, row.chain, row.inexact

    def _take_manifest(self, name: str, data: bytes) -> None:
        what = f"manifest {name!r}"
        document = unframe_document(data, DocumentKind.MANIFEST, what)
        entry = manifest.decode(document.data, what)
        node = self._nodes.get(entry.node_id)
        if document.hash != name or node is None or node.chain != entry.chain or node.node.position != entry.position:
            raise SnapshotCorrupt(what=what, problem="it belongs to no node of the bundle")
        self._manifests.append(entry)
        self._specs.update(zip(entry.parts, part_specs(entry), strict=True))

    def _take_part(self, name: str, size_bytes: int) -> None:
        what = f"part {name!r}"
        if not self._manifests or not manifest.is_hash(name):
            raise SnapshotCorrupt(what=what, problem="it belongs to no manifest of the bundle")
        if size_bytes < PART_HEADER_BYTES:
            raise SnapshotCorrupt(
                what=what, problem=f"it has {size_bytes} bytes and a header takes {PART_HEADER_BYTES}"
            )
        first = self._bundle.take(PART_HEADER_BYTES)
        specs = self._specs_of(name, unpack_part_header(first, size_bytes, what), what)
        pieces = chain([first], self._bundle.pieces(size_bytes - PART_HEADER_BYTES))
        shelf, files = self._store._shelf, self._store._files
        if shelf.found(name, self._pin) is not None:
            for _ in pieces:  # came all the same; passed over
                pass
            return
        temporary = files.receive(name, specs, pieces, size_bytes)
        with shelf.stripe(name):
            if shelf.found(name, self._pin) is not None:
                self._store._folders.temporary.remove(temporary)
                return
            files.publish(temporary, name)
            self.written.append(name)
            self._adopt(name)

    def _specs_of(self, name: str, head: PartHeader, what: str) -> tuple[TensorSpec, ...]:
        """The tensors a part must hold. One no manifest names can only be a base, with the tensors of its delta."""
        found = self._specs.get(name)
        if found is None:
            states = {specs for entry in self._manifests for specs in part_specs(entry)[: len(entry.state)]}
            found = next((specs for specs in states if manifest.raw_bytes_of(specs) == head.raw_bytes), None)
        if found is None or manifest.raw_bytes_of(found) != head.raw_bytes or head.stored_bytes > head.raw_bytes:
            raise SnapshotCorrupt(what=what, problem=f"its {head.raw_bytes} bytes belong to no manifest of the bundle")
        return found

    def _adopt(self, name: str) -> SavedPart:
        """Take note of a part whose verified file is in its place."""
        self._pin(name)
        head = self._store._files.head(name)
        if head is None:
            raise SnapshotCorrupt(what=f"part {name}", problem="its file has gone")
        base = None if head.base is None else self._store._shelf.found(head.base, self._pin)
        return self._store._shelf.note_written(head, None if base is None else base.row)

    def commit(self) -> Moved:
        """Make what came visible: nodes, then snapshots."""
        saved = {entry.node_id: self._saved_parts(entry) for entry in self._manifests}
        used = {name for parts in saved.values() for part in parts for name in (part.row.hash, part.row.base) if name}
        self._store._shelf.settle_all(used.union(self.written))
        recorded: list[str] = []
        try:
            new = [stored.node for stored in self._nodes.values() if self._is_new(stored)]
            self._store.record(*new)  # at once: of a session that a kill cut short somebody would go on half way
            recorded = [node.id for node in new]
            taken = [entry for entry in self._manifests if not self._store.has_snapshot(entry.node_id)]
            for entry in taken:
                self._store._commit(entry, saved[entry.node_id])
        except BaseException:
            for node_id in reversed(recorded):
                self._store.delete(node_id)
            raise
        self._store._shelf.discard(name for name in self.written if name not in used or not taken)
        came = set(self.written) - self._left
        return Moved(
            node_id=next(reversed(self._nodes), ""),
            nodes=len(recorded),
            snapshots=len(taken),
            parts=len(came),
            parts_had=len(self._left.union(*(entry.parts for entry in self._manifests)) - came),
            bytes=self._bundle.read_bytes,
        )

    def _is_new(self, stored: StoredNode) -> bool:
        with self._store.reading_index() as index:
            row = index.node(stored.node.id)
        if row is not None and row.chain != stored.chain:
            raise SnapshotCorrupt(what=f"node {row.id}", problem="the store has another node of this id")
        if row is not None and row.inexact != stored.node.inexact:
            here, there = ("inexact", "exact") if row.inexact else ("exact", "inexact")
            problem = f"it says that it is {there}, and the store has it as {here}"
            raise SnapshotCorrupt(what=f"node {row.id}", problem=problem)
        return row is None

    def _saved_parts(self, entry: Manifest) -> list[SavedPart]:
        return [self._saved_part(name, specs) for name, specs in zip(entry.parts, part_specs(entry), strict=True)]

    def _saved_part(self, name: str, specs: tuple[TensorSpec, ...]) -> SavedPart:
        """A part the snapshot needs: just come, in the store, or left by a broken transfer and verified now."""
        found = self._store._shelf.found(name, self._pin)
        if found is None:
            go_on(self._stopped)
            self._store._files.read(name, specs, [np.empty(spec.size_bytes, np.uint8) for spec in specs])
            head = self._store._files.head(name)
            if head is not None and head.base is not None:
                self._saved_part(head.base, specs)
            with self._store._shelf.stripe(name):
                found = self._adopt(name)
            self.written.append(name)
            self._left.add(name)
        return replace(found, is_new=name in self.written)
