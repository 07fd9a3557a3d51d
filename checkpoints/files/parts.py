"""Part files: written once under the hash of their content, verified whenever they are read."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files.codec import Bytes, Codec, Packing, add_base, known_codec, pack, unpack
from serai.checkpoints.files.folders import Folder, FreshFile
from serai.checkpoints.files.streams import BLOCK_BYTES, DIRECT_FROM_BYTES, Buffer, Reader
from serai.checkpoints.format import (
    PART_HEADER_BYTES,
    PartHeader,
    TensorSpec,
    part_file_bytes,
    read_part_header,
    safetensors_header,
)

# Syncing 256 folders of an ext4 one after the other took 0.5 to 1.2 s, eight at a time 0.03 s.
_SYNCING_THREADS: Final = 8

# Threads that wait for the disk may be many; those that hash and pack leave a core to the event loop and the engine.
computing: Final = threading.BoundedSemaphore(max(1, (os.cpu_count() or 1) - 1))

DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "BF16": np.dtype("<u2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """What a part is to hold: tensors of equal item size, their bytes contiguous, and the hash that names them."""

    header: bytes
    data: tuple[Bytes, ...]
    item_bytes: int
    hash: str

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(piece.size for piece in self.data)


def content_of(specs: Sequence[TensorSpec], arrays: Sequence[NDArray[Any]]) -> Content:
    """Hash the tensors of a part. Strided arrays are copied, contiguous ones are not."""
    header = safetensors_header(specs)
    data = tuple(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)
    return Content(header, data, min((spec.item_bytes for spec in specs), default=1), _hash_of(header, data))


def _hash_of(header: bytes, data: Iterable[Bytes]) -> str:
    with computing:
        digest = blake3(header)
        for piece in data:
            digest.update(piece.data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A part others may be stored as deltas to."""

    hash: str
    data: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class PartFiles:
    """The `parts/` folder; `temporary` is the folder new files are written in first. Safe from several threads."""

    folder: Folder
    temporary: Folder
    direct: bool

    def write(self, content: Content, packing: Packing, base: Base | None = None) -> tuple[PartHeader, FreshFile]:
        """Write a part's file, perhaps as a delta to `base`; it has its name after `settle`, durably after `sync`."""
        before = None if base is None else base.data
        with computing:
            codec, payload = pack(content.header, content.data, content.item_bytes, packing, before)
        stored_bytes = sum(memoryview(piece).nbytes for piece in payload)
        base_hash = base.hash if base is not None and codec is Codec.ZSTD_DELTA_4 else None
        header = PartHeader(codec, content.size_bytes, stored_bytes, content.hash, base_hash)
        size_bytes = part_file_bytes(header.stored_bytes)
        padding = bytes(size_bytes - PART_HEADER_BYTES - header.stored_bytes)
        pieces = [header.pack(), *payload, padding]
        return header, self.temporary.write_fresh(pieces, size_bytes=size_bytes, direct=self.direct)

    def settle(self, fresh: FreshFile, name: str) -> None:
        """Have a part's bytes on the disk, then give the file its name; durable after `sync`."""
        self.publish(self.temporary.settle(fresh), name)

    def receive(self, name: str, specs: Sequence[TensorSpec], pieces: Iterable[Buffer], size_bytes: int) -> str:
        """Write the file of a part from elsewhere and verify it; a delta's base must be here. Its temporary name."""
        temporary = self.temporary.write_temporary(pieces, size_bytes=size_bytes, direct=self.direct)
        try:
            with self.temporary.reading(temporary, f"part {name}", direct=self.direct) as reader:
                self._read(reader, name, specs, [np.empty(spec.size_bytes, np.uint8) for spec in specs])
        except BaseException:
            self.temporary.remove(temporary)
            raise
        return temporary

    def publish(self, temporary: str, name: str) -> None:
        """Give a part's complete file its name; durable after `sync`."""
        prefix, rest = _split(name)
        try:
            with self.folder.child(prefix, create=True) as child:
                self.temporary.publish(temporary, child, rest)
        except OSError:
            self.temporary.remove(temporary)
            raise

    def sync(self, hashes: Iterable[str]) -> None:
        """Make the names of these parts durable, and those of the folders they are in."""
        prefixes = sorted({_split(name)[0] for name in hashes})
        if prefixes:
            _together([self.folder.sync, *(partial(self._sync_prefix, prefix) for prefix in prefixes)])

    def _sync_prefix(self, prefix: str) -> None:
        with self.folder.child(prefix, create=False) as child:
            child.sync()

    def head(self, name: str) -> PartHeader | None:
        """The verified header of a part, or None if there is no such file."""
        try:
            with self._reading(name) as reader:
                reader.limit_buffer(BLOCK_BYTES)
                return read_part_header(reader)
        except FileNotFoundError:
            return None

    def read(self, name: str, specs: Sequence[TensorSpec], out: Sequence[NDArray[Any]]) -> None:
        """Read part `name`, which must hold `specs`, into contiguous `out` arrays; verified, or `SnapshotCorrupt`."""
        what = f"part {name}"
        try:
            with self._reading(name) as reader:
                self._read(reader, name, specs, [array.reshape(-1).view(np.uint8) for array in out])
        except FileNotFoundError as error:
            raise SnapshotCorrupt(what=what, problem="its file is missing") from error

    def read_base(self, name: str, specs: Sequence[TensorSpec]) -> Base:
        """The content of a part that others are deltas to; it must not be a delta itself."""
        head = self.head(name)
        if head is None or head.base is not None:
            problem = "its file is missing" if head is None else "it is a base and refers to another"
            raise SnapshotCorrupt(what=f"part {name}", problem=problem)
        data = tuple(np.empty(spec.size_bytes, np.uint8) for spec in specs)
        self.read(name, specs, data)
        return Base(name, data)

    def _read(self, reader: Reader, name: str, specs: Sequence[TensorSpec], out: Sequence[Bytes]) -> None:
        expected = safetensors_header(specs)
        size = len(expected) + sum(piece.size for piece in out)
        if reader.size_bytes == part_file_bytes(size) >= DIRECT_FROM_BYTES:  # it is stored as it is, most likely
            reader.read_ahead(PART_HEADER_BYTES + len(expected), out)
        head = read_part_header(reader)
        if head.hash != name:
            raise SnapshotCorrupt(what=reader.what, problem=f"its file holds part {head.hash}")
        if head.raw_bytes != size:
            raise SnapshotCorrupt(what=reader.what, problem=f"it holds {head.raw_bytes} bytes where {size} belong")
        codec = known_codec(head.codec, reader.what)
        if codec is Codec.STORED:
            header = self._read_stored(reader, head, len(expected), out)
        else:
            if head.stored_bytes > size:
                raise SnapshotCorrupt(
                    what=reader.what, problem=f"its payload of {head.stored_bytes} bytes is longer than its content"
                )
            payload = reader.take(head.stored_bytes)
            with computing:
                header = unpack(codec, payload, len(expected), out, reader.what)
            if codec is Codec.ZSTD_DELTA_4:
                if head.base is None:
                    raise SnapshotCorrupt(what=reader.what, problem="it is a delta and names no base")
                add_base(out, self.read_base(head.base, specs).data)
        digest = _hash_of(header, out)
        if any(reader.take(reader.size_bytes - PART_HEADER_BYTES - head.stored_bytes)):
            raise SnapshotCorrupt(what=reader.what, problem="something follows its payload")
        if digest != name:
            raise SnapshotCorrupt(what=reader.what, problem="its content does not match its hash")
        if header != expected:
            raise SnapshotCorrupt(what=reader.what, problem="it holds other tensors than its snapshot's layout says")

    @staticmethod
    def _read_stored(reader: Reader, head: PartHeader, header_bytes: int, out: Sequence[Bytes]) -> bytes:
        if head.stored_bytes != head.raw_bytes:
            raise SnapshotCorrupt(
                what=reader.what, problem=f"{head.stored_bytes} bytes are stored for {head.raw_bytes}"
            )
        header = bytes(reader.take(header_bytes))
        for piece in out:
            reader.fill(piece)
        return header

    def take_back(self, names: Iterable[str]) -> None:
        """Unlink parts of a save that failed, as far as the disk lets us: what it keeps has no row and is nobody's."""
        for name in names:
            prefix, rest = _split(name)
            with suppress(OSError), self.folder.child(prefix, create=False) as child:
                child.remove(rest)

    def remove(self, names: Iterable[str]) -> None:
        """Unlink parts, durably; missing ones are no error."""
        by_prefix: dict[str, list[str]] = {}
        for name in names:
            prefix, rest = _split(name)
            by_prefix.setdefault(prefix, []).append(rest)
        _together([partial(self._remove_from, prefix, rests) for prefix, rests in by_prefix.items()])

    def _remove_from(self, prefix: str, rests: Sequence[str]) -> None:
        with ExitStack() as stack:
            try:
                child = stack.enter_context(self.folder.child(prefix, create=False))
            except FileNotFoundError:
                return
            for rest in rests:
                child.remove(rest)
            child.sync()

    def names(self) -> Iterator[str]:
        """The hash of every part file; other names are passed over."""
        for prefix in sorted(self.folder.names()):
            if len(prefix) == 2:
                with self.folder.child(prefix, create=False) as child:
                    yield from (prefix + rest for rest in sorted(child.names()) if len(rest) == 62)

    @contextmanager
    def _reading(self, name: str) -> Iterator[Reader]:
        prefix, rest = _split(name)
        with (
            self.folder.child(prefix, create=False) as child,
            child.reading(rest, f"part {name}", direct=self.direct) as reader,
        ):
            yield reader


def _together(syncs: Sequence[Callable[[], None]]) -> None:
    """Have folders synced at the same time: a disk that is asked by all of them flushes once, not once for each."""
    if len(syncs) == 1:
        syncs[0]()
        return
    with ThreadPoolExecutor(min(_SYNCING_THREADS, max(1, len(syncs))), "serai-store-sync") as pool:
        for done in [pool.submit(sync) for sync in syncs]:
            done.result()


def _split(name: str) -> tuple[str, str]:
    return name[:2], name[2:]
