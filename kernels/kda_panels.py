"""How a KDA head's state lies in memory: in panels of sixteen value columns, each `[D_key, 16]`.

The definitions have a matrix `[D_key, D_value]`. One vector does not hold its rows, so they are cut and each piece of
sixteen columns lies in one run: what passes through a panel reads and writes memory in order. Where the width is no
multiple of sixteen, the last panel's excess columns are zero.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL = 16
"""Value columns of a panel: one vector of float32."""


def panels_of(head_dim: int) -> int:
    """Panels of a head."""
    return -(-head_dim // PANEL)


def to_panels(matrices: NDArray[Any]) -> NDArray[Any]:
    """Matrices `[..., heads, D_key, D_value]` as panels `[..., heads * panels, D_key, 16]`, a copy."""
    *outer, heads, key_dim, value_dim = matrices.shape
    panels = panels_of(value_dim)
    padding = [(0, 0)] * (matrices.ndim - 1) + [(0, panels * PANEL - value_dim)]
    padded = np.pad(matrices, padding).reshape(*outer, heads, key_dim, panels, PANEL)
    return np.ascontiguousarray(np.swapaxes(padded, -3, -2)).reshape(*outer, heads * panels, key_dim, PANEL)


def to_matrices(panels: NDArray[Any], heads: int, value_dim: int) -> NDArray[Any]:
    """The inverse of `to_panels`, a copy."""
    *outer, count, key_dim, _ = panels.shape
    apart = np.swapaxes(panels.reshape(*outer, heads, count // heads, key_dim, PANEL), -3, -2)
    # With one whole panel a head nothing has moved, and what only makes it contiguous would give the same memory.
    return np.array(apart.reshape(*outer, heads, key_dim, -1)[..., :value_dim], order="C")
