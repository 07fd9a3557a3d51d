"""Snapshots into parts and back: which array goes into which part, several parts at a time, all of them or nothing."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.codec import Packing
from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt
from serai.checkpoints.format import TensorSpec, part_file_bytes
from serai.checkpoints.index import Index, PartRow
from serai.checkpoints.manifest import Manifest, Storage, StoredAs, logits_specs, page_specs, part_bytes, state_specs
from serai.checkpoints.parts import PartFiles, content_of
from serai.checkpoints.quantise import from_stored, to_stored
from serai.checkpoints.snapshot import PageIdentity, Snapshot, StateLayout

Allocate = Callable[[StateLayout, int], Snapshot]

T = TypeVar("T")
R = TypeVar("R")

_DTYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1")}


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of a saved snapshot; `is_new` when the store did not hold it before."""

    row: PartRow
    is_new: bool


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """What one part is made of, or is read into: `values` as the type `stored_as`, then `exact` as they are."""

    specs: tuple[TensorSpec, ...]
    values: NDArray[Any]
    stored_as: StoredAs
    exact: tuple[NDArray[Any], ...] = ()
    identity: PageIdentity | None = None


def slots_of(snapshot: Snapshot, storage: Storage) -> list[Slot]:
    """A snapshot's arrays part by part, in the order of `Manifest.parts`; views, not copies."""
    layout = snapshot.layout
    state = state_specs(layout, storage)
    slots = [Slot(state, kda, storage.state, (conv,)) for kda, conv in zip(snapshot.kda, snapshot.conv, strict=True)]
    for page in snapshot.pages:
        specs = page_specs(layout, storage, page.rows.shape[1])
        slots.append(Slot(specs, page.rows, storage.latents, identity=page.identity))
    if snapshot.logits is not None:
        slots.append(Slot(logits_specs(layout), snapshot.logits, StoredAs.SAME))
    return slots


class Pins:
    """Parts that a running save or load counts on, and that are not unlinked meanwhile. Guarded by the index's lock."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> int:
        """How many running saves and loads count on the part."""
        return self._counts[name]

    @contextmanager
    def held(self) -> Iterator[Callable[[str], None]]:
        """A function that pins a part until the block is left."""
        mine: set[str] = set()

        def pin(name: str) -> None:
            with self._index.lock:
                if name not in mine:
                    mine.add(name)
                    self._counts[name] += 1

        try:
            yield pin
        finally:
            with self._index.lock:
                for name in mine:
                    self._counts[name] -= 1
                    if not self._counts[name]:
                        del self._counts[name]


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """The parts of a store: writes what it lacks, reads what a manifest names. Safe from several threads."""

    files: PartFiles
    index: Index
    pins: Pins
    writers: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    known: WeakKeyDictionary[PageIdentity, dict[StoredAs, str]] = field(default_factory=WeakKeyDictionary)

    def put(
        self, snapshot: Snapshot, storage: Storage, packing: Packing, pin: Callable[[str], None]
    ) -> list[SavedPart]:
        """Have every part of a snapshot on disk, durably, in the order of `Manifest.parts`; if that fails, leave none
        behind.
        """
        written: list[str] = []

        def put_one(slot: Slot) -> SavedPart:
            return self._put(slot, packing, pin, written)

        try:
            saved = _each(self.writers, put_one, slots_of(snapshot, storage))
            self.files.sync(part.row.hash for part in saved if part.is_new)
        except BaseException:
            self.discard(written)
            raise
        return saved

    def discard(self, written: Iterable[str]) -> None:
        """Remove parts of a snapshot that was not committed, unless others have come to count on them."""
        with self.index.lock:
            self.files.take_back(
                name for name in set(written) if self.pins.count(name) <= 1 and self.index.part(name) is None
            )

    def _put(self, slot: Slot, packing: Packing, pin: Callable[[str], None], written: list[str]) -> SavedPart:
        known = self._known(slot)
        if known is not None:
            pin(known)
            row = self.index.part(known)
            if row is not None and not row.damaged:
                return SavedPart(row, is_new=False)
        content = content_of(slot.specs, (*to_stored(slot.values, slot.stored_as), *slot.exact))
        pin(content.hash)
        self._learn(slot, content.hash)
        row = self.index.part(content.hash)
        if row is not None and not row.damaged:
            return SavedPart(row, is_new=False)
        written.append(content.hash)
        head = self.files.write(content, packing)
        return SavedPart(PartRow(content.hash, head.raw_bytes, part_file_bytes(head.stored_bytes)), is_new=True)

    def get(self, manifest: Manifest, allocate: Allocate) -> Snapshot:
        """The snapshot a manifest describes, every part verified; the caller has pinned them.

        `SnapshotCorrupt` if anything is not as written; a damaged part is remembered and written anew by the next save
        of the same content. Nothing is allocated before every part is known to be there in its right size.
        """
        sized = dict(zip(manifest.parts, part_bytes(manifest), strict=True))
        _each(self.readers, self._check_size, list(sized.items()))
        try:
            snapshot = allocate(manifest.layout, manifest.position)
        except (ValueError, MemoryError) as error:
            what = f"the snapshot of node {manifest.node_id}"
            raise SnapshotCorrupt(what=what, problem=f"there is no room for its layout ({error})") from error
        if snapshot.layout != manifest.layout or snapshot.position != manifest.position:
            raise ValueError(f"buffers were given for position {snapshot.position} of {snapshot.layout.describe()}")
        slots = slots_of(snapshot, manifest.storage)
        _each(self.readers, self._get, list(zip(manifest.parts, slots, strict=True)))
        for name, slot in zip(manifest.parts, slots, strict=True):
            if slot.stored_as is StoredAs.SAME:
                self._learn(slot, name)
        return snapshot

    def _check_size(self, sized: tuple[str, int]) -> None:
        name, raw_bytes = sized
        with self._noting_damage(name):
            head = self.files.head(name)
            if head is None:
                raise SnapshotCorrupt(what=f"part {name}", problem="its file is missing")
            if head.raw_bytes != raw_bytes:
                raise SnapshotCorrupt(
                    what=f"part {name}", problem=f"it holds {head.raw_bytes} bytes where {raw_bytes} belong"
                )

    def _get(self, named: tuple[str, Slot]) -> None:
        name, slot = named
        with self._noting_damage(name):
            if slot.stored_as is StoredAs.SAME and all(
                array.flags.c_contiguous for array in (slot.values, *slot.exact)
            ):
                self.files.read(name, slot.specs, (slot.values, *slot.exact))
                return
            arrays = [np.empty(spec.shape, _DTYPES[spec.type]) for spec in slot.specs]
            self.files.read(name, slot.specs, arrays)
        stored = len(arrays) - len(slot.exact)
        from_stored(arrays[:stored], slot.stored_as, slot.values)
        for array, out in zip(arrays[stored:], slot.exact, strict=True):
            np.copyto(out, array)

    @contextmanager
    def _noting_damage(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SnapshotCorrupt, FormatUnknown):
            with self.index.change():
                self.index.mark_damaged(name)
            raise

    def _known(self, slot: Slot) -> str | None:
        if slot.identity is None:
            return None
        with self.index.lock:
            return self.known.get(slot.identity, {}).get(slot.stored_as)

    def _learn(self, slot: Slot, name: str) -> None:
        if slot.identity is not None:
            with self.index.lock:
                self.known.setdefault(slot.identity, {})[slot.stored_as] = name


def _each(pool: ThreadPoolExecutor, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`work` on every item, several at a time; after a failure no more are begun, and it is raised when all ended."""
    futures = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    failed = [future for future in futures if not future.cancelled() and future.exception() is not None]
    return [future.result() for future in failed or futures]
