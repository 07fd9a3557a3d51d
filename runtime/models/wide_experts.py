"""The routed experts of a layer for thousands of rows, in the scratch of an ordinary step.

Experts come in ascending id, so each row's sum grows in the order that decides its bits (contract, d), and nothing has
to be kept of an expert once its rows are done.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from serai.kernels.arrays import aligned
from serai.kernels.moe import combine_some, group
from serai.runtime.experts.access import Batch, Visit, Wait
from serai.runtime.models.layers import Context
from serai.runtime.models.mixture import Beside, run_experts
from serai.runtime.models.scratch_shape import FOUND


@dataclass(frozen=True, slots=True)
class Routed:
    """Where R rows were sent, and the weighted sums of what comes back.

    `picks` int32 and `weights` float32 `[R, k]`; `sums` float32 `[R, latent]`. After `group`, expert `distinct[i]` has
    the pairs `pairs[starts[i]:starts[i + 1]]`; pair `row * k + j` is a row's j-th pick.
    """

    picks: NDArray[np.int32]
    weights: NDArray[np.float32]
    sums: NDArray[np.float32]
    pairs: NDArray[np.int32]
    distinct: NDArray[np.int32]
    starts: NDArray[np.int32]
    found: NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, k: int, latent: int, distinct: int) -> "Routed":
        """Room for that many rows and different experts."""
        return cls(
            picks=np.empty((rows, k), np.int32),
            weights=np.empty((rows, k), np.float32),
            sums=aligned(rows * latent, np.float32).reshape(rows, latent),
            pairs=np.empty(rows * k, np.int32),
            distinct=np.empty(distinct, np.int32),
            starts=np.empty(distinct + 1, np.int32),
            found=np.zeros(FOUND, np.int32),
        )

    @property
    def bytes(self) -> int:
        arrays = (self.picks, self.weights, self.sums, self.pairs, self.distinct, self.starts, self.found)
        return sum(one.nbytes for one in arrays)

    def first(self, rows: int) -> "Routed":
        """The part of the first rows."""
        pairs = self.pairs[: rows * self.picks.shape[1]]
        return replace(self, picks=self.picks[:rows], weights=self.weights[:rows], sums=self.sums[:rows], pairs=pairs)

    def group(self, count: int) -> NDArray[np.int32]:
        """Find the pairs of each expert out of `count`; the ids of those picked, ascending."""
        group(self.picks, count, self.distinct, self.starts, self.pairs, self.found)
        return self.distinct[: int(self.found[0])]

    def rows_of(self, places: list[int]) -> NDArray[np.int32]:
        """The rows that picked the experts at these places in the ids."""
        lost = [self.pairs[self.starts[place] : self.starts[place + 1]] for place in places]
        rows: NDArray[np.int32] = np.concatenate(lost) // self.picks.shape[1]
        return rows


def routed_experts(
    context: Context, visit: Visit, source: NDArray[np.float32], routed: Routed
) -> Iterator[Wait | None]:
    """Fill `routed.sums` from `source` `[R, latent]`, with the experts of an ordered visit to what `group` found.

    Pauses after every few pairs, and while experts are being read, saying what to wait for. Rows of an expert that
    could not be read get zeros and are named in the context's failures.
    """
    most_pairs = context.scratch.rows
    while not visit.finished:
        batch = visit.take()
        if batch is None:
            if not visit.finished:
                yield visit.wait
            continue
        for addresses, starts, pairs in _portions(batch, routed, most_pairs):
            _some_pairs(context, source, routed, addresses, starts, pairs)
            yield None
    for place, error in visit.failures.items():
        rows = routed.rows_of([place])
        routed.sums[rows] = 0
        context.failures.update((int(row), error) for row in rows)


def _some_pairs(
    context: Context,
    source: NDArray[np.float32],
    routed: Routed,
    addresses: NDArray[np.int64],
    starts: NDArray[np.int32],
    pairs: NDArray[np.int32],
) -> None:
    """Compute so many pairs, each given its row's input as a row of its own, and add them to their rows' sums."""
    inputs = context.scratch.view("mixed", len(pairs), context.moe.latent)
    np.take(source, pairs // routed.picks.shape[1], axis=0, out=inputs, mode="clip")
    own = np.arange(len(pairs), dtype=np.int32)
    each = run_experts(context, Beside(inputs, 0, None), 1, addresses, starts, own)
    combine_some(each, pairs, routed.weights, routed.sums)


def _portions(
    batch: Batch, routed: Routed, most_pairs: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]]:
    """The batch's experts with their pairs, at most so many pairs at a time: addresses, where each one's pairs start
    (and the last one's end), pairs. An expert with more pairs comes several times."""
    addresses: list[int] = []
    starts = [0]
    pairs: list[NDArray[np.int32]] = []
    for which, address in zip(batch.which, batch.addresses, strict=True):
        left = routed.pairs[routed.starts[which] : routed.starts[which + 1]]
        while len(left):
            some, left = left[: most_pairs - starts[-1]], left[most_pairs - starts[-1] :]
            addresses.append(int(address))
            starts.append(starts[-1] + len(some))
            pairs.append(some)
            if starts[-1] == most_pairs:
                yield np.array(addresses, np.int64), np.array(starts, np.int32), np.concatenate(pairs)
                addresses, starts, pairs = [], [0], []
    if pairs:
        yield np.array(addresses, np.int64), np.array(starts, np.int32), np.concatenate(pairs)
