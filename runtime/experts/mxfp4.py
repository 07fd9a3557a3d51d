"""Quantising an expert's matrices to MXFP4, the format Kimi K3 is published in (OCP Microscaling: E2M1 under E8M0).

Each run of 32 weights of a row shares a power of two. Two powers are tried and the one with the smaller squared error
kept: the smallest that makes the largest weight fit, and half of that, which cuts the largest weight off at 6 steps but
is finer for the other 31.
"""

import numpy as np
from numpy.typing import NDArray

from serai.runtime.models.config import MXFP4_GROUP

_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
_BIAS = 127
_LEAST_BYTE, _MOST_BYTE = 1, 254
"""Scale byte 0 is read as 2^-127 by some engines and as zero by others, and 255 is no number."""


def quantise_mxfp4(weights: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], float]:
    """Float32 `[N, K]`, K a multiple of 32, as packed uint8 `[N, K/2]` (low nibble = even column) and scale bytes
    `[N, K/32]`; and the sum of the squared errors. Raises ValueError for weights that are not finite."""
    rows, columns = weights.shape
    groups = weights.reshape(rows, columns // MXFP4_GROUP, MXFP4_GROUP)
    largest = np.abs(groups).max(axis=2)
    if not np.isfinite(largest).all():
        raise ValueError("weights that are not finite can't be quantised")
    # frexp gives largest / 6 as m * 2^e with m in [0.5, 1): 2^e is the smallest power that fits, exact powers aside.
    mantissa, exponent = np.frexp(largest / np.float32(6))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    fitting = np.clip(exponent + _BIAS, _LEAST_BYTE, _MOST_BYTE).astype(np.uint8)
    finer = fitting - (fitting > _LEAST_BYTE)
    codes, errors = _round(groups, fitting)
    finer_codes, finer_errors = _round(groups, finer)
    better = finer_errors < 4 * errors  # a step of the finer scale is half one of the fitting
    scales = np.where(better, finer, fitting).astype(np.uint8)
    codes = np.where(better[:, :, np.newaxis], finer_codes, codes).reshape(rows, columns)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    step = np.ldexp(1.0, scales.astype(np.int32) - _BIAS)
    return packed, scales, float((np.where(better, finer_errors, errors) * step**2).sum())


def _round(groups: NDArray[np.float32], scales: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The nearest codes, ties to even, under these scales, and each group's squared error in steps."""
    scaled = np.ldexp(groups, _BIAS - scales.astype(np.int32)[:, :, np.newaxis])
    size = np.abs(scaled)
    codes = np.zeros(groups.shape, dtype=np.uint8)
    for level, odd_below in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 3 + (False,), strict=True):
        codes += size >= level if odd_below else size > level
    errors = ((size - _LEVELS[codes]) ** 2).sum(axis=2)
    codes |= np.signbit(scaled).astype(np.uint8) << 3
    return codes, errors
