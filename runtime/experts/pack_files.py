"""Safetensors files written whole or not at all, a piece at a time."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from serai.runtime.experts.cache import PAGE_BYTES
from serai.runtime.experts.errors import PackFailed

Piece = bytes | memoryview


class StoredTensor(NamedTuple):
    """A tensor of a file to write: safetensors name of the element type, shape, and size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to write: its tensors in order, and what gives their bytes, in order, when it is written."""

    name: str
    tensors: Sequence[StoredTensor]
    data: Callable[[], Iterable[Piece]]

    @property
    def header(self) -> bytes:
        """Length and header, padded with spaces so that the data begins at a page."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape, nbytes in self.tensors:
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE_BYTES)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    def is_whole_in(self, folder: Path) -> bool:
        """Whether the folder has it: a file gets its name only once all of it is durable."""
        path = folder / self.name
        return path.is_file() and path.stat().st_size == self.nbytes

    def pieces(self) -> Iterator[Piece]:
        yield self.header
        yield from self.data()


def write_whole(folder: Path, name: str, pieces: Iterable[Piece], wrote: Callable[[int], None] | None = None) -> None:
    """Write a file beside its name, make it durable, then give it its name; `wrote(n)` after each n bytes.

    Raises `PackFailed` when the disk refuses.
    """
    unfinished = folder / (name + ".part")
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                if wrote is not None:
                    wrote(len(piece))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                # Nobody reads it soon, so its pages need not push others out of memory.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        unfinished.rename(folder / name)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PackFailed(f"{unfinished} can't be written ({error.strerror or error})") from error
