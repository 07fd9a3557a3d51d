"""How much the experts of each layer are wanted, coarse enough to be drawn and sent once a second.

K3 has 90 layers of 896 experts. As one digit for a group of 14 they are 64 characters a layer, six thousand in all.
"""

import numpy as np
from numpy.typing import NDArray

from serai.runtime.experts.slots import SlotTable
from serai.runtime.status import LayerHeat

MOST_GROUPS = 64
"""Columns of a heat map that a terminal of 80 has room for."""
HOTTEST = 9


def layer_heat(table: SlotTable) -> tuple[LayerHeat, ...]:
    """One value a layer, in the table's order. Reads only; another thread may be using the table meanwhile, which
    makes a figure one visit older and no more."""
    hits, misses = table.layer_lookups()
    held = table.held()
    rows = digits(grouped(table.usage()))
    return tuple(
        LayerHeat(layer, int(hits[place]), int(misses[place]), int(held[place]), rows[place])
        for place, layer in enumerate(table.layers)
    )


def grouped(usage: NDArray[np.float64]) -> NDArray[np.float64]:
    """`usage` float64 `[layers, experts]` summed over groups of neighbours, as equal as can be: `[layers, groups]` with
    at most `MOST_GROUPS`."""
    experts = usage.shape[1]
    groups = min(experts, MOST_GROUPS)
    starts = np.arange(groups) * experts // groups
    sums: NDArray[np.float64] = np.add.reduceat(usage, starts, axis=1)
    return sums / np.diff(np.append(starts, experts))  # groups may differ by one expert


def digits(heat: NDArray[np.float64]) -> list[str]:
    """Each row as digits: `HOTTEST` for what is within a factor of two of the largest of all, one less a halving, at
    least 1; 0 for nothing."""
    top = float(heat.max(initial=0.0))
    if top <= 0:
        return ["0" * heat.shape[1]] * heat.shape[0]
    with np.errstate(divide="ignore"):
        levels = HOTTEST + np.floor(np.log2(heat / top)) + 1
    levels = np.clip(np.where(heat > 0, np.clip(levels, 1, HOTTEST), 0), 0, HOTTEST).astype(np.uint8)
    return [bytes(row + ord("0")).decode("ascii") for row in levels]
