"""Reading F32 and BF16 blocks (:mod:`serai.kernels.matrix`) into registers, for :mod:`serai.kernels.exact`."""

from typing import Any

from serai.kernels.compile import inline
from serai.kernels.memory import f32_at, u16_at
from serai.kernels.simd import bf16_to_f32, splat_f32

PLAIN_BLOCK = 128
"""Columns whose products are summed in one chain."""
F32_COLUMN_BYTES = 64
BF16_COLUMN_BYTES = 32


@inline
def f32_column(w: int) -> Any:
    """One column of sixteen outputs."""
    return f32_at(w)


@inline
def f32_columns(w: int) -> Any:
    """Eight columns of sixteen outputs."""
    low = (f32_at(w), f32_at(w + 64), f32_at(w + 128), f32_at(w + 192))
    return (*low, f32_at(w + 256), f32_at(w + 320), f32_at(w + 384), f32_at(w + 448))


@inline
def bf16_column(w: int) -> Any:
    """One column of sixteen outputs, widened."""
    return bf16_to_f32(u16_at(w))


@inline
def bf16_columns(w: int) -> Any:
    """Eight columns of sixteen outputs, widened."""
    low = (bf16_column(w), bf16_column(w + 32), bf16_column(w + 64), bf16_column(w + 96))
    return (*low, bf16_column(w + 128), bf16_column(w + 160), bf16_column(w + 192), bf16_column(w + 224))


@inline
def unit_scale(scale: int) -> Any:
    """F32 and BF16 blocks have no scale."""
    return splat_f32(1.0)
