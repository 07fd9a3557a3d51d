"""Where an expert's record comes from: the released checkpoint as it is, or one packed before.

A record is one expert in the layout the kernels read (`serai.kernels.experts.ExpertLayout`), `record_bytes` long, a
whole number of pages. Both sources give the same bytes for the same expert.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout, pack_expert
from serai.kernels.matrix import Format
from serai.runtime.errors import WeightsInvalid
from serai.runtime.experts.cache import PAGE_BYTES
from serai.runtime.experts.disk import DiskCalls, DiskFiles, ReadMode
from serai.runtime.experts.packed_format import PackedModel
from serai.runtime.models.config import ExpertFormat, ModelConfig
from serai.runtime.models.dtypes import STORAGE
from serai.runtime.models.safetensors_files import CheckpointFiles
from serai.runtime.models.safetensors_header import TensorInfo
from serai.runtime.models.tensor_table import expert_layers, expert_stem, expert_tensors

_BRIDGED_BYTES = 2 * PAGE_BYTES
"""Tensors with no more than this between them are read in one go; the gap costs less than another read would."""


class ExpertSource(Protocol):
    """Gives records; any number of threads may read at once, each with a scratch array of its own."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have experts, counted from 0."""
        ...

    @property
    def experts(self) -> int:
        """Experts in each of them."""
        ...

    @property
    def layout(self) -> ExpertLayout: ...

    @property
    def record_bytes(self) -> int: ...

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch, beginning at a page, that one read needs."""
        ...

    @property
    def mode(self) -> ReadMode: ...

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        """Fill `record`, uint8 `[record_bytes]` at a page, and give the bytes read from disk.

        Raises `FileEnded` or `OSError`, which leave the record in any state.
        """
        ...

    def path(self, layer: int, expert: int) -> Path:
        """The file that holds the expert, or its first part."""
        ...

    def spans(self, layer: int, expert: int) -> Sequence["Span"]:
        """The runs of bytes that reading the expert takes from its files."""
        ...

    def read_span(self, span: "Span", out: NDArray[np.uint8]) -> None:
        """Read one run into whole pages, and do nothing else: what a disk can give at most."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `[offset, offset + nbytes)` of a file, widened to the whole pages `[start, start + page_bytes)`."""

    path: Path
    offset: int
    nbytes: int

    @property
    def start(self) -> int:
        return self.offset - self.offset % PAGE_BYTES

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def page_bytes(self) -> int:
        return -(-(self.end - self.start) // PAGE_BYTES) * PAGE_BYTES


class DirectSource:
    """Experts from the original shards, at their offsets, laid out for the kernels as they arrive."""

    mode: ReadMode

    def __init__(
        self, config: ModelConfig, files: CheckpointFiles, prefix: str, calls: DiskCalls | None = None
    ) -> None:
        """`files` must have passed `check_tensors`. Raises `WeightsInvalid` when a shard can't be opened."""
        if config.moe is None:
            raise ValueError("a model without experts has none to read")
        self.layers = expert_layers(config)
        self.experts = config.moe.experts
        self.layout = expert_layout(config, files, prefix)
        self.record_bytes = self.layout.record_bytes
        self._tensors = files
        self._prefix = prefix
        self._parts = tuple(expert_tensors(config))
        self._packed = config.expert_format is ExpertFormat.MXFP4
        first = self._infos(self.layers[0], 0).values()  # experts are alike
        self.scratch_bytes = sum(
            -(-info.nbytes // PAGE_BYTES) * PAGE_BYTES + 2 * PAGE_BYTES + _BRIDGED_BYTES for info in first
        )
        names = {info.file for info in files.tensors.values()}
        self._files = DiskFiles([files.folder / name for name in sorted(names)], calls)
        self.mode = self._files.mode

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        (w1, w3, w2), read_bytes = self.matrices(layer, expert, scratch)
        pack_expert(self.layout, w1, w3, w2, record)
        return read_bytes

    def matrices(self, layer: int, expert: int, scratch: NDArray[np.uint8]) -> tuple[tuple[Any, Any, Any], int]:
        """w1, w3 and w2 as stored (a packed one as weights and scales), lying in `scratch`; and the bytes read."""
        infos = self._infos(layer, expert)
        where: dict[Path, list[tuple[Span, NDArray[np.uint8]]]] = {}
        taken = 0
        for span in _spans([(self._tensors.path_of(info), info) for info in infos.values()]):
            pages = scratch[taken : taken + span.page_bytes]
            self.read_span(span, pages)
            where.setdefault(span.path, []).append((span, pages))
            taken += span.page_bytes
        arrays = {part: _cut(where[self._tensors.path_of(info)], info) for part, info in infos.items()}
        w1, w3, w2 = (self._matrix(arrays, name) for name in ("w1", "w3", "w2"))
        return (w1, w3, w2), taken

    def path(self, layer: int, expert: int) -> Path:
        return self._tensors.path_of(next(iter(self._infos(layer, expert).values())))

    def spans(self, layer: int, expert: int) -> Sequence[Span]:
        return _spans([(self._tensors.path_of(info), info) for info in self._infos(layer, expert).values()])

    def read_span(self, span: Span, out: NDArray[np.uint8]) -> None:
        self._files[span.path].read(span.start, out, span.end - span.start)

    def close(self) -> None:
        self._files.close()

    def _infos(self, layer: int, expert: int) -> dict[str, TensorInfo]:
        stem = self._prefix + expert_stem(layer, expert)
        return {part: self._tensors.tensors[stem + part] for part in self._parts}

    def _matrix(self, arrays: Mapping[str, NDArray[Any]], name: str) -> Any:
        if self._packed:
            return arrays[name + ".weight_packed"], arrays[name + ".weight_scale"]
        return arrays[name + ".weight"]


class PackedSource:
    """Experts from a packed model: one read a record, straight into its slot."""

    scratch_bytes = 0

    def __init__(self, model: PackedModel, calls: DiskCalls | None = None) -> None:
        """Raises `WeightsInvalid` when a file can't be opened."""
        self.layers = tuple(model.records)
        self.experts = model.experts
        self.layout = model.layout
        self.record_bytes = model.record_bytes
        self._model = model
        self._files = DiskFiles([model.folder / info.file for info in model.records.values()], calls)
        self.mode: ReadMode = self._files.mode

    def read(self, layer: int, expert: int, record: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> int:
        (span,) = self.spans(layer, expert)
        self.read_span(span, record)
        return span.nbytes

    def path(self, layer: int, expert: int) -> Path:
        return self._model.folder / self._model.records[layer].file

    def spans(self, layer: int, expert: int) -> Sequence[Span]:
        offset = self._model.records[layer].offset + expert * self.record_bytes
        return (Span(self.path(layer, expert), offset, self.record_bytes),)

    def read_span(self, span: Span, out: NDArray[np.uint8]) -> None:
        self._files[span.path].read(span.start, out, span.end - span.start)

    def close(self) -> None:
        self._files.close()


def open_source(
    config: ModelConfig, files: CheckpointFiles, prefix: str, calls: DiskCalls | None = None
) -> DirectSource | PackedSource:
    """The source a model folder is: packed when it says so, the release as it is otherwise.

    Raises `WeightsInvalid` when a packed model was made for another record layout than this version reads.
    """
    packed = PackedModel.find(config, files, prefix)
    return DirectSource(config, files, prefix, calls) if packed is None else PackedSource(packed, calls)


def expert_layout(config: ModelConfig, files: CheckpointFiles, prefix: str) -> ExpertLayout:
    """The layout of this checkpoint's experts, as its headers and its configuration say."""
    moe = config.moe
    if moe is None:
        raise ValueError("a model without experts has no layout for them")
    if config.expert_format is ExpertFormat.MXFP4:
        return ExpertLayout(Format.MXFP4, moe.latent, moe.inner)
    dtype = files.info(prefix + expert_stem(expert_layers(config)[0], 0) + "w1.weight").dtype
    formats = {"BF16": Format.BF16, "F32": Format.F32}
    if dtype not in formats:
        raise WeightsInvalid(f"routed experts are {dtype}, but must be BF16, F32 or packed MXFP4")
    return ExpertLayout(formats[dtype], moe.latent, moe.inner)


def _spans(tensors: Sequence[tuple[Path, TensorInfo]]) -> list[Span]:
    """The runs that hold these tensors, in order of file and offset; near neighbours share one."""
    spans: list[Span] = []
    for path, info in sorted(tensors, key=lambda one: (one[0], one[1].offset)):
        if spans and spans[-1].path == path and info.offset - spans[-1].end <= _BRIDGED_BYTES:
            end = max(spans[-1].end, info.offset + info.nbytes)
            spans[-1] = Span(path, spans[-1].offset, end - spans[-1].offset)
        else:
            spans.append(Span(path, info.offset, info.nbytes))
    return spans


def _cut(pieces: Sequence[tuple[Span, NDArray[np.uint8]]], info: TensorInfo) -> NDArray[Any]:
    """A tensor out of the pages read, as stored."""
    span, pages = next(
        (span, pages) for span, pages in pieces if span.offset <= info.offset and info.offset + info.nbytes <= span.end
    )
    data = pages[info.offset - span.start : info.offset - span.start + info.nbytes]
    # A shard may begin a tensor at any byte; the kernels read whole numbers where they lie.
    dtype = STORAGE[info.dtype]
    return (data if data.ctypes.data % dtype.itemsize == 0 else data.copy()).view(dtype).reshape(info.shape)
