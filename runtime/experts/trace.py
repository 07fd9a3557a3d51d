"""Which experts a model's steps wanted, recorded: enough to answer questions about policies and budgets without it.

A trace file is an .npz of `layers` (uint16, the layers that have experts), `experts` (one number), `visit_layers`
(uint16 `[visits]`), `starts` (int64 `[visits + 1]`), `ids` (uint16; visit v has `ids[starts[v]:starts[v + 1]]`,
ascending) and `picks` (int64 `[visits]`, choices of all rows together). K3 takes about 3 KB for each token of a session
that runs alone.
"""

import os
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from serai.kernels.experts import ExpertLayout
from serai.runtime.errors import BadParameter
from serai.runtime.experts.access import Experts, Visit


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """Visits in the order they were made; arrays as in the file."""

    layers: tuple[int, ...]
    experts: int
    visit_layers: NDArray[np.uint16]
    starts: NDArray[np.int64]
    ids: NDArray[np.uint16]
    picks: NDArray[np.int64]

    @property
    def visits(self) -> int:
        return len(self.visit_layers)

    def __iter__(self) -> Iterator[tuple[int, NDArray[np.int32], int]]:
        """Each visit's layer, distinct ids and number of picks."""
        bounds = self.starts.tolist()
        for number, layer in enumerate(self.visit_layers.tolist()):
            ids = self.ids[bounds[number] : bounds[number + 1]].astype(np.int32)
            yield layer, ids, int(self.picks[number])

    def save(self, path: Path) -> None:
        """Write the trace as one file, whole or not at all."""
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        with unfinished.open("wb") as file:
            np.savez_compressed(
                file,
                layers=np.array(self.layers, dtype=np.uint16),
                experts=np.array(self.experts),
                visit_layers=self.visit_layers,
                starts=self.starts,
                ids=self.ids,
                picks=self.picks,
            )
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> "RoutingTrace":
        """Read a trace. Raises `BadParameter` when the file is none, or contradicts itself."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:  # NumPy leaves a bad one open
                trace = cls(
                    tuple(arrays["layers"].tolist()),
                    int(arrays["experts"]),
                    arrays["visit_layers"],
                    arrays["starts"],
                    arrays["ids"],
                    arrays["picks"],
                )
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise BadParameter(f"{path} is no routing trace ({error})") from error
        if not trace._is_sound():
            raise BadParameter(f"{path} is no sound routing trace: its visits, starts and ids do not fit together")
        return trace

    def _is_sound(self) -> bool:
        visits = self.visit_layers.shape
        return (
            len(visits) == 1
            and self.picks.shape == visits
            and self.starts.shape == (visits[0] + 1,)
            and self.ids.ndim == 1
            and int(self.starts[0]) == 0
            and int(self.starts[-1]) == len(self.ids)
            and bool((np.diff(self.starts) >= 0).all())
            and set(np.unique(self.visit_layers).tolist()) <= set(self.layers)
            and bool((self.ids < self.experts).all())
        )


class TraceRecorder:
    """Collects visits; `trace` gives what was collected so far."""

    def __init__(self, layers: Sequence[int], experts: int) -> None:
        self._layers = tuple(layers)
        self._experts = experts
        self._visit_layers = array("H")
        self._starts = array("q", [0])
        self._ids = array("H")
        self._picks = array("q")

    def add(self, layer: int, ids: NDArray[np.int32], picks: int) -> None:
        self._visit_layers.append(layer)
        self._ids.extend(ids.tolist())
        self._starts.append(len(self._ids))
        self._picks.append(picks)

    def trace(self) -> RoutingTrace:
        return RoutingTrace(
            self._layers,
            self._experts,
            np.array(self._visit_layers, dtype=np.uint16),
            np.array(self._starts, dtype=np.int64),
            np.array(self._ids, dtype=np.uint16),
            np.array(self._picks, dtype=np.int64),
        )


class TracedExperts:
    """Experts whose visits are recorded; in everything else those it was given."""

    def __init__(self, experts: Experts, recorder: TraceRecorder) -> None:
        self.recorded = experts
        self._experts = experts
        self._recorder = recorder

    @property
    def layout(self) -> ExpertLayout:
        return self._experts.layout

    @property
    def nbytes(self) -> int:
        return self._experts.nbytes

    def addresses(self, layer: int) -> None:
        """None, so that all are visited and noted."""

    def visit(self, layer: int, ids: NDArray[np.int32], picks: int, *, expected: Visit | None = None) -> Visit:
        self._recorder.add(layer, ids, picks)
        return self._experts.visit(layer, ids, picks, expected=expected)

    def expect(self, layer: int) -> Visit:
        return self._experts.expect(layer)

    def guess(self, layer: int, ids: NDArray[np.int32]) -> None:
        self._experts.guess(layer, ids)

    def close(self) -> None:
        self._experts.close()
