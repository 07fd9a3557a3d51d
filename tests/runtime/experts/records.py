"""Experts whose bytes say which they are, in memory or in files."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout
from serai.kernels.matrix import Format
from serai.runtime.experts.cache import PAGE_BYTES
from serai.runtime.experts.disk import DiskCalls, DiskFile, ReadMode
from serai.runtime.experts.source import Span

LAYOUT = ExpertLayout(Format.F32, 16, 16)
LAYERS = (1, 2)
EXPERTS = 8


def expected_record(layer: int, expert: int) -> NDArray[np.uint8]:
    """What the record of an expert holds."""
    rng = np.random.default_rng((layer, expert))
    record: NDArray[np.uint8] = rng.integers(0, 256, LAYOUT.record_bytes, dtype=np.uint8)
    return record


class RecordFile:
    """A source over one plain file of records; the disk under it may misbehave."""

    layers = LAYERS
    experts = EXPERTS
    layout = LAYOUT
    record_bytes = LAYOUT.record_bytes
    scratch_bytes = PAGE_BYTES

    def __init__(self, folder: Path, calls: DiskCalls | None = None) -> None:
        self.file = folder / "records"
        self.file.write_bytes(
            b"".join(expected_record(layer, expert).tobytes() for layer in LAYERS for expert in range(EXPERTS))
        )
        self._disk = DiskFile.open(self.file, calls)
        self.mode: ReadMode = self._disk.mode
        self.closed = False

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        assert scratch.nbytes == PAGE_BYTES
        (span,) = self.spans(layer, expert)
        self.read_span(span, record)
        return span.nbytes

    def path(self, layer: int, expert: int) -> Path:
        return self.file

    def spans(self, layer: int, expert: int) -> Sequence[Span]:
        place = LAYERS.index(layer) * EXPERTS + expert
        return (Span(self.file, place * self.record_bytes, self.record_bytes),)

    def read_span(self, span: Span, out: NDArray[np.uint8]) -> None:
        self._disk.read(span.start, out, span.nbytes)

    def close(self) -> None:
        self._disk.close()
        self.closed = True


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def at_address(address: int) -> NDArray[np.uint8]:
    """The record that lies at an address."""
    return np.frombuffer(ctypes.string_at(address, LAYOUT.record_bytes), dtype=np.uint8)
