"""The safetensors header, read strictly.

A file is: 8 bytes, the header's length N (little-endian); N bytes of JSON, `{name: {"dtype", "shape",
"data_offsets": [begin, end]}, …}` with an optional `"__metadata__"` of strings; then the data, to which the offsets
are relative and which the tensors must cover exactly, in any order, without overlap or gap.

Nothing is allocated from a number in the file before it was compared with the size of the file.
"""

import sys
from operator import attrgetter
from typing import NamedTuple

from serai.runtime.errors import WeightsInvalid
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.strict_json import JsonError, json_type, parse_json_object, shown

LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself; the largest published header (a K3 shard) is under one megabyte."""

_MOST_TENSOR_BYTES = 2**62
_MOST_DIMENSIONS = 32  # NumPy's limit before version 2
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))


class TensorInfo(NamedTuple):
    """Where a tensor lies: `offset` counts from the start of `file`, a path relative to the model folder."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


def header_bytes(file: str, file_bytes: int, length_field: bytes) -> int:
    """The header's length, from the first bytes of the file; refused if the file can't hold it."""
    if file_bytes < LENGTH_BYTES or len(length_field) < LENGTH_BYTES:
        raise wrong_size(file, file_bytes, f"at least {LENGTH_BYTES} (the length of its header)")
    length = int.from_bytes(length_field, "little")
    if length > MOST_HEADER_BYTES:
        raise WeightsInvalid(
            f"{file} announces a header of {length:,} bytes, over the limit of {MOST_HEADER_BYTES:,}; "
            f"the file is {file_bytes:,} bytes long and is not a safetensors file"
        )
    if file_bytes < LENGTH_BYTES + length:
        raise wrong_size(file, file_bytes, f"at least {LENGTH_BYTES + length:,} (its header alone)")
    return length


def wrong_size(file: str, actual_bytes: int, expected: str) -> WeightsInvalid:
    """The one sentence for a file that was cut, or has bytes too many."""
    return WeightsInvalid(
        f"{file} is {actual_bytes:,} bytes long where its header calls for {expected}; "
        "it was cut or changed, so fetch it again"
    )


def parse_header(file: str, header: bytes, file_bytes: int) -> list[TensorInfo]:
    """Every tensor of a file, checked. Raises `WeightsInvalid`, naming the file and the tensors concerned."""
    try:
        entries = parse_json_object(header)
    except JsonError as error:
        raise WeightsInvalid(f"{file}: the header {error}") from None
    _check_metadata(file, entries.pop("__metadata__", None))
    start = LENGTH_BYTES + len(header)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    tensors = [_tensor(file, name, entry, start, shapes) for name, entry in entries.items()]
    _check_cover(file, tensors, start, file_bytes)
    return tensors


def _check_metadata(file: str, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsInvalid(f"{file}: __metadata__ in the header must be an object of strings, not {shown(metadata)}")


def _tensor(
    file: str,
    name: str,
    entry: object,
    start: int,
    shapes: dict[tuple[int, ...], tuple[int, ...]],
) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _bad(file, name, f"is a JSON {json_type(entry)} where an object is due")
    if entry.keys() != _ENTRY_KEYS:
        raise _bad(file, name, f"has the keys {shown(sorted(entry))} where dtype, shape and data_offsets are due")
    if not name.isascii():
        _check_encodable(file, name)
    dtype = entry["dtype"]
    storage = STORAGE.get(dtype) if isinstance(dtype, str) else None
    if storage is None:
        raise _bad(file, name, f"has the unknown dtype {shown(dtype)}; known are {', '.join(STORAGE)}")
    dimensions = _naturals(entry["shape"])
    if dimensions is None:
        raise _bad(file, name, f"has the shape {shown(entry['shape'])} where a list of whole numbers is due")
    if len(dimensions) > _MOST_DIMENSIONS:
        raise _bad(file, name, f"has {len(dimensions):,} dimensions, over the limit of {_MOST_DIMENSIONS}")
    # Most tensors of a file are experts of a few shapes: sharing the tuples keeps half a million entries small.
    shape = shapes.setdefault(dimensions, dimensions)
    span = _naturals(entry["data_offsets"])
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise _bad(file, name, f"has data_offsets {shown(entry['data_offsets'])} where [begin, end] is due")
    nbytes = _product(shape, storage.itemsize)
    if nbytes is None or nbytes != span[1] - span[0]:
        size = "far too many" if nbytes is None else f"{nbytes:,}"
        raise _bad(
            file, name, f"is {dtype} {shown(list(shape))}, {size} bytes, but data_offsets span {span[1] - span[0]:,}"
        )
    return TensorInfo(name, sys.intern(dtype), shape, file, start + span[0], nbytes)


def _check_encodable(file: str, name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise WeightsInvalid(f"{file}: the tensor name {ascii(name)[:120]} is not valid text") from None


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    for item in value:
        if type(item) is not int or item < 0:
            return None
    return tuple(value)


def _product(shape: tuple[int, ...], itemsize: int) -> int | None:
    """Bytes of an array of that shape, or None once they pass what a file can hold (so absurd shapes cost nothing)."""
    size = itemsize
    for dimension in shape:
        size *= dimension or 1
        if size > _MOST_TENSOR_BYTES:
            return None
    return 0 if 0 in shape else size


def _check_cover(file: str, tensors: list[TensorInfo], start: int, file_bytes: int) -> None:
    """The tensors must tile the data: neither share a byte nor leave one to nobody."""
    end, previous = start, None
    for tensor in sorted(tensors, key=attrgetter("offset", "nbytes")):
        if tensor.offset != end:
            raise _not_a_tiling(file, previous, tensor, start)
        if tensor.nbytes:
            end, previous = tensor.offset + tensor.nbytes, tensor
    if end != file_bytes:
        raise wrong_size(file, file_bytes, f"{end:,}")


def _not_a_tiling(file: str, previous: TensorInfo | None, tensor: TensorInfo, start: int) -> WeightsInvalid:
    begin = tensor.offset - start
    if previous is None:
        return WeightsInvalid(
            f"{file}: bytes [0, {begin:,}) of the data, before {shown(tensor.name)}, belong to no tensor"
        )
    first_begin = previous.offset - start
    first_end = first_begin + previous.nbytes
    if begin > first_end:
        return WeightsInvalid(
            f"{file}: bytes [{first_end:,}, {begin:,}) of the data, between {shown(previous.name)} and "
            f"{shown(tensor.name)}, belong to no tensor"
        )
    return WeightsInvalid(
        f"{file}: the tensors {shown(previous.name)} at bytes [{first_begin:,}, {first_end:,}) and "
        f"{shown(tensor.name)} at [{begin:,}, {begin + tensor.nbytes:,}) of the data overlap"
    )


def _bad(file: str, name: str, problem: str) -> WeightsInvalid:
    return WeightsInvalid(f"{file}: tensor {shown(name)} {problem}")
