"""What a layer asks for its experts: all in memory, or read from disk as they are needed.

A layer opens a visit with the distinct experts its rows were routed to, takes batches of addresses until the visit is
finished, and computes with each batch before it takes the next: those already in memory come first, the rest as they
arrive, so that computing and reading overlap. In which batch an expert comes decides no bits (contract, d).

    visit = experts.visit(layer, ids, picks)
    try:
        while not visit.finished:
            batch = visit.take()
            if batch is not None:
                compute(ids[batch.which], batch.addresses)
            elif not visit.finished:
                yield visit.wait           # nothing has arrived: the engine runs something else, or waits
    finally:
        visit.close()

All of this runs on the engine thread; only the reader's threads run beside it, and they fill slots and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout
from serai.runtime.errors import SeraiError
from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.reader import ExpertReader, Read
from serai.runtime.experts.source import ExpertSource

Wait = Callable[[float], None]
"""What a paused computation waits for: returns when it may go on, or after so many seconds."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Experts to compute with now: `which` are their places in the visit's ids, ascending, `addresses` where their
    records lie; both int64 `[n]`, n ≥ 1. The addresses hold until the next `take` or `close`."""

    which: NDArray[np.int64]
    addresses: NDArray[np.int64]


class Visit(Protocol):
    """One layer's experts for one step. Close it, whatever happens."""

    @property
    def finished(self) -> bool:
        """Every expert was handed out or has failed."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether the last reads it waits for are under way: the disk has nothing to do after them."""
        ...

    @property
    def failures(self) -> Mapping[int, SeraiError]:
        """Experts that could not be read, by their place in the visit's ids: no batch will bring them."""
        ...

    def take(self) -> Batch | None:
        """The next batch, giving the one before back; None when nothing has arrived since."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to take, but no longer than that."""
        ...

    def close(self) -> None:
        """Give everything back; reads nobody else waits for are dropped. Closing twice is harmless."""
        ...


class Experts(Protocol):
    """The routed experts of a model."""

    @property
    def layout(self) -> ExpertLayout: ...

    @property
    def nbytes(self) -> int:
        """Bytes held of the budget."""
        ...

    def addresses(self, layer: int) -> NDArray[np.int64] | None:
        """Where all experts of a layer lie, by id, if they stay there for ever; None if they have to be visited."""
        ...

    def visit(self, layer: int, ids: NDArray[np.int32], picks: int, *, expected: "Visit | None" = None) -> Visit:
        """Ask for these distinct experts of a layer (counted from 0), which all rows together picked `picks` times.

        With what `expect` gave for the layer, which becomes the visit, they are handed out in the order of `ids`, which
        must ascend, a few at a time.
        """
        ...

    def expect(self, layer: int) -> Visit:
        """The layer will be visited by so many rows that they want nearly all its experts, more than can be kept, in
        ascending order: read ahead, and keep what was read until it is used. Give it to `visit`, or close it."""
        ...

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        """These experts will probably be asked for at `layer`: read them when the disk has nothing better to do, best
        guess first. It changes no result and never takes a slot from what a step is using."""
        ...

    def close(self) -> None: ...


class ResidentExperts:
    """All experts in memory."""

    def __init__(self, layout: ExpertLayout, layers: Sequence[int], records: NDArray[np.uint8]) -> None:
        """`records` is uint8 `[layers, experts, record_bytes]`, C-contiguous, each record in `layout`."""
        self.layout = layout
        self._records = records
        layer_bytes, record_bytes = records.strides[:2]
        addresses = np.arange(records.shape[1], dtype=np.int64) * record_bytes + records.ctypes.data
        self._addresses = {layer: addresses + place * layer_bytes for place, layer in enumerate(layers)}
        self._places = np.arange(records.shape[1], dtype=np.int64)

    @classmethod
    def load(
        cls, source: ExpertSource, threads: int, progress: Callable[[int, int], None] | None = None
    ) -> "ResidentExperts":
        """Read every expert, `threads` at a time; `progress(done, total)` counts experts. The source stays open.

        Raises `ExpertUnreadable`.
        """
        layers, experts, record_bytes = source.layers, source.experts, source.record_bytes
        total = len(layers) * experts
        records = aligned_bytes(total * record_bytes).reshape(len(layers), experts, record_bytes)
        reader = ExpertReader(source, threads)
        try:
            reader.post(
                [
                    Read(layer, expert, place * experts + expert, records[place, expert])
                    for place, layer in enumerate(layers)
                    for expert in range(experts)
                ]
            )
            done = 0
            while done < total:
                reader.wait(1.0)
                for ended in reader.collect():
                    if ended.error is not None:
                        raise ended.error
                    done += 1
                if progress is not None:
                    progress(done, total)
        finally:
            reader.close()
        return cls(source.layout, layers, records)

    @property
    def nbytes(self) -> int:
        return self._records.nbytes

    def addresses(self, layer: int) -> NDArray[np.int64]:
        return self._addresses[layer]

    def visit(
        self, layer: int, ids: NDArray[np.int32], picks: int, *, expected: Visit | None = None
    ) -> "ResidentVisit":
        return ResidentVisit(Batch(self._places[: len(ids)], self._addresses[layer][ids]) if len(ids) else None)

    def expect(self, layer: int) -> "ResidentVisit":
        """Nothing to read."""
        return ResidentVisit(None)

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        """Nothing to read."""

    def close(self) -> None:
        """The memory goes with the last reference to it."""


class ResidentVisit:
    """A visit that has everything at once."""

    failures: Mapping[int, SeraiError] = MappingProxyType({})
    is_draining = False

    def __init__(self, batch: Batch | None) -> None:
        self._batch = batch

    @property
    def finished(self) -> bool:
        return self._batch is None

    def take(self) -> Batch | None:
        batch, self._batch = self._batch, None
        return batch

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        self._batch = None


def pairs_of(
    which: NDArray[np.int64], starts: NDArray[np.int32], pairs: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The groups `which` out of `starts` `[groups + 1]` and `pairs`, closed up: new starts and new pairs.

    Group g of the old holds `pairs[starts[g]:starts[g + 1]]`; group i of the new is group `which[i]` of the old.
    """
    lengths = starts[which + 1] - starts[which]
    new = np.zeros(len(which) + 1, dtype=np.int32)
    np.cumsum(lengths, out=new[1:])
    places = np.arange(new[-1]) + np.repeat(starts[which] - new[:-1], lengths)
    return new, pairs[places]
