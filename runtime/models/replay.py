"""Steps that repeat: what layers do between two pauses is the same kernels on the same memory in every step of as
many rows, so it is done through Python once and repeated by compiled code (`serai.kernels.recorded`).

The bits are those of the calls, whoever makes them. Of a step's inputs only the arrays of its `Batch` lie elsewhere
from step to step; everything else is scratch or weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from serai.kernels.recorded import Calls, places, record
from serai.runtime.models.batch import Batch
from serai.runtime.models.mixture import Do

FEW_ROWS = 64
"""A step of more rows takes long, and seldom comes again; it is recorded when it does."""

MOST_BYTES = 1 << 22
"""Past so many bytes what was used longest ago is forgotten before more is recorded; a number of rows takes some 10 KB
a layer. It comes out of what the memory plan leaves for the process itself."""


Recorded = dict[tuple[int, str], tuple[Calls, Any]]
"""By the first layer and the name of the work: its calls, and what it gave."""


class Replays:
    """What was recorded of a model's steps, by their number of rows."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Recorded] = OrderedDict()
        self._met: set[int] = set()

    @property
    def rows(self) -> list[int]:
        """The numbers of rows remembered, the one used last at the end."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """What is remembered takes, but for the memory that it speaks of."""
        return sum(calls.nbytes for recorded in self._kept.values() for calls, _ in recorded.values())

    def of(self, batch: Batch) -> "Replay | None":
        """For a step of that batch; None if it is not worth while."""
        if batch.rows in self._kept:
            self._kept.move_to_end(batch.rows)
            return Replay(self._kept[batch.rows], batch)
        if batch.rows > FEW_ROWS and batch.rows not in self._met:
            self._met.add(batch.rows)
            return None
        while self._kept and self.nbytes > MOST_BYTES:
            self._kept.popitem(last=False)
        self._kept[batch.rows] = {}
        return Replay(self._kept[batch.rows], batch)


class Replay:
    """One step."""

    def __init__(self, recorded: Recorded, batch: Batch) -> None:
        self._recorded = recorded
        of_states = (batch.seg_start, batch.seg_pos, batch.state_in, batch.state_out)
        self._inputs = (*of_states, batch.page_addr, batch.page_start)
        self._places = places(self._inputs)

    def do(self, index: int, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Do the work of that name in layer `index`, and give what it gave when it was recorded: views of the same
        memory. The work must be kernels only, and views for them."""
        if (known := self._recorded.get((index, name))) is not None:
            calls, given = known
            calls.again(self._places)
            return given
        calls, given = record(partial(work, *args), self._inputs)
        self._recorded[index, name] = calls, given
        return given


def doing(replay: Replay | None, index: int) -> Do:
    """`Do` for layer `index`."""
    return _call if replay is None else partial(replay.do, index)


def _call(name: str, work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)
