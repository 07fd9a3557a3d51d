"""What the expert products of one call share: who is visited, by which rows, and how the work is cut into tasks.

Task bodies pass these tuples on:

``call``     addresses of three arrays (the records' addresses int64, ``start`` int32, ``pairs`` int32), and picks a row
``offsets``  :attr:`serai.kernels.experts.ExpertLayout.offsets`: where matrices and scales begin in a record
``dims``     (latent, inner)
``part``     (tasks an expert, units a task)
"""

from typing import Any

import numpy as np

from serai.kernels.compile import inline
from serai.kernels.deal import deal
from serai.kernels.memory import scalar_i32_at, store_scalar_i32_at


@inline
def record_of(call: Any, e: int) -> Any:
    """The address of visited expert ``e``'s record."""
    low, high = scalar_i32_at(call[0] + 8 * e), scalar_i32_at(call[0] + 8 * e + 4)
    return (np.int64(high) << 32) | (np.int64(low) & 0xFFFFFFFF)


@inline
def range_of(call: Any, e: int) -> Any:
    """The first and the one after the last of visited expert ``e``'s places among the pairs."""
    return scalar_i32_at(call[1] + 4 * e), scalar_i32_at(call[1] + 4 * e + 4)


@inline
def list_rows(call: Any, first: int, n: int, rows: int) -> None:
    """Write the row numbers of ``n`` pairs from place ``first`` to a list at address ``rows``."""
    for i in range(n):
        store_scalar_i32_at(rows + 4 * i, scalar_i32_at(call[2] + 4 * (first + i)) // call[3])


@inline
def visited_of(addresses: Any, start: Any) -> Any:
    """How many experts are visited: at the end there may be some without pairs, places that were not needed."""
    visited = addresses.size
    while visited > 0 and start[visited - 1] == start[visited]:
        visited -= 1
    return visited


@inline
def cut(visited: int, units: int, unit_bytes: int, pairs: int) -> Any:
    """How to cut ``units`` for each visited expert: (``part``, tasks, whether a launch is worth it)."""
    chunk, _, spread = deal(visited * units, unit_bytes, pairs // max(visited, 1))
    chunk = min(chunk, units)
    per_expert = (units + chunk - 1) // chunk
    return (per_expert, chunk), visited * per_expert, spread
