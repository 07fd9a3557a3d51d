"""Experts without their disk: every id stands for one of a few records in memory, what a step costs to compute."""

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout
from serai.runtime.experts.access import Batch, ResidentVisit, Visit


class AliasedExperts:
    """Expert e of layer l is the record at `addresses[(l, e) mod n]`; nothing is ever read.

    Distinct experts lie at distinct places as long as there are enough, so that memory is walked as it would be. Notes
    how many experts were wanted, by how many picks.
    """

    nbytes = 0

    def __init__(self, layout: ExpertLayout, experts: int, addresses: NDArray[np.int64]) -> None:
        self.layout = layout
        self.wanted = self.picks = 0
        self._experts = experts
        self._addresses = addresses

    def addresses(self, layer: int) -> None:
        """None, so that visits are noted."""

    def visit(self, layer: int, ids: NDArray[np.int32], picks: int, *, expected: Visit | None = None) -> ResidentVisit:
        self.wanted += len(ids)
        self.picks += picks
        places = (ids.astype(np.int64) + layer * self._experts) % len(self._addresses)
        return ResidentVisit(Batch(np.arange(len(ids)), self._addresses[places]) if len(ids) else None)

    def expect(self, layer: int) -> ResidentVisit:
        """Nothing to read."""
        return ResidentVisit(None)

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Nothing to read."""

    def close(self) -> None:
        """The memory is somebody else's."""
