"""Weight matrices in the layout the kernels read: sixteen outputs side by side.

A matrix ``W [N, K]`` (or ``heads`` of them) multiplies activations as ``out[n] = sum_k W[n, k] x[k]``. Blocks of
sixteen rows are interleaved, so that one load gives sixteen outputs' weights of one column and no sum across lanes is
needed:

=====  ================================================  ==========================
format data                                              scales
=====  ================================================  ==========================
F32    float32 ``[heads][ceil(N/16)][K][16]``            none
BF16   uint16 ``[heads][ceil(N/16)][K][16]``             none
MXFP4  uint8 ``[ceil(N/16)][K/32][4][16][4]``            uint8 ``[ceil(N/16)][K/32][16]``
Q8     int8 ``[ceil(N/16)][K/32][8][16][4]``             bfloat16, as bytes, likewise
=====  ================================================  ==========================

An MXFP4 block is 16 rows x 32 columns in 256 bytes: for each run of eight columns 64 bytes, four a row; the low nibbles
hold the first four columns, the high ones the last four. Scales stay E8M0 bytes. Rows beyond N are zero.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import pack as _pack
from serai.kernels import q4 as _q4
from serai.kernels import q8 as _q8
from serai.kernels.arrays import weight_array

LANES = 16
GROUP = _q4.GROUP
"""Columns that share a scale, in MXFP4 weights and in 8-bit activations."""

_WORTH_SPREADING_BYTES = 1 << 16


class Format(Enum):
    """How a matrix's weights are stored."""

    F32 = "f32"
    BF16 = "bf16"
    MXFP4 = "mxfp4"
    Q8 = "q8"


@dataclass(frozen=True, slots=True, repr=False)
class Matrix:
    """A packed weight matrix: ``rows`` outputs and ``cols`` inputs a head; the module says how ``data`` is laid out."""

    format: Format
    heads: int
    rows: int
    cols: int
    data: NDArray[Any]
    scales: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    @property
    def blocks(self) -> int:
        """Blocks of sixteen rows in a head, the last one perhaps partly zero."""
        return -(-self.rows // LANES)

    def __repr__(self) -> str:
        heads = f"{self.heads} x " if self.heads > 1 else ""
        return f"<Matrix {self.format.value} {heads}[{self.rows}, {self.cols}], {self.nbytes} bytes>"


_NO_SCALES: NDArray[np.uint8] = np.empty(0, np.uint8)


def pack(w: NDArray[Any]) -> Matrix:
    """Pack ``[N, K]`` weights: float32 as F32, uint16 (bfloat16 bits) as BF16. Raises ValueError for others."""
    return pack_heads(_matrix_of(w)[np.newaxis])


def pack_f32(w: NDArray[np.float32]) -> Matrix:
    """Pack float32 ``[N, K]``."""
    if w.dtype != np.float32:
        raise ValueError(f"pack_f32 takes float32 weights, not {w.dtype}.")
    return pack(w)


def pack_bf16(bits: NDArray[np.uint16]) -> Matrix:
    """Pack bfloat16 bits (uint16) ``[N, K]``."""
    if bits.dtype != np.uint16:
        raise ValueError(f"pack_bf16 takes bfloat16 bits as uint16, not {bits.dtype}.")
    return pack(bits)


def pack_heads(w: NDArray[Any] | Sequence[NDArray[Any]]) -> Matrix:
    """Pack ``[heads, N, K]`` weights (or a list of ``[N, K]``), float32 or bfloat16 bits (uint16)."""
    stacked = np.ascontiguousarray(w if isinstance(w, np.ndarray) else np.stack(list(w)))
    if stacked.ndim != 3 or 0 in stacked.shape:
        raise ValueError(f"weights must have shape [heads, N, K] with nothing empty, not {list(stacked.shape)}.")
    heads, rows, cols = stacked.shape
    weight_format = plain_format(stacked)
    data = weight_array(heads * -(-rows // LANES) * cols * LANES, stacked.dtype)
    interleave_plain(stacked, data, spread=stacked.nbytes > _WORTH_SPREADING_BYTES)
    return Matrix(weight_format, heads, rows, cols, data, _NO_SCALES)


def plain_format(w: NDArray[Any]) -> Format:
    """F32 for float32, BF16 for uint16. Raises ValueError for others."""
    formats = {np.dtype(np.float32): Format.F32, np.dtype(np.uint16): Format.BF16}
    if w.dtype not in formats:
        raise ValueError(f"weights must be float32 or bfloat16 bits (uint16), not {w.dtype}.")
    return formats[w.dtype]


def interleave_plain(w: NDArray[Any], data: NDArray[Any], spread: bool) -> None:
    """Lay out ``w [heads, N, K]``, C-contiguous, in ``data``, flat and of the same dtype; on the pool if ``spread``."""
    heads, rows, cols = w.shape
    if w.dtype == np.float32:
        _pack.interleave_u32(w.reshape(-1).view(np.uint32), data.view(np.uint32), heads, rows, cols, spread)
    else:
        _pack.interleave_u16(w.reshape(-1), data, heads, rows, cols, spread)


def pack_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Matrix:
    """Pack MXFP4 as shipped: ``packed [N, K/2]`` (low nibble = even column), ``scales [N, K/32]`` E8M0 bytes."""
    rows, half = _matrix_of(packed).shape
    check_mxfp4(packed, scales)
    groups = -(-rows // LANES) * (2 * half // GROUP)
    data, out_scales = weight_array(groups * 256, np.uint8), weight_array(groups * LANES, np.uint8)
    interleave_mxfp4(packed, scales, data, out_scales, spread=packed.nbytes > _WORTH_SPREADING_BYTES)
    return Matrix(Format.MXFP4, 1, rows, 2 * half, data, out_scales)


def pack_q8(w: NDArray[Any]) -> Matrix:
    """Quantise float32 or bfloat16 (uint16) ``[N, K]`` weights to 8 bits with a scale per 32 columns, and pack them.

    Relative error on Gaussian weights: 0.55 %. Raises ValueError unless K is a multiple of 32.
    """
    rows, cols = _matrix_of(w).shape
    if cols % GROUP:
        raise ValueError(f"Q8 weights need a multiple of {GROUP} columns, not {cols}.")
    groups = -(-rows // LANES) * (cols // GROUP)
    data, scales = weight_array(groups * LANES * GROUP, np.int8), weight_array(groups * LANES, np.uint16)
    quantize = _q8.quantize_f32 if plain_format(w) is Format.F32 else _q8.quantize_bf16
    quantize(np.ascontiguousarray(w), data, scales, w.nbytes > _WORTH_SPREADING_BYTES)
    return Matrix(Format.Q8, 1, rows, cols, data.view(np.uint8), scales.view(np.uint8))


def pack_q4(w: NDArray[Any]) -> Matrix:
    """Quantise float32 or bfloat16 (uint16) ``[N, K]`` weights to MXFP4, and pack them.

    Relative error on Gaussian weights: 11 %. Raises ValueError unless K is a multiple of 32, and for weights that are
    not finite.
    """
    wide = w if plain_format(_matrix_of(w)) is Format.F32 else _widen(w)
    packed, scales, _ = _q4.quantise_mxfp4(wide, spread=w.nbytes > _WORTH_SPREADING_BYTES)
    return pack_mxfp4(packed, scales)


def interleave_mxfp4(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    data: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
    spread: bool,
) -> None:
    """Lay out shipped MXFP4 weights in two flat arrays, on the pool if ``spread``."""
    _pack.interleave_mxfp4(np.ascontiguousarray(packed), np.ascontiguousarray(scales), data, out_scales, spread)


def check_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> None:
    """Raise ValueError unless the two arrays are one MXFP4 matrix."""
    if packed.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"MXFP4 weights and scales must be uint8, not {packed.dtype} and {scales.dtype}.")
    rows, half = packed.shape
    if 2 * half % GROUP:
        raise ValueError(f"MXFP4 weights need a multiple of {GROUP} columns, not {2 * half}.")
    if scales.shape != (rows, 2 * half // GROUP):
        raise ValueError(
            f"MXFP4 scales must be {[rows, 2 * half // GROUP]} for these weights, not {list(scales.shape)}."
        )


def concat(
    pieces: Sequence[NDArray[Any]], align: int = LANES, *, packed: Callable[[NDArray[Any]], Matrix] = pack
) -> tuple[Matrix, tuple[int, ...]]:
    """Several ``[N_i, K]`` weights of one input as one matrix, and the output column where each begins.

    Every piece starts at a multiple of ``align`` (itself a multiple of 16) outputs; the outputs between are zero. BF16
    pieces among F32 ones are widened, which changes no value and no bit of a product. ``packed`` may quantise.
    """
    if align <= 0 or align % LANES:
        raise ValueError(f"align must be a positive multiple of {LANES}, not {align}.")
    checked = [_matrix_of(piece) for piece in pieces]
    if len({piece.shape[1] for piece in checked}) != 1:
        raise ValueError(f"the pieces of one product need the same columns, not {[p.shape[1] for p in checked]}.")
    dtype = np.uint16 if all(piece.dtype == np.uint16 for piece in checked) else np.float32
    heights = [-(-piece.shape[0] // align) * align for piece in checked]
    starts = [sum(heights[:i]) for i in range(len(heights))]
    whole = np.zeros((sum(heights), checked[0].shape[1]), dtype)
    for piece, start in zip(checked, starts, strict=True):
        whole[start : start + piece.shape[0]] = piece if piece.dtype == dtype else _widen(piece)
    return packed(whole), tuple(starts)


def unpack(matrix: Matrix) -> NDArray[np.float32]:
    """The weights as float32 ``[heads, rows, cols]``: exactly what products see."""
    heads, blocks, cols = matrix.heads, matrix.blocks, matrix.cols
    if matrix.format is Format.MXFP4:
        values = _unpack_mxfp4(matrix)
    elif matrix.format is Format.Q8:
        values = _unpack_q8(matrix)
    else:
        rows = matrix.data.reshape(heads, blocks, cols, LANES).transpose(0, 1, 3, 2)
        stored = rows.reshape(heads, blocks * LANES, cols)[:, : matrix.rows]
        values = _widen(stored) if matrix.format is Format.BF16 else stored
    return np.ascontiguousarray(values)


def _unpack_mxfp4(matrix: Matrix) -> NDArray[np.float32]:
    halves = matrix.data.reshape(matrix.blocks, matrix.cols // GROUP, 4, LANES, 4)
    codes = np.stack([halves & 15, halves >> 4], axis=3)  # [block, group, run, nibble, lane, column]
    codes = codes.transpose(0, 4, 1, 2, 3, 5).reshape(matrix.blocks * LANES, matrix.cols // GROUP, GROUP)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values = np.where(codes & 8, -table[codes & 7], table[codes & 7])
    exponents = matrix.scales.reshape(matrix.blocks, -1, LANES).transpose(0, 2, 1).reshape(matrix.blocks * LANES, -1)
    scaled: NDArray[np.float32] = np.ldexp(values, exponents.astype(np.int32)[:, :, np.newaxis] - 127)
    return scaled.reshape(1, -1, matrix.cols)[:, : matrix.rows]


def _unpack_q8(matrix: Matrix) -> NDArray[np.float32]:
    groups = matrix.cols // GROUP
    codes = matrix.data.view(np.int8).reshape(matrix.blocks, groups, 8, LANES, 4).transpose(0, 3, 1, 2, 4)
    values = codes.reshape(matrix.blocks * LANES, groups, GROUP).astype(np.float32)
    scales = _widen(matrix.scales.view(np.uint16)).reshape(matrix.blocks, groups, LANES).transpose(0, 2, 1)
    scaled: NDArray[np.float32] = values * scales.reshape(matrix.blocks * LANES, groups, 1)
    return scaled.reshape(1, -1, matrix.cols)[:, : matrix.rows]


def _widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _matrix_of(w: NDArray[Any]) -> NDArray[Any]:
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(f"weights must have shape [N, K] with nothing empty, not {list(w.shape)}.")
    return w
