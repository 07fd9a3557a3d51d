"""The feed-forward activations.

SwiGLU: ``silu(gate) * up``. SiTU: ``beta tanh(gate / beta) * sigmoid(gate) * linear_beta tanh(up / linear_beta)``.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.mathfn import sigmoid_fraction16, silu16, tanh_fraction16
from serai.kernels.memory import addr, f32_at, f32_at_n, store_at, store_at_n
from serai.kernels.simd import splat_f32
from serai.kernels.threads import parallel_for

_CHUNK = 1024
"""Columns of a row that are one task."""


class Activation(Protocol):
    """Which activation: SwiGLU when ``situ_beta`` is 0, else SiTU, whose second bound may be missing."""

    @property
    def situ_beta(self) -> float: ...

    @property
    def situ_linear_beta(self) -> float | None: ...


def betas(activation: Activation) -> tuple[float, float]:
    """(beta, linear beta) as kernels take them: 0 for what does not apply."""
    return float(activation.situ_beta), float(activation.situ_linear_beta or 0.0)


@inline
def activate16(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    """SwiGLU when beta is 0, else SiTU; a linear beta of 0 leaves ``up`` as it is."""
    if beta == 0.0:
        return silu16(gate) * up
    # One division, not five: it takes as long as a dozen multiplications.
    over, under = tanh_fraction16(gate * splat_f32(1.0 / beta))
    strength, whole = sigmoid_fraction16(gate)
    over, under = splat_f32(beta) * over * strength, under * whole
    if linear_beta == 0.0:
        return over / under * up
    bounded, part = tanh_fraction16(up * splat_f32(1.0 / linear_beta))
    return over * (splat_f32(linear_beta) * bounded) / (under * part)


@inline
def _activate_chunk(task: int, gate: int, up: int, pitch: int, n: int, beta: Any, linear_beta: Any, y: Any) -> None:
    y_at, y_pitch = y
    chunks = (n + _CHUNK - 1) // _CHUNK
    row, first = task // chunks, task % chunks * _CHUNK
    gate, up, y_at = gate + row * pitch, up + row * pitch, y_at + row * y_pitch
    last = min(first + _CHUNK, n)
    for c in range(first, last - 15, 16):
        store_at(y_at + 4 * c, activate16(f32_at(gate + 4 * c), f32_at(up + 4 * c), beta, linear_beta))
    left = (last - first) % 16
    if left:
        c = last - left
        value = activate16(f32_at_n(gate + 4 * c, left), f32_at_n(up + 4 * c, left), beta, linear_beta)
        store_at_n(y_at + 4 * c, value, left)


@kernel("void(f32[:, ::1], i64, i64, i64, f32, f32, f32[:, ::1], i64)", before=threads.start)
def _activate(
    x: NDArray[np.float32],
    gate_col: int,
    up_col: int,
    n: int,
    beta: float,
    linear_beta: float,
    out: NDArray[np.float32],
    out_col: int,
) -> None:
    tasks = x.shape[0] * ((n + _CHUNK - 1) // _CHUNK)
    y = (addr(out, out_col), 4 * out.shape[1])
    args = (addr(x, gate_col), addr(x, up_col), 4 * x.shape[1], n, beta, linear_beta, y)
    parallel_for(tasks, x.shape[0] * n > 4 * _CHUNK, _activate_chunk, args)


def activate(
    x: NDArray[np.float32],
    gate_col: int,
    up_col: int,
    n: int,
    activation: Activation,
    out: NDArray[np.float32],
    out_col: int,
) -> None:
    """``out[:, out_col : out_col + n]`` = the activation of the n gate and up columns of ``x`` (float32 ``[R, W]``).

    Raises ValueError when the columns do not fit, TypeError for another dtype or layout.
    """
    last_in, last_out = max(gate_col, up_col) + n, out_col + n
    if min(gate_col, up_col, out_col, n) < 0 or last_in > x.shape[1] or last_out > out.shape[1]:
        raise ValueError(f"{n} columns at {gate_col}, {up_col} and {out_col} do not fit {x.shape} and {out.shape}.")
    if len(x) != len(out):
        raise ValueError(f"out has {len(out)} rows for {len(x)}.")
    beta, linear_beta = betas(activation)
    _activate(x, gate_col, up_col, n, beta, linear_beta, out, out_col)
