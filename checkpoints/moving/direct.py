"""Copies between stores, straight or through a place: only what is missing moves, and a point arrives whole or not.

A store is named by its folder, a place by its URL (see `places`). While a process has a store open it is written by
that process only, but may be read beside it: out of a running runtime's store a point is fetched, by a store that
nobody has open or by another running runtime.
"""

from serai.checkpoints.moving.handover import peer_at
from serai.checkpoints.moving.places import is_url, place_at
from serai.checkpoints.moving.remote import StoreAsPlace, pull
from serai.checkpoints.moving.transfer import Moved, Stopped, never
from serai.checkpoints.store import Store


def send(store: Store, node_id: str, target: str, stopped: Stopped = never) -> Moved:
    """Copy a node, all it continues from and its nearest snapshot to `target`: a store, made if there is none, or a
    place.

    `StoreBusy` while another process has that store open: it is then for that one to `fetch` from here.
    `TransferStopped` if it was called off.
    """
    return peer_at(target).receive(store, node_id, stopped)


def fetch(store: Store, name: str, source: str, stopped: Stopped = never) -> Moved:
    """Copy a point from `source` into `store`: from a store, whoever has it open, by the id of a node or session or a
    tag; or from a place, by the id of a node that was pushed there.

    `StoreInvalid` for a folder without a store; `SessionGone` if nothing there has the name; `SnapshotCorrupt` if what
    is there is damaged, or was erased meanwhile; `TransferStopped` if it was called off.
    """
    if is_url(source):
        return pull(store, place_at(source), name, stopped)
    with Store.open(source, read_only=True) as there, there._holding("sending") as pin:
        return pull(store, StoreAsPlace(there, pin, stopped), there.resolve(name), stopped)
