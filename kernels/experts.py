"""One routed expert as a record of bytes: its three matrices in the layout the kernels read.

An expert maps a latent to a latent: ``w2 @ activation(w1 @ x, w3 @ x)`` with w1 and w3 ``[inner, latent]`` and w2
``[latent, inner]``. A record holds the data of w1, w3 and w2 (:mod:`serai.kernels.matrix`), then their scales in the
same order, and is filled up to a multiple of 4096 bytes, so that direct reads and page-aligned slots fit it.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import matrix
from serai.kernels.matrix import GROUP, LANES, Format

_PAGE_BYTES = 4096
_COLUMN_BYTES = {Format.F32: 64, Format.BF16: 32, Format.MXFP4: 8}
_DTYPES = {Format.F32: np.float32, Format.BF16: np.uint16, Format.MXFP4: np.uint8}


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where a record keeps what. Raises ValueError for MXFP4 sizes that are no multiple of 32."""

    format: Format
    latent: int
    inner: int
    offsets: tuple[int, int, int, int, int, int, int] = field(init=False, repr=False, compare=False)
    """Byte offsets of the data of w1, w3, w2, of the scales of w1, w3, w2 (empty unless MXFP4), and of the end."""

    def __post_init__(self) -> None:
        if self.latent < 1 or self.inner < 1:
            raise ValueError(f"an expert needs a latent and an inner size, not {self.latent} and {self.inner}.")
        if self.format is Format.MXFP4 and (self.latent % GROUP or self.inner % GROUP):
            raise ValueError(f"MXFP4 experts need multiples of {GROUP}, not {self.latent} and {self.inner}.")
        sizes = [-(-n // LANES) * k * _COLUMN_BYTES[self.format] for n, k in self._shapes]
        has_scales = self.format is Format.MXFP4
        sizes += [-(-n // LANES) * (k // GROUP) * LANES if has_scales else 0 for n, k in self._shapes]
        w1, w3, w2, s1, s3, s2, end = (sum(sizes[:i]) for i in range(7))
        object.__setattr__(self, "offsets", (w1, w3, w2, s1, s3, s2, end))

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """[N, K] of w1, w3 and w2."""
        return (self.inner, self.latent), (self.inner, self.latent), (self.latent, self.inner)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record, a multiple of 4096."""
        return -(-self.offsets[-1] // _PAGE_BYTES) * _PAGE_BYTES


def pack_expert(layout: ExpertLayout, w1: Any, w3: Any, w2: Any, out: NDArray[np.uint8]) -> None:
    """Write an expert's record into ``out`` (uint8, ``record_bytes`` long, starting at a multiple of 64).

    Each matrix is what the checkpoint holds: float32 or uint16 ``[N, K]``, or for MXFP4 the pair (packed ``[N, K/2]``,
    scales ``[N, K/32]``). Uses no other thread, so that several readers can call it beside a step. Raises ValueError
    when shapes, dtypes or ``out`` do not fit the layout.
    """
    if out.shape != (layout.record_bytes,) or out.dtype != np.uint8:
        raise ValueError(f"a record is uint8 [{layout.record_bytes}], not {out.dtype} {list(out.shape)}.")
    offsets = layout.offsets
    for i, (weights, shape) in enumerate(zip((w1, w3, w2), layout._shapes, strict=True)):
        data = out[offsets[i] : offsets[i + 1]] if i < 2 else out[offsets[2] : offsets[3]]
        if layout.format is Format.MXFP4:
            _pack_mxfp4(weights, shape, data, out[offsets[3 + i] : offsets[4 + i]])
        else:
            _pack_plain(layout.format, weights, shape, data)
    out[offsets[-1] :] = 0


def _pack_plain(weight_format: Format, w: NDArray[Any], shape: tuple[int, int], data: NDArray[np.uint8]) -> None:
    if w.shape != shape or matrix.plain_format(w) is not weight_format:
        raise ValueError(
            f"an expert's matrix must be {weight_format.value} {list(shape)}, not {w.dtype} {list(w.shape)}."
        )
    matrix.interleave_plain(np.ascontiguousarray(w)[np.newaxis], data.view(_DTYPES[weight_format]), spread=False)


def _pack_mxfp4(
    w: tuple[NDArray[np.uint8], NDArray[np.uint8]],
    shape: tuple[int, int],
    data: NDArray[np.uint8],
    scales: NDArray[np.uint8],
) -> None:
    packed, shipped_scales = w
    matrix.check_mxfp4(packed, shipped_scales)
    if packed.shape != (shape[0], shape[1] // 2):
        raise ValueError(f"an expert's MXFP4 matrix must be {list(shape)}, not {[len(packed), 2 * packed.shape[1]]}.")
    matrix.interleave_mxfp4(packed, shipped_scales, data, scales, spread=False)
