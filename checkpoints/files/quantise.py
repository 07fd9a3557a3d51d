"""Smaller number types for stored snapshots: bfloat16, and int8 with one scale per row. Both are an explicit choice,
never a default.

A row is what an array's last axis holds. Of a KDA state in panels those are the 16 columns of a panel, so int8 rows
take 1.25 bytes a number: 135.7 MB for K3's 69 layers, beside 217.1 in bfloat16 and 434.1 in float32. One scale for all
128 columns of a key channel, as states by rows had, would take 111.9 MB and round more coarsely.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.files.manifest import StoredAs

_INT8_MAX: Final = 127


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 (ties to even) of float32 values of any shape; NaN stays NaN, overflow becomes
    infinity.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Float32 values of bfloat16 bits, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_int8_rows(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """`(codes, scales)` of values `[..., n]`: int8 of the same shape and float32 `[...]`, with value ≈ code · scale.

    The scale is the row's largest magnitude over 127, so the error of a value is at most half of it. Rows must be
    finite.
    """
    if not np.isfinite(values).all():
        raise ValueError("int8 rows hold finite numbers only, and the state has a NaN or infinity")
    scales = (np.max(np.abs(values), axis=-1, initial=0.0) / _INT8_MAX).astype(np.float32)
    steps = np.where(scales > 0, scales, np.float32(1))[..., None]
    codes = np.clip(np.rint(values / steps), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return codes, scales


def from_int8_rows(codes: NDArray[np.int8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Float32 values of int8 rows and their scales."""
    return codes.astype(np.float32) * scales[..., None]


def to_stored(values: NDArray[Any], stored_as: StoredAs) -> tuple[NDArray[Any], ...]:
    """The arrays that keep `values` (float32, or uint16 bfloat16 bits) in the order of the manifest's tensor specs."""
    match stored_as:
        case StoredAs.SAME:
            return (values,)
        case StoredAs.BFLOAT16:
            return (values if values.dtype == np.uint16 else to_bfloat16(values),)
        case StoredAs.INT8_ROWS:
            return to_int8_rows(from_bfloat16(values) if values.dtype == np.uint16 else values)


def from_stored(arrays: Sequence[NDArray[Any]], stored_as: StoredAs, out: NDArray[Any]) -> None:
    """Put what `to_stored` made back into `out`, as float32 or bfloat16 bits as `out` has it."""
    match stored_as:
        case StoredAs.SAME:
            values: NDArray[Any] = arrays[0]
        case StoredAs.BFLOAT16:
            values = arrays[0] if out.dtype == np.uint16 else from_bfloat16(arrays[0])
        case StoredAs.INT8_ROWS:
            wide = from_int8_rows(arrays[0], arrays[1])
            values = to_bfloat16(wide) if out.dtype == np.uint16 else wide
    np.copyto(out, values)
