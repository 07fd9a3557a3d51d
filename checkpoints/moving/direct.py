"""Copies between stores, straight or through a place: only what is missing moves, and a point arrives whole or not.

A store is named by its folder. While a process has it open it is written by that process only, but may be read beside
it: out of a running runtime's store a point is fetched, by a store that nobody has open or by another running runtime.
"""

from pathlib import Path

from serai.checkpoints.moving.handover import PlacePeer, StorePeer
from serai.checkpoints.moving.places import folder_of, place_at
from serai.checkpoints.moving.remote import StoreAsPlace, pull
from serai.checkpoints.moving.transfer import Moved
from serai.checkpoints.opening import STORE_NAME
from serai.checkpoints.store import Store


def send(store: Store, node_id: str, target: str) -> Moved:
    """Copy a node, all it continues from and its nearest snapshot to `target`: the folder of a store, or a place.

    `StoreBusy` while another process has that store open: it is then for that one to `fetch` from here.
    """
    return peer_of(target).receive(store, node_id)


def fetch(store: Store, name: str, source: str) -> Moved:
    """Copy a point from `source` into `store`: from the folder of a store, whoever has it open, by the id of a node or
    session or a tag; or from a place, by the id of a node that was pushed there.

    `SessionGone` if nothing there has the name; `SnapshotCorrupt` if what is there is damaged, or was erased meanwhile.
    """
    folder = _store_in(source)
    if folder is None:
        return pull(store, place_at(source), name)
    with Store.open(folder, read_only=True) as there, there._pins.held() as pin:
        return pull(store, StoreAsPlace(there, pin), there.resolve(name))


def peer_of(target: str) -> StorePeer | PlacePeer:
    """The store in the folder that `target` names, if there is one; else the place."""
    folder = _store_in(target)
    return PlacePeer(target, place_at(target)) if folder is None else StorePeer(folder)


def _store_in(where: str) -> str | None:
    folder = folder_of(where)
    if folder is None or not (Path(folder) / STORE_NAME).is_file():
        return None
    return str(Path(folder).resolve())
