"""How a part's bytes are packed: as they are, or in one zstd frame, with the bytes of numbers sorted into planes.

The high byte of neighbouring floats (sign and exponent) repeats, the low ones are noise; sorting bytes of equal rank
together lets zstd find the first and skip the second. Compressors are made per call: one shared by threads corrupts its
frames.
"""

from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from serai.checkpoints.errors import FormatUnknown, SnapshotCorrupt

Bytes = NDArray[np.uint8]

# Level 1 packs planes of real states as small as level 3 does, twice as fast; negative levels lose the exponent plane's
# gain.
ZSTD_LEVEL: Final = 1
# A frame may name any window; ours never need more than a part, and a reader must not reserve what a stranger asks for.
_MAX_WINDOW_BYTES: Final = 1 << 27
# AUTO packs only what shrinks to this or less: a disk that writes 1-2 GB/s beats two cores of zstd for the 0.84-0.94 of
# float32.
_WORTH_RATIO: Final = 0.75
_SAMPLE_PIECES: Final = 4
_SAMPLE_PIECE_BYTES: Final = 1 << 12


class Codec(IntEnum):
    """The codec number in a part's header."""

    STORED = 0
    ZSTD = 1
    ZSTD_PLANES_2 = 2
    ZSTD_PLANES_4 = 3
    ZSTD_DELTA_4 = 4


class Packing(Enum):
    """How hard to pack: `AUTO` where a sample says it pays, `SMALL` always, `NONE` never. All are lossless.

    `SMALL` also tries the difference to the parent's state. With the recurrence run over random gates, byte planes pack
    float32 states to 0.84; the difference packs them to 0.77-0.83 after one token, 0.83-0.86 after ten, and worse than
    the state itself from then on.
    """

    AUTO = "auto"
    SMALL = "small"
    NONE = "none"


_PLANES: Final = {Codec.ZSTD: 1, Codec.ZSTD_PLANES_2: 2, Codec.ZSTD_PLANES_4: 4, Codec.ZSTD_DELTA_4: 4}
_BY_ITEM_BYTES: Final = {1: Codec.ZSTD, 2: Codec.ZSTD_PLANES_2, 4: Codec.ZSTD_PLANES_4}


def known_codec(number: int, what: str) -> Codec:
    """The codec with this number; `FormatUnknown` if there is none."""
    try:
        return Codec(number)
    except ValueError as error:
        known = ", ".join(str(codec.value) for codec in Codec)
        raise FormatUnknown(what=what, found=f"codec {number}", supported=f"codecs {known}") from error


def pack(
    header: bytes, data: Sequence[Bytes], item_bytes: int, packing: Packing, base: Sequence[Bytes] | None = None
) -> tuple[Codec, list[bytes | memoryview]]:
    """The codec chosen for a part and its payload.

    `header` is the safetensors header, `data` the bytes of its tensors (uint8 `[n]` each), `item_bytes` the size of one
    number, `base` the bytes of an earlier part of the same tensors. The payload may refer to `data` itself.
    """
    stored: list[bytes | memoryview] = [header, *(piece.data for piece in data)]
    size = sum(piece.size for piece in data)
    if packing is Packing.NONE or size == 0 or (packing is Packing.AUTO and not _pays(data, item_bytes)):
        return Codec.STORED, stored
    codec, frame = _BY_ITEM_BYTES[item_bytes], _zstd_planes(header, data, item_bytes)
    if base is not None and item_bytes == _PLANES[Codec.ZSTD_DELTA_4]:
        changed = [np.bitwise_xor(piece, before) for piece, before in zip(data, base, strict=True)]
        delta = _zstd_planes(header, changed, item_bytes)
        if len(delta) < len(frame):
            codec, frame = Codec.ZSTD_DELTA_4, delta
    return (codec, [frame]) if len(frame) < len(header) + size else (Codec.STORED, stored)


def _zstd_planes(header: bytes, data: Sequence[Bytes], item_bytes: int) -> bytes:
    raw = np.empty(len(header) + sum(piece.size for piece in data), np.uint8)
    raw[: len(header)] = np.frombuffer(header, np.uint8)
    _split_planes(data, item_bytes, raw[len(header) :])
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw.data)


def _pays(data: Sequence[Bytes], item_bytes: int) -> bool:
    """Whether a few samples of the largest tensor shrink enough to be worth the time."""
    largest = max(data, key=lambda piece: piece.size)
    length = min(_SAMPLE_PIECE_BYTES, largest.size // item_bytes * item_bytes)
    last = (largest.size - length) // item_bytes
    starts = {last * number // max(1, _SAMPLE_PIECES - 1) * item_bytes for number in range(_SAMPLE_PIECES)}
    sample = np.concatenate([largest[start : start + length] for start in sorted(starts)])
    planes = np.empty_like(sample)
    _split_planes([sample], item_bytes, planes)
    frame = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes.data)
    return len(frame) <= _WORTH_RATIO * sample.size


def _split_planes(data: Sequence[Bytes], item_bytes: int, out: Bytes) -> None:
    """Sort the bytes of all numbers by rank: first every number's lowest byte, then the next, over all of `data`."""
    planes = out.reshape(item_bytes, -1)
    start = 0
    for piece in data:
        count = piece.size // item_bytes
        for rank in range(item_bytes):
            planes[rank, start : start + count] = piece[rank::item_bytes]
        start += count


def _join_planes(planes_of_all: Bytes, item_bytes: int, out: Sequence[Bytes]) -> None:
    planes = planes_of_all.reshape(item_bytes, -1)
    start = 0
    for piece in out:
        count = piece.size // item_bytes
        for rank in range(item_bytes):
            piece[rank::item_bytes] = planes[rank, start : start + count]
        start += count


def unpack(codec: Codec, payload: Any, header_bytes: int, out: Sequence[Bytes], what: str) -> bytes:
    """Unpack a compressed part into `out` (uint8 `[n]` each) and return its safetensors header.

    Of a delta, this is the difference to its base, for `add_base`.

    Never makes more bytes than `header_bytes` and `out` hold, whatever the frame claims; anything else is
    `SnapshotCorrupt`.
    """
    raw_bytes = header_bytes + sum(piece.size for piece in out)
    raw = np.frombuffer(_bounded_unzstd(payload, raw_bytes, what), np.uint8)
    _join_planes(raw[header_bytes:], _PLANES[codec], out)
    return raw[:header_bytes].tobytes()


def add_base(out: Sequence[Bytes], base: Sequence[Bytes]) -> None:
    """Turn an unpacked delta into the content it stands for."""
    for piece, before in zip(out, base, strict=True):
        np.bitwise_xor(piece, before, out=piece)


def _bounded_unzstd(frame: Any, raw_bytes: int, what: str) -> bytes:
    try:
        claimed = zstandard.get_frame_parameters(frame).content_size
        if claimed not in (raw_bytes, zstandard.CONTENTSIZE_UNKNOWN):
            raise SnapshotCorrupt(what=what, problem=f"its zstd frame claims {claimed} bytes where {raw_bytes} belong")
        reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        # A frame from a streaming writer names no size: the limit is ours, not the frame's.
        raw = reader.decompress(frame, max_output_size=raw_bytes, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SnapshotCorrupt(
            what=what, problem=f"its zstd frame cannot be unpacked to {raw_bytes} bytes ({error})"
        ) from error
    if len(raw) != raw_bytes:
        raise SnapshotCorrupt(what=what, problem=f"its zstd frame holds {len(raw)} bytes where {raw_bytes} belong")
    return raw
