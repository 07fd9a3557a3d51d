"""Snapshots into parts and back: which array goes into which part, several parts at a time, all of them or nothing."""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt
from serai.checkpoints.files.codec import Codec, Packing
from serai.checkpoints.files.folders import FreshFile
from serai.checkpoints.files.manifest import (
    Manifest,
    Storage,
    StoredAs,
    latents_stored_as,
    layers_per_part,
    logits_specs,
    page_specs,
    part_bytes,
    state_specs,
)
from serai.checkpoints.files.parts import DTYPES, Base, PartFiles, content_of
from serai.checkpoints.files.quantise import from_stored, to_stored
from serai.checkpoints.format import PartHeader, TensorSpec, part_file_bytes
from serai.checkpoints.index import Index
from serai.checkpoints.pins import Pins, SavedPart
from serai.checkpoints.rows import PartRow
from serai.checkpoints.snapshot import PageIdentity, Snapshot, StateLayout

Allocate = Callable[[StateLayout, int], Snapshot]

# Parts of one save that are written before they are fsynced together. Each is an open file until then, so a store has
# no more of those in all than this, and past it fsyncs each by itself.
SETTLED_TOGETHER: Final = 128
OPEN_FILES: Final = 256

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """What one part is made of, or is read into: `values` as the type `stored_as`, then `exact` as they are."""

    specs: tuple[TensorSpec, ...]
    values: NDArray[Any]
    stored_as: StoredAs
    exact: tuple[NDArray[Any], ...] = ()
    identity: PageIdentity | None = None
    base: str | None = None


def slots_of(snapshot: Snapshot, storage: Storage, bases: Sequence[str] = ()) -> list[Slot]:
    """A snapshot's arrays part by part, in the order of `Manifest.parts`; views, not copies.

    `bases` names, for each part of KDA state, one that it may be a delta to, or is empty.
    """
    layout = snapshot.layout
    group = layers_per_part(layout)
    slots = []
    for number, first in enumerate(range(0, layout.kda_shape[0], group)):
        kda, conv = snapshot.kda[first : first + group], snapshot.conv[first : first + group]
        base = bases[number] if bases else None
        slots.append(Slot(state_specs(layout, storage, len(kda)), kda, storage.state, (conv,), base=base))
    for page in snapshot.pages:
        specs = page_specs(layout, storage, page.rows.shape[1])
        slots.append(Slot(specs, page.rows, latents_stored_as(layout, storage), identity=page.identity))
    if snapshot.logits is not None:
        slots.append(Slot(logits_specs(layout), snapshot.logits, StoredAs.SAME))
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class Shelf:
    """The parts of a store: writes what it lacks, reads what a manifest names. Safe from several threads."""

    files: PartFiles
    index: Index
    pins: Pins
    writers: ThreadPoolExecutor
    readers: ThreadPoolExecutor
    known: WeakKeyDictionary[PageIdentity, dict[StoredAs, str]] = field(default_factory=WeakKeyDictionary)
    stripes: tuple[threading.Lock, ...] = field(default_factory=lambda: tuple(threading.Lock() for _ in range(256)))

    def put(
        self,
        snapshot: Snapshot,
        storage: Storage,
        packing: Packing,
        pin: Callable[[str], None],
        bases: Sequence[str] = (),
        *,
        namespace: str,
        meanwhile: Callable[[list[SavedPart]], None],
    ) -> list[SavedPart]:
        """Have every part of a snapshot on disk, durably, in the order of `Manifest.parts`.

        `meanwhile` is told of them when all are written, and may have a file of its own settle with theirs: the disk
        then flushes once for both. If that fails, none of those it wrote is left. What only other namespaces have, or
        are writing, is written once more: what a save writes, and how long it takes, must not tell one tenant what
        another has read.
        """
        mine: list[str] = []
        unpackable: set[tuple[str, ...]] = set()  # pages of latents, once a sample of one did not shrink

        def put_one(slot: Slot) -> SavedPart:
            names = tuple(spec.name for spec in slot.specs)
            is_page = slot.identity is not None
            tried = Packing.NONE if packing is Packing.AUTO and names in unpackable else packing
            part, codec = self._put(slot, tried, pin, mine, namespace)
            if is_page and codec == Codec.STORED:
                unpackable.add(names)
            return part

        try:
            saved: list[SavedPart] = []
            settling: list[Callable[[], None]] = []
            slots = slots_of(snapshot, storage, bases)
            for start in range(0, len(slots), SETTLED_TOGETHER):
                _each(self.writers, _call, settling)
                group = _each(self.writers, put_one, slots[start : start + SETTLED_TOGETHER])
                settling = [partial(self._settle, part.row.hash) for part in group if not part.is_durable]
                saved += group
            settling.append(partial(meanwhile, saved))
            _each(self.writers, _call, settling)
            self.files.sync(part.row.hash for part in saved if not part.is_durable)
        except BaseException:
            self.discard(mine)
            raise
        return saved

    def discard(self, written: Iterable[str]) -> None:
        """Remove parts of a snapshot that was not committed, unless others have come to count on them."""
        with self.index.lock:
            alone = {name for name in written if self.pins.count(name) <= 1 and self.index.part(name) is None}
            for name in alone:
                self.pins.forget(name)
            self.files.take_back(alone)

    def _put(
        self, slot: Slot, packing: Packing, pin: Callable[[str], None], mine: list[str], namespace: str
    ) -> tuple[SavedPart, int | None]:
        """The part, and the codec in which it was written; None if it was there."""
        known = self._known(slot)
        found = None if known is None else self.found(known, pin, namespace)
        if found is not None:
            return found, None
        content = content_of(slot.specs, (*to_stored(slot.values, slot.stored_as), *slot.exact))
        self._learn(slot, content.hash)
        with self.stripe(content.hash):
            found = self.found(content.hash, pin, namespace)
            if found is not None:
                return found, None
            mine.append(content.hash)
            base = base_row = None
            if packing is Packing.SMALL and slot.base is not None and not self._is_known(content.hash):
                base, base_row = self._base(slot.specs, slot.base, pin)
            self._settle_held(content.hash)  # another namespace's, if it waits for that
            head, fresh = self.files.write(content, packing, base)
            part = self.note_written(head, None if head.base is None else base_row, fresh, namespace=namespace)
            if len(self.pins.fresh) > OPEN_FILES:
                self._settle_held(content.hash)
            return part, head.codec

    def _is_known(self, name: str) -> bool:
        """Whether any namespace has the part, or is writing it."""
        with self.index.lock:
            return name in self.pins.written or self.index.part(name) is not None

    def note_written(
        self, head: PartHeader, base: PartRow | None, fresh: FreshFile | None = None, *, namespace: str | None = None
    ) -> SavedPart:
        """Let other saves know of a pinned part whose file is complete, before a snapshot with it is committed."""
        row = PartRow(head.hash, head.raw_bytes, part_file_bytes(head.stored_bytes), head.base)
        part = SavedPart(row, base, is_new=True, is_durable=False, namespace=namespace)
        with self.index.lock:
            self.pins.written[head.hash] = part
            if fresh is None:
                self.pins.placed[head.hash] = row
            else:
                self.pins.fresh[head.hash] = row, fresh
        return part

    def settle_all(self, names: Iterable[str]) -> None:
        """Have those of these pinned parts durably in their places that running saves wrote and no snapshot has yet."""
        with self.index.lock:
            rows = {name: self.index.part(name) for name in names}
        running = [name for name, row in rows.items() if row is None or row.damaged]
        for name in running:
            self._settle(name)
        self.files.sync(running)

    def _settle(self, name: str) -> None:
        """Have a complete part on the disk under its name; `OSError` if that failed, for another save perhaps."""
        with self.stripe(name):
            self._settle_held(name)
            if not self._is_known(name):
                raise OSError(errno.EIO, f"another save that wrote part {name} failed")

    def _settle_held(self, name: str) -> None:
        """Have a complete part on the disk under its name, if it waits for that; for who holds the part's stripe."""
        with self.index.lock:
            waiting = self.pins.fresh.pop(name, None)
        if waiting is None:
            return
        row, fresh = waiting
        try:
            self.files.settle(fresh, name)
        except BaseException:
            with self.index.lock:
                self.pins.written.pop(name, None)
            raise
        with self.index.lock:
            self.pins.placed[name] = row

    def stripe(self, name: str) -> threading.Lock:
        """Held by whoever writes a part, so that its file is never written as deltas to two bases."""
        return self.stripes[int(name[:2], 16)]

    def found(self, name: str, pin: Callable[[str], None], namespace: str | None = None) -> SavedPart | None:
        """The sound part `name`, if the store or another running save has it, pinned together with its base.

        With `namespace`, it counts only if that has it, or is writing it.
        """
        with self.index.lock:
            pin(name)
            row = self.index.part(name)
            others = row is not None and namespace is not None and not self.index.part_is_of(name, namespace)
            if row is None or row.damaged or others:
                written = self.pins.written.get(name)
                if written is not None and namespace not in (None, written.namespace):
                    return None
                if written is not None and written.base is not None:
                    pin(written.base.hash)
                return None if written is None else replace(written, is_new=False)
            if row.base is None:
                return SavedPart(row, None, is_new=False, is_durable=True)
            pin(row.base)
            return SavedPart(row, self.index.part(row.base), is_new=False, is_durable=True)

    def _base(
        self, specs: tuple[TensorSpec, ...], name: str, pin: Callable[[str], None]
    ) -> tuple[Base, PartRow] | tuple[None, None]:
        """The part that new content may be a delta to: the one proposed, or the one that is a delta to."""
        found = self.found(name, pin)
        row = None if found is None else found.base or found.row
        if row is None or row.damaged:
            return None, None
        with suppress(SnapshotCorrupt, FormatUnknown), self.noting_damage(row.hash):
            return self.files.read_base(row.hash, specs), row
        return None, None  # it is damaged, which is noted, and this save does without

    def get(self, manifest: Manifest, allocate: Allocate) -> Snapshot:
        """The snapshot a manifest describes, every part verified; the caller has pinned them.

        `SnapshotCorrupt` if anything is not as written; a damaged part is remembered and written anew by the next save
        of the same content. Nothing is allocated before every part is known to be there in its right size.
        """
        sized = dict(zip(manifest.parts, part_bytes(manifest), strict=True))
        with self.index.lock:
            rows = {name: self.index.part(name) for name in sized}
        for name, raw_bytes in sized.items():
            row = rows[name]
            if row is None or row.raw_bytes != raw_bytes:
                self._check_size(name, raw_bytes)
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

    def _check_size(self, name: str, raw_bytes: int) -> None:
        """Ask the file of a part that the index does not know in this size."""
        with self.noting_damage(name):
            head = self.files.head(name)
            if head is None:
                raise SnapshotCorrupt(what=f"part {name}", problem="its file is missing")
            if head.raw_bytes != raw_bytes:
                raise SnapshotCorrupt(
                    what=f"part {name}", problem=f"it holds {head.raw_bytes} bytes where {raw_bytes} belong"
                )

    def _get(self, named: tuple[str, Slot]) -> None:
        name, slot = named
        with self.noting_damage(name):
            if slot.stored_as is StoredAs.SAME and all(
                array.flags.c_contiguous for array in (slot.values, *slot.exact)
            ):
                self.files.read(name, slot.specs, (slot.values, *slot.exact))
                return
            arrays = [np.empty(spec.shape, DTYPES[spec.type]) for spec in slot.specs]
            self.files.read(name, slot.specs, arrays)
        stored = len(arrays) - len(slot.exact)
        from_stored(arrays[:stored], slot.stored_as, slot.values)
        for array, out in zip(arrays[stored:], slot.exact, strict=True):
            np.copyto(out, array)

    @contextmanager
    def noting_damage(self, name: str) -> Iterator[None]:
        """Remember a part that turns out damaged: no snapshot with it is used, the next save writes it anew."""
        try:
            yield
        except (SnapshotCorrupt, FormatUnknown):
            self.index.note(lambda: self.index.mark_damaged(name))
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


def _call(work: Callable[[], None]) -> None:
    work()


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
