"""Where a rebuilt state can begin: the stored snapshots on the way to a node, and what each is to this build."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from serai.checkpoints.reports import SnapshotInfo
from serai.checkpoints.snapshot import Fingerprint, StateLayout
from serai.checkpoints.store import Store, require_same_model
from serai.runtime.errors import FormatUnknown, SessionGone, SnapshotCorrupt, SnapshotMissing
from serai.runtime.models.layout import holds_the_same_numbers

log = logging.getLogger(__name__)

MOST_REMEMBERED: Final = 20_000
"""Snapshots that are not looked at again; each takes about 200 bytes."""


class Accept(Enum):
    """Which stored snapshots of the model a state may begin from."""

    EXACT = "exact"
    """Those with the bits that this build gives their token ids: the state is as exact as a replay."""
    OWN = "own"
    """Those that this build made, inexact ones too, or stored with loss."""
    AS_IS = "as it is"
    """Those of other builds and SIMD paths as well."""


class Fit(Enum):
    """What a stored snapshot is to this build; the value says it after "snapshots"."""

    EXACT = "of this build"
    INEXACT = "that are inexact"
    OTHER_BUILD = "of another build or SIMD path"
    OTHER_PAGES = "with pages of another size"
    OTHER_ORDER = "with KDA states in another order"
    OTHER_MODEL = "of another model"
    DAMAGED = "with damaged parts"
    SET_ASIDE = "that were set aside"


ACCEPTED: Final[Mapping[Accept, Collection[Fit]]] = {
    Accept.EXACT: {Fit.EXACT},
    Accept.OWN: {Fit.EXACT, Fit.INEXACT},
    Accept.AS_IS: {Fit.EXACT, Fit.INEXACT, Fit.OTHER_BUILD},
}

OF_NO_USE: Final = frozenset({Fit.OTHER_PAGES, Fit.OTHER_ORDER, Fit.DAMAGED})
"""Nobody can begin from these, as it is or otherwise, and they are kept for nobody to look at."""


@dataclass(frozen=True, slots=True)
class Start:
    """A stored snapshot to start from; `inexact` if what follows it will be."""

    node_id: str
    position: int
    inexact: bool


@dataclass(frozen=True, slots=True)
class Way:
    """Where to start on the way to a node (None: from nothing); `passed` are those after it whose snapshots are not
    used."""

    start: Start | None
    passed: Mapping[str, Fit]

    def __str__(self) -> str:
        counts = Counter(self.passed.values())
        return ", ".join(f"{count} {fit.value}" for fit, count in counts.items())


class Starts:
    """Finds them for one model and build. A snapshot that was not used once is not read again, as long as it is the
    same: after an upgrade every one that was there before would be, each time that anybody resumes.
    """

    def __init__(self, fingerprint: Fingerprint, layout: StateLayout) -> None:
        self._fingerprint = fingerprint
        self._layout = layout
        self._known: dict[str, Fit] = {}  # by the hash of its manifest; touched while the index is held

    def own(self, store: Store, node_id: str) -> Start | None:
        """The snapshot stored under a node, if it is of this model and build, and exact; None otherwise."""
        try:
            info = store.snapshot_info(node_id)
        except SessionGone as error:  # deleted since it was known
            log.debug("%s", error)
            return None
        except (SnapshotCorrupt, SnapshotMissing, FormatUnknown) as error:
            log.warning("%s", error)
            return None
        return Start(node_id, info.position, inexact=False) if info.is_exact_for(self._fingerprint) else None

    def way_to(self, store: Store, node_id: str, accept: Accept) -> Way:
        """The latest snapshot on the way to the node that can be used.

        One whose manifest is damaged is set aside and the one before it is taken: the token ids give the same state,
        only later. `ModelMismatch` if the first that can be read is of another model; what lies before one of this
        model hinders nobody, whatever it is.
        """
        passed: dict[str, Fit] = {}
        with store.reading_index() as index:
            row = index.snapshot(node_id)
            if row is not None and not index.usable(node_id):
                passed[node_id] = Fit.DAMAGED if row.set_aside is None else Fit.SET_ASIDE
        is_first = True
        step: str | None = node_id
        while step is not None and (holder := store.nearest_snapshot(step)) is not None:
            try:
                fit, position = self._look(store, holder, accept, is_first=is_first)
            except SnapshotMissing:
                continue  # erased since it was found
            except (SnapshotCorrupt, FormatUnknown) as error:
                log.warning("%s", error)
                store.set_aside(holder, str(error))
                passed[holder] = Fit.SET_ASIDE
                continue
            if fit in ACCEPTED[accept]:
                return Way(Start(holder, position, inexact=fit is not Fit.EXACT), passed)
            passed[holder] = fit
            is_first = False
            step = store.parent(holder)
        return Way(None, passed)

    def _look(self, store: Store, node_id: str, accept: Accept, *, is_first: bool) -> tuple[Fit, int]:
        """What a node's snapshot is, and its position. Errors as of `Store.snapshot_info`."""
        with store.reading_index() as index:  # the manifest that is read is the one whose hash it is known by
            row = index.snapshot(node_id)
            if row is None:
                raise SnapshotMissing(node_id=node_id)
            known = self._known.get(row.manifest)
            is_refused = known is Fit.OTHER_MODEL and is_first
            if known is not None and known not in ACCEPTED[accept] and not is_refused:
                return known, row.position
            info = store.snapshot_info(node_id)
            if is_first:
                require_same_model(node_id, self._laid_out_as_here(info), self._fingerprint)
            fit = self._fit(info)
            if fit not in ACCEPTED[accept]:
                self._remember(row.manifest, fit)
            return fit, info.position

    def _remember(self, manifest: str, fit: Fit) -> None:
        if len(self._known) >= MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[manifest] = fit

    def _laid_out_as_here(self, info: SnapshotInfo) -> Fingerprint:
        """Who made a snapshot, but for where its numbers lie, which is no matter of the model."""
        if holds_the_same_numbers(info.layout, self._layout):
            return replace(info.fingerprint, state_layout=self._fingerprint.state_layout)
        return info.fingerprint

    def _fit(self, info: SnapshotInfo) -> Fit:
        if self._laid_out_as_here(info).differences(self._fingerprint):
            return Fit.OTHER_MODEL
        if info.layout != self._layout:
            return Fit.OTHER_PAGES if info.layout.kda_shape == self._layout.kda_shape else Fit.OTHER_ORDER
        if info.fingerprint.build_differences(self._fingerprint):
            return Fit.OTHER_BUILD
        return Fit.EXACT if info.is_exact_for(self._fingerprint) else Fit.INEXACT
