"""The records of a packed model, made from the released experts: as they are, or quantised to MXFP4."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout, pack_expert
from serai.kernels.matrix import Format
from serai.kernels.q4 import quantise_mxfp4
from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.errors import FileEnded, PackFailed
from serai.runtime.experts.source import DirectSource
from serai.runtime.models.dtypes import widen_bf16


class _Made(NamedTuple):
    record: NDArray[np.uint8]
    squared_error: float
    squared_weights: float


class RecordMaker:
    """Makes a layer's records with a few threads; `close` it."""

    def __init__(self, source: DirectSource, *, quantise: bool, threads: int) -> None:
        """`quantise` takes BF16 or F32 experts to MXFP4. The source is closed with this."""
        released = source.layout
        self.layout = ExpertLayout(Format.MXFP4, released.latent, released.inner) if quantise else released
        self._source = source
        self._quantise = quantise
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="serai-pack")
        self._own = threading.local()
        self._squared_error = self._squared_weights = 0.0

    @property
    def relative_error(self) -> float | None:
        """Root mean square of what quantising changed, over that of the weights; None when nothing was quantised."""
        return sqrt(self._squared_error / self._squared_weights) if self._squared_weights else None

    def records(self, layer: int) -> Iterator[NDArray[np.uint8]]:
        """The layer's records in order of expert, a few made ahead. Raises `PackFailed`, naming the expert."""
        ahead: deque[Future[_Made]] = deque()
        for expert in range(self._source.experts):
            ahead.append(self._pool.submit(self._make, layer, expert))
            if len(ahead) == 2 * self._threads:
                yield self._take(ahead.popleft())
        while ahead:
            yield self._take(ahead.popleft())

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._source.close()

    def _take(self, future: Future[_Made]) -> NDArray[np.uint8]:
        made = future.result()
        self._squared_error += made.squared_error
        self._squared_weights += made.squared_weights
        return made.record

    def _make(self, layer: int, expert: int) -> _Made:
        if not hasattr(self._own, "scratch"):
            self._own.scratch = aligned_bytes(self._source.scratch_bytes)
        record = aligned_bytes(self.layout.record_bytes)
        try:
            if not self._quantise:
                self._source.read(layer, expert, record, self._own.scratch)
                return _Made(record, 0.0, 0.0)
            matrices, _ = self._source.matrices(layer, expert, self._own.scratch)
            return self._quantised(matrices, record)
        except (OSError, FileEnded, ValueError) as failure:
            path = self._source.path(layer, expert)
            raise PackFailed(f"expert {expert} of layer {layer} in {path} can't be packed: {failure}") from failure

    def _quantised(self, matrices: tuple[Any, Any, Any], record: NDArray[np.uint8]) -> _Made:
        packed = []
        error = weights = 0.0
        for matrix in matrices:
            values: NDArray[np.float32] = matrix if matrix.dtype == np.float32 else widen_bf16(matrix)
            codes, scales, squared_error = quantise_mxfp4(values)
            packed.append((codes, scales))
            error += squared_error
            weights += float(np.vdot(values, values))
        pack_expert(self.layout, packed[0], packed[1], packed[2], record)
        return _Made(record, error, weights)
