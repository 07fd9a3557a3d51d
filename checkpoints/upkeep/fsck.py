"""Checking a store against its files, removing what nobody owns, and rebuilding the index from the files alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from serai.checkpoints import nodes
from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt
from serai.checkpoints.files import jsonio, manifest
from serai.checkpoints.files.disk import Disk, mapped
from serai.checkpoints.files.folders import Folder
from serai.checkpoints.files.manifest import Manifest, part_bytes, part_specs
from serai.checkpoints.files.parts import DTYPES, PartFiles
from serai.checkpoints.format import DocumentKind, part_file_bytes, read_document
from serai.checkpoints.index import Index
from serai.checkpoints.names import is_id
from serai.checkpoints.nodes import StoredNode, chain_of
from serai.checkpoints.opening import INDEX_NAME, NEW_INDEX_NAME, OpenFolders, open_folders
from serai.checkpoints.rows import NodeRow, PartRow, SnapshotRow
from serai.checkpoints.store import Store


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was found: `problems` are sentences about damage, `orphans` names of files that belong to nothing."""

    nodes: int
    snapshots: int
    parts: int
    problems: tuple[str, ...]
    orphans: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.problems


def fsck(store: Store, *, remove_orphans: bool = True) -> FsckReport:
    """Read every file of an open store and compare it with the index and its own hash.

    Parts found damaged are noted, so that their snapshots are not used and the next save of the same content writes
    them anew. Orphans (of saves that were killed) are removed. Other work on the store may go on meanwhile.
    """
    problems: list[str] = []
    with store._doing("checking it"):
        with store._index.lock:
            node_rows, snapshot_rows = store._index.nodes(), store._index.snapshots()
            tags, tag_files = store._index.tags(), store._index.tag_files()
        for row in node_rows:
            with _noted(problems):
                store._stored_node(row.id)
        for row in node_rows:
            if not store._index.children(row.id):
                with _noted(problems):
                    store.path(row.id)
        verified: set[str] = set()
        for snapshot in snapshot_rows:
            with _noted(problems):
                _check_snapshot(store, snapshot.node, verified, problems)
        for tag, node in tags.items():
            with _noted(problems):
                _check_tag(store._folders.tags, tag_files[tag], tag, node)
        orphans = tuple(remove_unowned(store, keep=not remove_orphans))
    return FsckReport(len(node_rows), len(snapshot_rows), len(verified), tuple(dict.fromkeys(problems)), orphans)


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except (SnapshotCorrupt, FormatUnknown) as error:
        problems.append(str(error))


def _check_snapshot(store: Store, node_id: str, verified: set[str], problems: list[str]) -> None:
    with store._holding("verifying a snapshot") as pin:
        with store._index.lock:
            if store._index.snapshot(node_id) is None:
                return  # erased since the list was made
            entry = store._manifest(node_id)
            for name in entry.parts:
                pin(name)
        for name, specs in zip(entry.parts, part_specs(entry), strict=True):
            if name not in verified:
                verified.add(name)
                with _noted(problems), store._shelf.noting_damage(name):
                    store._files.read(name, specs, [np.empty(spec.shape, DTYPES[spec.type]) for spec in specs])


def _check_tag(folder: Folder, file: str, tag: str, node: str) -> None:
    what = f"the tag {tag!r}"
    try:
        with folder.reading(file, what) as reader:
            value = jsonio.decode(read_document(reader, DocumentKind.TAG).data, what)
    except FileNotFoundError as error:
        raise SnapshotCorrupt(what=what, problem="its file is missing") from error
    if (value.get("tag"), value.get("node")) != (tag, node):
        raise SnapshotCorrupt(what=what, problem="its file says otherwise than the index")


def remove_unowned(store: Store, *, keep: bool = False) -> list[str]:
    """Remove the files no row stands for and no running call counts on, and name them; with `keep` only name them."""
    with store._doing("removing unowned files"), store._index.lock:
        index, folders = store._index, store._folders
        owned_nodes = {row.id for row in index.nodes()}
        owned_manifests = {row.manifest for row in index.snapshots()}
        owned_tags = set(index.tag_files().values())
        found = []
        for folder, kind, owned in (
            (folders.nodes, "nodes", owned_nodes),
            (folders.manifests, "manifests", owned_manifests),
            (folders.tags, "tags", owned_tags),
        ):
            strange = [name for name in folder.names() if name not in owned and not store._pins.count(name)]
            for name in strange if not keep else ():
                folder.remove(name)
            found += [f"{kind}/{name}" for name in strange]
        owned_parts = {row.hash for row in index.parts()}
        strange = [name for name in store._files.names() if name not in owned_parts and not store._pins.count(name)]
        if not keep:
            store._files.remove(strange)
        return found + [f"parts/{name[:2]}/{name[2:]}" for name in strange]


def rebuild(path: str, *, disk: Disk | None = None) -> FsckReport:
    """Make the index of the closed store at `path` anew from its other files.

    Nodes whose ancestors are lost, and snapshots with missing parts, are left out and named in the report; their files
    stay until an `fsck` removes them. Of several snapshots of a node the latest complete one is taken. When each was
    last used only the index knew, and that is forgotten. `StoreBusy` if it is open.
    """
    disk = disk or Disk()
    try:
        folders = open_folders(path, disk, create=False, needs_index=False)
    except OSError as error:
        raise mapped(error, path=path, doing="opening it") from error
    try:
        _remove_index(folders.root, NEW_INDEX_NAME)  # of a rebuild that was killed
        (Path(folders.path) / NEW_INDEX_NAME).touch(0o600, exist_ok=False)
        index = Index(f"{folders.path}/{NEW_INDEX_NAME}", may_begin=True, disk=disk)
        try:
            report = _fill(index, folders)
        finally:
            index.close()
        _remove_index(folders.root, INDEX_NAME)
        disk.rename(NEW_INDEX_NAME, INDEX_NAME, folder=folders.root.fd, new_folder=folders.root.fd)
        folders.root.sync()
    except OSError as error:
        raise mapped(error, path=path, doing="rebuilding its index") from error
    finally:
        folders.close()
    return report


def _remove_index(root: Folder, name: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        root.remove(f"{name}{suffix}")


def _fill(index: Index, folders: OpenFolders) -> FsckReport:
    problems: list[str] = []
    chains: dict[str, NodeRow] = {}
    with index.change():
        for stored, file_bytes in sorted(_all_nodes(folders.nodes, problems), key=_place):
            with _noted(problems):
                row = _node_row(stored, file_bytes, chains)
                row = replace(row, sequence=max(row.sequence, index.next_sequence()))
                index.add_node(row)
                chains[row.id] = row
        files = PartFiles(folders.parts, folders.temporary, direct=True)
        complete: dict[str, tuple[SnapshotRow, list[PartRow]]] = {}
        for entry, name, file_bytes in _all_manifests(folders.manifests, problems):
            with _noted(problems):
                parts = _part_rows(entry, files, chains)
                former, found = complete.get(entry.node_id), _snapshot_row(entry, name, file_bytes)
                if former is None or _age(former[0]) < _age(found):
                    complete[entry.node_id] = (found, parts)
        for snapshot, parts in sorted(complete.values(), key=lambda found: found[0].created_s):
            index.add_snapshot(snapshot, written=parts, shared=())
        tags: dict[str, _Tag] = {}
        for tag in _all_tags(folders.tags, problems):
            if tag.tag not in tags or tags[tag.tag].set_s < tag.set_s:  # the other was to be unlinked
                tags[tag.tag] = tag
        for tag in tags.values():
            with _noted(problems):
                if tag.node not in chains:
                    raise SnapshotCorrupt(what=f"the tag {tag.tag!r}", problem=f"its node {tag.node} is lost")
                index.set_tag(tag.tag, tag.node, tag.file, tag.file_bytes)
    used = len(index.parts())
    return FsckReport(len(chains), len(complete), used, tuple(problems), ())


def _all_nodes(folder: Folder, problems: list[str]) -> Iterator[tuple[StoredNode, int]]:
    for name in folder.names():
        what = f"node {name}"
        with _noted(problems):
            if not is_id(name):
                raise SnapshotCorrupt(what=what, problem="its file's name is no id")
            with folder.reading(name, what) as reader:
                stored = nodes.decode(read_document(reader, DocumentKind.NODE).data, what)
            if stored.node.id != name:
                raise SnapshotCorrupt(what=what, problem=f"its file holds node {stored.node.id}")
            yield stored, reader.size_bytes


def _place(found: tuple[StoredNode, int]) -> tuple[int, float]:
    """Orders the nodes of a store. Two have one number when a kill kept the first from being committed."""
    return found[0].sequence, found[0].node.created_s


def _node_row(stored: StoredNode, file_bytes: int, found: dict[str, NodeRow]) -> NodeRow:
    node, what = stored.node, f"node {stored.node.id}"
    parent = None if node.parent_id is None else found.get(node.parent_id)
    if node.parent_id is not None and parent is None:
        raise SnapshotCorrupt(what=what, problem=f"its parent {node.parent_id} is lost")
    start, chain = (0, "") if parent is None else (parent.position, parent.chain)
    if stored.chain != chain_of(chain, node.tokens) or node.position != start + len(node.tokens):
        raise SnapshotCorrupt(what=what, problem="its token ids do not continue its parent's")
    return nodes.row_of(node, sequence=stored.sequence, chain=stored.chain, file_bytes=file_bytes)


def _all_manifests(folder: Folder, problems: list[str]) -> Iterator[tuple[Manifest, str, int]]:
    for name in folder.names():
        what = f"manifest {name}"
        with _noted(problems):
            with folder.reading(name, what) as reader:
                document = read_document(reader, DocumentKind.MANIFEST)
            if document.hash != name:
                raise SnapshotCorrupt(what=what, problem=f"its file holds manifest {document.hash}")
            yield manifest.decode(document.data, what), name, reader.size_bytes


def _part_rows(entry: Manifest, files: PartFiles, found: dict[str, NodeRow]) -> list[PartRow]:
    """Rows of all parts a snapshot needs, bases included; `SnapshotCorrupt` if one is missing or of another size."""
    what = f"the snapshot of node {entry.node_id}"
    node = found.get(entry.node_id)
    if node is None or node.chain != entry.chain or node.position != entry.position:
        raise SnapshotCorrupt(what=what, problem="its node is lost or another")
    rows: dict[str, PartRow] = {}
    wanted = list(zip(entry.parts, part_bytes(entry), strict=True))
    for name, raw_bytes in wanted:  # grows by the bases found on the way
        head = files.head(name) if name not in rows else None
        if name in rows:
            continue
        if head is None or head.raw_bytes != raw_bytes:
            raise SnapshotCorrupt(what=what, problem=f"its part {name} is missing or of another size")
        rows[name] = PartRow(name, raw_bytes, part_file_bytes(head.stored_bytes), head.base)
        if head.base is not None:
            wanted.append((head.base, raw_bytes))
    return list(rows.values())


def _snapshot_row(entry: Manifest, name: str, file_bytes: int) -> SnapshotRow:
    return SnapshotRow(
        node=entry.node_id,
        manifest=name,
        position=entry.position,
        raw_bytes=entry.raw_bytes,
        reason=entry.reason,
        lossy=entry.storage.lossy,
        created_s=entry.created_s,
        used_s=entry.created_s,
        file_bytes=file_bytes,
        set_aside=entry.set_aside,
    )


def _age(row: SnapshotRow) -> tuple[float, bool]:
    """Orders the manifests of one node; that of a snapshot that was set aside took the place of one made as early."""
    return row.created_s, row.set_aside is not None


@dataclass(frozen=True, slots=True)
class _Tag:
    tag: str
    node: str
    set_s: float
    file: str
    file_bytes: int


def _all_tags(folder: Folder, problems: list[str]) -> Iterator[_Tag]:
    for name in folder.names():
        what = f"tag file {name}"
        with _noted(problems):
            with folder.reading(name, what) as reader:
                document = read_document(reader, DocumentKind.TAG)
            if document.hash != name:
                raise SnapshotCorrupt(what=what, problem=f"its file holds tag {document.hash}")
            value = jsonio.decode(document.data, what)
            tag, node = jsonio.field(value, "tag", str, what), jsonio.field(value, "node", str, what)
            yield _Tag(tag, node, jsonio.field(value, "set_s", float, what), name, reader.size_bytes)
