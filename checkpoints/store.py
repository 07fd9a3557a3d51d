"""The store: nodes, snapshots and tags that outlive the process. Synchronous, and safe from any thread."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from serai.checkpoints.errors import (
    FormatUnknown,
    ModelMismatch,
    NodeInUse,
    SessionGone,
    SnapshotCorrupt,
    SnapshotMissing,
)
from serai.checkpoints.files import manifest
from serai.checkpoints.files.codec import Packing
from serai.checkpoints.files.disk import Disk, ReadOnlyDisk, mapped
from serai.checkpoints.files.manifest import (
    LOSSLESS,
    Manifest,
    Storage,
    latents_stored_as,
    layers_per_part,
    logits_specs,
    page_specs,
    state_parts,
    state_specs,
)
from serai.checkpoints.format import MAX_PART_BYTES, Document, DocumentKind, frame_document, read_document
from serai.checkpoints.pins import SavedPart
from serai.checkpoints.reports import IN_BACKGROUND, Erased, SaveReport, Sizes, SnapshotInfo
from serai.checkpoints.rows import FileKind, NodeRow, SnapshotRow
from serai.checkpoints.saving import Allocate
from serai.checkpoints.snapshot import Fingerprint, Snapshot, new_snapshot
from serai.checkpoints.tree import Tree

# One more than that are waiting for the disk while another hashes what it has brought: with four, a disk of 2 GB/s
# stood still now and then.
DEFAULT_THREADS: Final = 6


class Store(Tree):
    """An open store folder, held by this process alone until `close`."""

    @classmethod
    def open(
        cls,
        path: str,
        *,
        create: bool = True,
        read_only: bool = False,
        disk: Disk | None = None,
        threads: int = DEFAULT_THREADS,
        keep_cached: bool = False,
        now: Callable[[], float] = time.time,
    ) -> "Store":
        """Open the store in the folder `path`, making it unless `create` is false.

        `threads` parts are packed at a time, each taking up to three times its size in memory, and twice as many read,
        of which those that are not packed go straight into the state. Part files are
        dropped from the page cache after use unless `keep_cached`. `StoreBusy` names the process that has it open;
        `StoreInvalid` says why the folder cannot be used.
        """
        try:
            return cls(
                path,
                disk=disk or (ReadOnlyDisk() if read_only else Disk()),
                create=create and not read_only,
                read_only=read_only,
                threads=threads,
                keep_cached=keep_cached,
                now=now,
            )
        except OSError as error:
            raise mapped(error, path=path, doing="opening it") from error

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(
        self,
        node_id: str,
        snapshot: Snapshot,
        fingerprint: Fingerprint,
        *,
        reason: str,
        storage: Storage = LOSSLESS,
        packing: Packing = Packing.AUTO,
    ) -> SaveReport:
        """Keep a node's state. Durable when it returns; until then, and if it fails, the node's former snapshot stays.
        One that replaces another `IN_BACKGROUND` keeps the reason for which that was made.

        Parts the store holds already are not written again. The arrays must not be written to meanwhile. `SessionGone`
        for an unknown node, ValueError if the snapshot is of another position, or inexact where the node isn't (what is
        exact there must never give way to it), `StoreFull` without room.
        """
        started_s = time.perf_counter()
        with self._holding(f"saving node {node_id}") as pin, self._settled_before() as settled:
            row = self._row(node_id)
            storage = replace(storage, latents=latents_stored_as(snapshot.layout, storage))  # as they will be kept
            _check_fits(row, snapshot, storage)
            bases = self._bases(row, snapshot, storage) if packing is Packing.SMALL else ()
            created_s = self._now()

            def entry_of(parts: list[SavedPart]) -> Manifest:
                hashes = tuple(part.row.hash for part in parts)
                return _entry(row, snapshot, fingerprint, storage, hashes, reason=reason, created_s=created_s)

            def settle_manifest(parts: list[SavedPart]) -> None:
                _, document = self._manifest_file(entry_of(parts))
                settled[document.hash] = self._write_temporary(document.data)

            saved = self._shelf.put(
                snapshot, storage, packing, pin, bases, namespace=row.namespace, meanwhile=settle_manifest
            )
            new = {part.row.hash: part.row.file_bytes for part in saved if part.is_new}
            try:
                manifest_bytes = self._commit(entry_of(saved), saved, settled)
            except BaseException:
                self._shelf.discard(new)
                raise
        return SaveReport(
            raw_bytes=snapshot.size_bytes,
            new_raw_bytes=sum(part.row.raw_bytes for part in saved if part.is_new),
            written_bytes=sum(new.values()) + manifest_bytes,
            parts_new=len(new),
            parts_shared=len({part.row.hash for part in saved}) - len(new),
            elapsed_s=time.perf_counter() - started_s,
        )

    def _bases(self, row: NodeRow, snapshot: Snapshot, storage: Storage) -> tuple[str, ...]:
        """The parts of the nearest stored ancestor's KDA state, if it is of the same shapes and types."""
        with self._index.lock:
            step = None if row.parent is None else self.nearest_snapshot(row.parent)
            try:
                before = None if step is None else self._manifest(step)
            except (SnapshotCorrupt, FormatUnknown):
                return ()  # whoever loads it is told; this save does without
        fits = before is not None and before.layout == snapshot.layout and before.storage.state is storage.state
        return before.state if before is not None and fits else ()

    def _manifest_file(self, entry: Manifest) -> tuple[Manifest, Document]:
        """The manifest as it is to be written now, and its file."""
        former = self._index.snapshot(entry.node_id)
        if former is not None and entry.reason == IN_BACKGROUND:
            entry = replace(entry, reason=former.reason)  # what somebody has asked for stays asked for
        return entry, frame_document(DocumentKind.MANIFEST, manifest.encode(entry))

    def _commit(self, entry: Manifest, parts: list[SavedPart], settled: dict[str, str] | None = None) -> int:
        """Write the manifest, unless it is `settled` (see `_settled_before`), and make the snapshot visible; the
        manifest's bytes."""
        with self._index.lock:
            self._row(entry.node_id)  # it may have been erased meanwhile
            former = self._index.snapshot(entry.node_id)
            entry, document = self._manifest_file(entry)
            if former is not None and former.manifest == document.hash and former.set_aside is None:
                return 0
            self._write_file(document.data, self._folders.manifests, document.hash, settled)
            row = SnapshotRow(
                node=entry.node_id,
                manifest=document.hash,
                position=entry.position,
                raw_bytes=entry.raw_bytes,
                reason=entry.reason,
                lossy=entry.storage.lossy,
                created_s=entry.created_s,
                used_s=entry.created_s,
                file_bytes=len(document.data),
                set_aside=entry.set_aside,
            )
            with self._taking_back(self._folders.manifests, document.hash), self._index.change():
                self._index.add_snapshot(
                    row,
                    written=[self._pins.placed.get(part.row.hash, part.row) for part in parts if part.is_new],
                    shared=[part.row for part in parts if not part.is_new] + [part.base for part in parts if part.base],
                )
        return len(document.data)

    def load(
        self, node_id: str, fingerprint: Fingerprint | None = None, *, allocate: Allocate = new_snapshot
    ) -> Snapshot:
        """A node's state, every byte verified: all of it or an error, and nothing else changes.

        With `fingerprint`, `ModelMismatch` names the model fields in which it differs from the stored one; None is the
        explicit override. That `build` or `simd` differ is for the caller to see in `snapshot_info` and to decide upon;
        what is given then is `inexact`, as is what was stored so.
        `allocate(layout, position)` may give arrays of the caller's own to fill, as a snapshot of anything; after an
        error their content is nothing. `SessionGone` for an unknown node, `SnapshotMissing` without a snapshot,
        `SnapshotCorrupt` or `FormatUnknown` if it cannot be read.
        """
        with self._holding(f"loading node {node_id}") as pin:
            with self._index.lock:
                entry = self._manifest(node_id)
                for name in entry.parts:
                    pin(name)
                info = self._info(entry)
            if fingerprint is not None:
                require_same_model(node_id, entry.fingerprint, fingerprint)
            snapshot = self._shelf.get(entry, allocate)
            self._index.note(lambda: self._index.touch(node_id, self._now()))
        # By the manifest that was read, which need not be the one that somebody looked at before.
        return replace(snapshot, inexact=not info.is_exact_for(fingerprint or info.fingerprint))

    def _manifest(self, node_id: str) -> Manifest:
        node = self._row(node_id)
        row = self._index.snapshot(node_id)
        if row is None:
            raise SnapshotMissing(node_id=node_id)
        what = f"the snapshot of node {node_id}"
        if row.set_aside is not None:
            raise SnapshotCorrupt(what=what, problem=f"it was set aside ({row.set_aside})")
        try:
            with self._folders.manifests.reading(row.manifest, what) as reader:
                document = read_document(reader, DocumentKind.MANIFEST)
        except FileNotFoundError as error:
            raise SnapshotCorrupt(what=what, problem="its manifest is missing") from error
        entry = manifest.decode(document.data, what)
        if (
            document.hash != row.manifest
            or entry.node_id != node_id
            or entry.position != node.position
            or entry.chain != node.chain
        ):
            raise SnapshotCorrupt(
                what=what, problem=f"its manifest belongs to node {entry.node_id} at position {entry.position}"
            )
        return entry

    def snapshot_info(self, node_id: str) -> SnapshotInfo:
        """What `load` would load: position, fingerprint, layout, size. Errors as there."""
        with self._doing("reading a manifest"), self._index.lock:
            return self._info(self._manifest(node_id))

    def _info(self, entry: Manifest) -> SnapshotInfo:
        return SnapshotInfo(
            node_id=entry.node_id,
            position=entry.position,
            fingerprint=entry.fingerprint,
            layout=entry.layout,
            storage=entry.storage,
            raw_bytes=entry.raw_bytes,
            reason=entry.reason,
            created_s=entry.created_s,
            inexact=entry.inexact or entry.storage.lossy or self._row(entry.node_id).inexact,
        )

    def snapshots(self) -> list[SnapshotInfo]:
        """Every snapshot that, as far as is known, can be loaded; one whose manifest is damaged is left out."""
        with self._doing("reading the index"), self._index.lock:
            names = [row.node for row in self._index.snapshots() if self._index.usable(row.node)]
        found = []
        for name in names:
            with suppress(SnapshotCorrupt, SnapshotMissing, FormatUnknown):
                found.append(self.snapshot_info(name))
        return found

    def has_snapshot(self, node_id: str) -> bool:
        """Whether a node has a snapshot that, as far as is known, can be loaded."""
        with self._doing("reading the index"), self._index.lock:
            return self._index.usable(self._row(node_id).id)

    def nearest_snapshot(self, node_id: str) -> str | None:
        """The node itself or its nearest ancestor that has a loadable snapshot, or None."""
        with self._doing("reading the index"), self._index.lock:
            row: NodeRow | None = self._row(node_id)
            while row is not None and not self._index.usable(row.id):
                row = None if row.parent is None else self._row(row.parent)
            return None if row is None else row.id

    def set_aside(self, node_id: str, why: str) -> None:
        """Keep a node's snapshot for inspection but never load it again, for one that failed at its first use."""
        with self._doing("setting a snapshot aside"), self._index.lock:
            row = self._index.snapshot(self._row(node_id).id)
            if row is None or row.set_aside is not None:
                return
            try:
                body = manifest.encode(replace(self._manifest(node_id), set_aside=why))
            except (SnapshotCorrupt, FormatUnknown):  # of such a manifest an index that is rebuilt knows as much
                with self._index.change():
                    self._index.set_aside(row, why, row.manifest, row.file_bytes)
                return
            document = frame_document(DocumentKind.MANIFEST, body)
            self._write_file(document.data, self._folders.manifests, document.hash)
            with self._taking_back(self._folders.manifests, document.hash), self._index.change():
                self._index.set_aside(row, why, document.hash, len(document.data))
            self._sweep_if_possible()

    # erasing

    def drop_snapshot(self, node_id: str) -> Erased:
        """Erase a node's snapshot with the parts no other uses; the node and its token ids stay."""
        return self._erase("erasing a snapshot", lambda: self._index.remove_snapshot(self._row(node_id).id))

    def delete(self, node_id: str) -> Erased:
        """Erase a node: its token ids, its snapshot with the parts no other uses, and its tags. `NodeInUse` if it has
        children.
        """

        def remove() -> Erased:
            children = self._index.children(self._row(node_id).id)
            if children:
                raise NodeInUse(node_id=node_id, children=len(children))
            return self._index.remove_node(node_id)

        return self._erase("erasing a node", remove)

    def delete_session(self, session_id: str) -> Erased:
        """Erase a session: each of its nodes that no other session continues from; of the others the snapshots. Asking
        again while nothing more can go costs a look at the index.
        """
        with self._doing("erasing a session"), self._index.lock:
            rows = self._index.nodes(session_id)
            if rows and all(self._index.children(row.id) and self._index.snapshot(row.id) is None for row in rows):
                self._sweep_if_possible()  # of files that could not go then
                return Erased()

        def remove() -> Erased:
            rows = self._index.nodes(session_id)
            if not rows:
                raise SessionGone(name=session_id)
            gone = Erased()
            for row in reversed(rows):  # children are younger than their parents
                if self._index.children(row.id):
                    gone += self._index.remove_snapshot(row.id)
                else:
                    gone += self._index.remove_node(row.id)
            return gone

        return self._erase("erasing a session", remove)

    def _erase(self, doing: str, remove: Callable[[], Erased]) -> Erased:
        """Have `remove` take rows away in one transaction, then unlink their files; what has gone."""
        with self._doing(doing), self._index.lock:
            with self._index.change():
                gone = remove()
            self._sweep()
        return gone

    def sizes(self) -> Sizes:
        """How much the store holds."""
        with self._doing("reading the index"), self._index.lock:
            files, counts = self._index.file_bytes(), self._index.counts()
        return Sizes(
            sessions=counts.sessions,
            nodes=counts.nodes,
            snapshots=counts.snapshots,
            parts=counts.parts,
            node_bytes=files[FileKind.NODE],
            manifest_bytes=files[FileKind.MANIFEST],
            part_bytes=files[FileKind.PART],
            tag_bytes=files[FileKind.TAG],
            unpacked_bytes=counts.unpacked_bytes,
        )


def _check_fits(row: NodeRow, snapshot: Snapshot, storage: Storage) -> None:
    if snapshot.position != row.position:
        raise ValueError(f"node {row.id} is at position {row.position}, the snapshot at {snapshot.position}")
    if snapshot.inexact and not row.inexact:
        raise ValueError(f"the snapshot is inexact, so it can't be that of node {row.id}, which is not")
    layout = snapshot.layout
    state = state_specs(layout, storage, min(layers_per_part(layout), layout.kda_shape[0]))
    for specs in (state, page_specs(layout, storage, layout.page_tokens), logits_specs(layout)):
        largest = sum(spec.size_bytes for spec in specs)
        if largest > MAX_PART_BYTES:
            raise ValueError(f"a part of this layout takes {largest} bytes and {MAX_PART_BYTES} are allowed: {layout}")


def _entry(
    row: NodeRow,
    snapshot: Snapshot,
    fingerprint: Fingerprint,
    storage: Storage,
    hashes: tuple[str, ...],
    *,
    reason: str,
    created_s: float,
) -> Manifest:
    """The manifest of a snapshot whose parts have these hashes."""
    states, pages = state_parts(snapshot.layout), len(snapshot.pages)
    return Manifest(
        node_id=row.id,
        parent_id=row.parent,
        position=row.position,
        chain=row.chain,
        reason=reason,
        created_s=created_s,
        fingerprint=fingerprint,
        layout=snapshot.layout,
        storage=storage,
        state=hashes[:states],
        pages=hashes[states : states + pages],
        logits=None if snapshot.logits is None else hashes[-1],
        inexact=snapshot.inexact,
    )


def require_same_model(node_id: str, stored: Fingerprint, running: Fingerprint) -> None:
    """`ModelMismatch` names every field in which the model of a node's snapshot is another than the running one."""
    names = stored.differences(running)
    if names:
        raise ModelMismatch(
            node_id=node_id,
            fields=names,
            stored=[getattr(stored, name) for name in names],
            running=[getattr(running, name) for name in names],
        )
