"""The store's format, version 2.

A store is a local folder:

    lock               held (flock) by the one process that may write; holds its process id
    index.sqlite       SQLite, WAL: which nodes, snapshots, parts and tags exist; can be rebuilt from the others
    store              a document: the store's own id and format version
    nodes/ID           a document per node: parent, token ids added, sampler, labels (see `nodes.encode`)
    manifests/HASH     a document per snapshot: position, fingerprint, layout, hashes of its parts (see `manifest`)
    parts/ab/cdef...   a part: state and conv tails of some KDA layers, a page of latents of all MLA layers, the logits
    tags/HASH          a document per tag: its node, when it was set, and perhaps a note
    owners/ID          a document per session that was ever moved or offered: who owns it (see `ownership`)
    tmp/               files being written; emptied when the store is opened

**Document**: a 64-byte header, then JSON in UTF-8 to the end of the file. All integers are little-endian.

    0   8  magic b"SERAIDOC"
    8   4  format version
    12  4  kind: 1 store, 2 node, 3 manifest, 4 tag, 5 owner, 6 point (see `remote`)
    16  8  length of the JSON in bytes
    24 32  BLAKE3 of bytes 0..23 and the JSON; a manifest's or tag's file name is this hash
    56  8  zero

**Part**: a 128-byte header, the payload, and zeros to the next multiple of 4,096 bytes, where the file ends (whole
blocks can be written past the page cache).

    0   8  magic b"SERAIPRT"
    8   4  format version
    12  4  codec (see `codec.Codec`): 0 the bytes themselves, 1 a zstd frame of them, 2 and 3 a zstd frame of them with
           the data section split in 2 or 4 byte planes, 4 as 3 after exclusive-or with the data section of the base
    16  8  raw length: bytes of the safetensors file inside
    24  8  stored length: bytes of the payload
    32 32  BLAKE3 of the raw bytes; this is the part's name
    64 32  name of the base part, itself not of codec 4; zero for other codecs
    96 24  zero
    120 8  the first 8 bytes of the BLAKE3 of bytes 0..119

The raw bytes are a complete safetensors file with its tensors in the order given by the manifest's layout. Its header
is padded with spaces to a multiple of 8, and if the tensors have 262,144 bytes or more, until they begin at a multiple
of 4,096 in the file of a part of codec 0. A part's name depends on its content alone, so a part may be stored anew with
another codec without touching a manifest. Since a reader knows from the manifest which tensors a part must hold, it
compares the safetensors header with the one it expects and parses nothing.

**Upgrades**: a reader accepts every version up to its own and refuses later ones by number. Any change a version-1
reader would misread takes a new version; a writer always writes the newest. Unknown codecs, kinds and storage types are
refused by name. Files of every version ever written are kept under tests/checkpoints/data and read by a test.

    1   the first
    2   latents may be of 8 bits: a page's tensor is then U8 `[layers, tokens, width + 8]`, of each token its int8 codes
        and two float32 scales. All else is as in version 1.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final

from blake3 import blake3

from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt
from serai.checkpoints.files.streams import BLOCK_BYTES, DIRECT_FROM_BYTES, Reader

FORMAT_VERSION: Final = 2
HASH_BYTES: Final = 32

_DOCUMENT_MAGIC: Final = b"SERAIDOC"
_DOCUMENT: Final = struct.Struct("<8sIIQ32s8x")
_DOCUMENT_SEALED_BYTES: Final = 24
DOCUMENT_HEADER_BYTES: Final = _DOCUMENT.size
MAX_DOCUMENT_BYTES: Final = 1 << 28

_PART_MAGIC: Final = b"SERAIPRT"
_PART: Final = struct.Struct("<8sIIQQ32s32s24x")
_PART_CHECK_BYTES: Final = 8
PART_HEADER_BYTES: Final = _PART.size + _PART_CHECK_BYTES
MAX_PART_BYTES: Final = 1 << 28


class DocumentKind(IntEnum):
    STORE = 1
    NODE = 2
    MANIFEST = 3
    TAG = 4
    OWNER = 5
    POINT = 6


@dataclass(frozen=True, slots=True)
class Document:
    """A framed document, ready to write; `hash` names it."""

    data: bytes
    hash: str


def frame_document(kind: DocumentKind, body: bytes) -> Document:
    """`body` behind its header."""
    sealed = _DOCUMENT.pack(_DOCUMENT_MAGIC, FORMAT_VERSION, kind, len(body), b"")[:_DOCUMENT_SEALED_BYTES]
    digest = blake3(sealed).update(body).digest()
    return Document(_DOCUMENT.pack(_DOCUMENT_MAGIC, FORMAT_VERSION, kind, len(body), digest) + body, digest.hex())


def read_document(reader: Reader, kind: DocumentKind) -> Document:
    """The whole document, verified; `SnapshotCorrupt` or `FormatUnknown` otherwise. `data` is its JSON alone."""
    if not _DOCUMENT.size <= reader.size_bytes <= _DOCUMENT.size + MAX_DOCUMENT_BYTES:
        raise SnapshotCorrupt(what=reader.what, problem=f"its file has {reader.size_bytes} bytes, as no document has")
    return unframe_document(bytes(reader.take(reader.size_bytes)), kind, reader.what)


def unframe_document(data: bytes, kind: DocumentKind, what: str) -> Document:
    """The document in `data`, verified as by `read_document`."""
    if len(data) < _DOCUMENT.size:
        raise SnapshotCorrupt(what=what, problem=f"it has {len(data)} bytes and a header takes {_DOCUMENT.size}")
    header, body = data[: _DOCUMENT.size], data[_DOCUMENT.size :]
    magic, version, found_kind, length, digest = _DOCUMENT.unpack(header)
    if magic != _DOCUMENT_MAGIC:
        raise SnapshotCorrupt(what=what, problem="it does not begin like a serai document")
    _check_version(version, what)
    if length != len(body):
        raise SnapshotCorrupt(what=what, problem=f"its header promises {length} bytes and {len(body)} follow")
    if blake3(header[:_DOCUMENT_SEALED_BYTES]).update(body).digest() != digest or any(header[-8:]):
        raise SnapshotCorrupt(what=what, problem="its content does not match its hash")
    if found_kind != kind:
        raise SnapshotCorrupt(what=what, problem=f"it is a document of kind {found_kind}, not {kind} ({kind.name})")
    return Document(body, digest.hex())


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a part's file says about itself; lengths in bytes, hashes in hex, `base` only for codec 4."""

    codec: int
    raw_bytes: int
    stored_bytes: int
    hash: str
    base: str | None = None

    def pack(self) -> bytes:
        base = bytes(HASH_BYTES) if self.base is None else bytes.fromhex(self.base)
        fields = _PART.pack(
            _PART_MAGIC, FORMAT_VERSION, self.codec, self.raw_bytes, self.stored_bytes, bytes.fromhex(self.hash), base
        )
        return fields + blake3(fields).digest(_PART_CHECK_BYTES)


def part_file_bytes(stored_bytes: int) -> int:
    """The size of a part's file with a payload of `stored_bytes`."""
    return -(-(PART_HEADER_BYTES + stored_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def read_part_header(reader: Reader) -> PartHeader:
    """The verified header of a part whose file has exactly the promised length."""
    if reader.size_bytes < PART_HEADER_BYTES:
        problem = f"its file has {reader.size_bytes} bytes and a header takes {PART_HEADER_BYTES}"
        raise SnapshotCorrupt(what=reader.what, problem=problem)
    return unpack_part_header(bytes(reader.take(PART_HEADER_BYTES)), reader.size_bytes, reader.what)


def unpack_part_header(data: bytes, file_bytes: int, what: str) -> PartHeader:
    """The header in `data`, verified as by `read_part_header` for a file of `file_bytes`."""
    magic, version, codec, raw_bytes, stored_bytes, digest, base = _PART.unpack(data[: _PART.size])
    if magic != _PART_MAGIC:
        raise SnapshotCorrupt(what=what, problem="it does not begin like a serai part")
    _check_version(version, what)
    if blake3(data[: _PART.size]).digest(_PART_CHECK_BYTES) != data[_PART.size :]:
        raise SnapshotCorrupt(what=what, problem="its header does not match its own check sum")
    if file_bytes != part_file_bytes(stored_bytes):
        belong = part_file_bytes(stored_bytes)
        raise SnapshotCorrupt(what=what, problem=f"its file has {file_bytes} bytes and {belong} belong to its payload")
    if raw_bytes > MAX_PART_BYTES:
        problem = f"it claims to unpack to {raw_bytes} bytes and {MAX_PART_BYTES} are allowed"
        raise SnapshotCorrupt(what=what, problem=problem)
    return PartHeader(codec, raw_bytes, stored_bytes, digest.hex(), base.hex() if any(base) else None)


def _check_version(version: int, what: str) -> None:
    if version == 0 or version > FORMAT_VERSION:
        raise FormatUnknown(what=what, found=version, supported=f"1 to {FORMAT_VERSION}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor in a part: its name, safetensors type (F32, BF16, I8, U8) and shape."""

    name: str
    type: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}[self.type]

    @property
    def size_bytes(self) -> int:
        size = self.item_bytes
        for length in self.shape:
            size *= length
        return size


def safetensors_header(specs: Sequence[TensorSpec]) -> bytes:
    """The beginning of a safetensors file that holds `specs` in this order: 8 bytes of length, then padded JSON.

    Large tensors begin on a block of the part's file, so that they can go between disk and memory without a copy.
    """
    return _safetensors_header(tuple(specs))


@lru_cache(maxsize=64)  # the full pages of a state have one, and each is asked for several times
def _safetensors_header(specs: tuple[TensorSpec, ...]) -> bytes:
    entries: dict[str, dict[str, object]] = {}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.type,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if offset >= DIRECT_FROM_BYTES:
        text += b" " * (-(PART_HEADER_BYTES + 8 + len(text)) % BLOCK_BYTES)
    return len(text).to_bytes(8, "little") + text
