"""Safetensors element types as NumPy arrays. NumPy has no bfloat16 or 8-bit floats: those are held as raw bits."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "BF16": "<u2",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
        "F8_E8M0": "u1",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "u1",
        "BOOL": "u1",
    }.items()
}
"""What an array of each element type is held as. A type that isn't here is refused when the header is read."""


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 value of each bfloat16, exactly: a bfloat16 is the upper half of the float32 it stands for."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def as_float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """An array as read from a file of element type F32, BF16 or F16, as float32; exact, same shape."""
    if dtype == "BF16":
        return widen_bf16(values)
    if dtype in ("F32", "F16"):
        return values.astype(np.float32, copy=False)
    raise ValueError(f"{dtype} is not a floating-point type that widens to float32")
