"""Handing a session over: to another store on this machine, or to a place from which any store may take it.

The content goes first, and may take its time; then the two sides settle who owns it by the epochs of `ownership`, in a
few small durable writes. Whatever is killed when, at most one side may use the session, at least one has all of it, and
a side in doubt finds out by asking the other.

A place has no process to answer for it, so its side of a move is a chain of objects, `owners/SESSION/EPOCH`, each
written once and only if nobody has written it before: whoever is second learns who was first.

    here                            place
    begin_move  MOVING, epoch+1
                (the session is pushed)
                                    owners/S/epoch+1  OWNED: it may be taken
    finish_move MOVED

    there                           place
                (the session is pulled)
                                    owners/S/epoch+2  MOVED: to the store named in it
    accept_move OWNED at epoch+2
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from serai.checkpoints.errors import NotOwner, PlaceFailed, PlaceUnknown, SeraiError, SessionGone, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.format import DocumentKind, frame_document, unframe_document
from serai.checkpoints.moving.ownership import (
    Ownership,
    OwnerStatus,
    abort_move,
    accept_move,
    begin_move,
    decline_move,
    finish_move,
    owner_of,
    ownership,
)
from serai.checkpoints.moving.places import DecidingPlace, is_url, place_at
from serai.checkpoints.moving.remote import StoreAsPlace, pull, push
from serai.checkpoints.moving.transfer import Moved, Stopped, go_on, never
from serai.checkpoints.names import check_id
from serai.checkpoints.opening import POINTS_NAME, STORE_NAME
from serai.checkpoints.store import Store

_EPOCH_DIGITS: Final = 12


class Peer(Protocol):
    """The other side of a move, as the side that gives the session away sees it."""

    @property
    def name(self) -> str:
        """What a store's record calls it; `peer_at` finds it by that again."""
        ...

    def receive(self, store: Store, node_id: str, stopped: Stopped = never) -> Moved:
        """Have a node of `store`, all it continues from and its nearest snapshot; only what is missing is moved.
        `TransferStopped` if that was called off."""
        ...

    def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
        """Own the session, whose content has come, at this epoch; `NotOwner` if that can't be."""
        ...

    def decline(self, session_id: str, epoch: int, node_id: str, source: str) -> OwnerStatus:
        """The binding answer to a side in doubt: DECLINED if the move was not accepted and now never will be.

        It comes only from where the content had come: an error if node `node_id`, the session's last, is not there now,
        such as on a disk that is not mounted, or is another one, or was made anew. What was in its stead would decline,
        and then two would own the session.
        """
        ...


@dataclass(frozen=True, slots=True)
class StorePeer:
    """A store on this machine, in the folder `name`, free while nobody else has it open; `receive` makes it if there is
    none."""

    name: str

    def opened(self, *, create: bool) -> Store:
        """The store, for this process alone; `StoreBusy` while another has it, `StoreInvalid` if there is none."""
        return Store.open(self.name, create=create)

    def receive(self, store: Store, node_id: str, stopped: Stopped = never) -> Moved:
        with self.opened(create=True) as there, store._holding("sending") as pin:
            return pull(there, StoreAsPlace(store, pin, stopped), node_id, stopped)

    def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
        with self.opened(create=False) as there:
            accept_move(there, session_id, epoch, source)

    def decline(self, session_id: str, epoch: int, node_id: str, source: str) -> OwnerStatus:
        with self.opened(create=False) as there:
            if ownership(there, session_id).epoch < epoch:  # else it was asked, or took part, before
                with there.reading_index():
                    there._row(node_id)  # `SessionGone` where it never came
            return _answer(decline_move(there, session_id, epoch, source), epoch, source)


def _answer(owner: Ownership, epoch: int, source: str) -> OwnerStatus:
    """What the other side's record says of a move at `epoch`: whether it was declined, or once accepted."""
    declined = owner.epoch == epoch and (owner.status is OwnerStatus.DECLINED or owner.peer != source)
    return OwnerStatus.DECLINED if declined else OwnerStatus.OWNED


@dataclass(frozen=True, slots=True)
class _Decision:
    """An object of a place's chain: who owned the session from this epoch on, and the node it stood at."""

    epoch: int
    status: OwnerStatus
    peer: str
    node_id: str


@dataclass(frozen=True, slots=True)
class PlacePeer:
    """A place, named by the URL `name`."""

    name: str
    place: DecidingPlace

    def receive(self, store: Store, node_id: str, stopped: Stopped = never) -> Moved:
        return push(store, self.place, node_id, stopped)

    def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
        mine = _Decision(epoch, OwnerStatus.OWNED, source, node_id)
        decided = self._decide(session_id, mine)
        if decided != mine:
            raise NotOwner(
                session_id=session_id,
                problem=f"can't be put in {self.name} at epoch {epoch}: it is {decided.status.value} there, by "
                f"{decided.peer}",
                remedy="begin a new move at its owner",
            )

    def decline(self, session_id: str, epoch: int, node_id: str, source: str) -> OwnerStatus:
        try:
            self.place.get(f"{POINTS_NAME}/{node_id}")
        except FileNotFoundError as error:
            doing = f"asking whether session {session_id} has come"
            reason = f"node {node_id}, its last, was not pushed there"
            raise PlaceFailed(url=self.name, doing=doing, reason=reason) from error
        decided = self._decide(session_id, _Decision(epoch, OwnerStatus.DECLINED, source, ""))
        accepted = decided.status is OwnerStatus.OWNED and decided.peer == source
        return OwnerStatus.OWNED if accepted else OwnerStatus.DECLINED

    def take(self, store: Store, session_id: str, stopped: Stopped = never) -> Moved:
        """Fetch a session that was put here and own it in `store`; `NotOwner` if another store has it by now.

        It can be called off while the content is fetched (`TransferStopped`), but not once it is settled who owns it.
        """
        latest = self._latest(session_id)
        if latest is None:
            raise SessionGone(name=session_id)
        taken_here = latest.status is OwnerStatus.MOVED and latest.peer == store.id
        if latest.status is not OwnerStatus.OWNED and not taken_here:
            self._refuse(session_id, latest)
        moved = pull(store, self.place, latest.node_id, stopped)
        go_on(stopped)
        if not taken_here:  # else a process of this store was killed right after it had
            mine = _Decision(latest.epoch + 1, OwnerStatus.MOVED, store.id, latest.node_id)
            latest = self._decide(session_id, mine)
            if latest != mine:
                self._refuse(session_id, latest)
        if ownership(store, session_id).epoch < latest.epoch:
            accept_move(store, session_id, latest.epoch, self.name)
        return moved

    def _refuse(self, session_id: str, found: _Decision) -> None:
        who = "its owner kept it" if found.status is OwnerStatus.DECLINED else f"the store {found.peer} has taken it"
        problem = f"can't be taken from {self.name}: {who} (epoch {found.epoch})"
        raise NotOwner(session_id=session_id, problem=problem, remedy="use it there, or have it moved again")

    def _decide(self, session_id: str, decision: _Decision) -> _Decision:
        """What is decided at this epoch: what was asked for, or what somebody else had decided before."""
        name = self._object(session_id, decision.epoch)
        value = {
            "session": session_id,
            "epoch": decision.epoch,
            "status": decision.status.value,
            "peer": decision.peer,
            "node": decision.node_id,
        }
        data = frame_document(DocumentKind.OWNER, jsonio.encode(value)).data
        return decision if self.place.create(name, data) else self._read(session_id, decision.epoch)

    def _latest(self, session_id: str) -> _Decision | None:
        check_id(session_id, "session id")
        names = self.place.names(f"owners/{session_id}")
        epochs = [int(name) for name in names if name.isascii() and name.isdigit() and len(name) == _EPOCH_DIGITS]
        return self._read(session_id, max(epochs)) if epochs else None

    def _read(self, session_id: str, epoch: int) -> _Decision:
        what = f"the owner of session {session_id} in {self.name}"
        data = self.place.get(self._object(session_id, epoch))
        value = jsonio.decode(unframe_document(data, DocumentKind.OWNER, what).data, what)
        owner = owner_of(value, session_id, what)
        if owner.epoch != epoch:
            raise SnapshotCorrupt(what=what, problem=f"epoch {epoch} holds what was decided at epoch {owner.epoch}")
        return _Decision(epoch, owner.status, owner.peer, jsonio.field(value, "node", str, what))

    def _object(self, session_id: str, epoch: int) -> str:
        return f"owners/{session_id}/{epoch:0{_EPOCH_DIGITS}}"


def peer_at(target: str) -> StorePeer | PlacePeer:
    """The other side that `target` names: a URL is a place, anything else the folder of a store.

    `PlaceUnknown` for an http URL, since serai's server takes no sessions in, and as in `place_at`.
    """
    if not is_url(target):
        return StorePeer(str(Path(target).resolve()))
    if target.startswith(("http://", "https://")):
        raise PlaceUnknown(
            url=target,
            problem="a server takes no sessions in; name the folder of its store while it is stopped, or a place that "
            "both sides reach (s3://bucket/folder, file:///folder)",
        )
    return PlacePeer(target, place_at(target))


def _peer_on_record(name: str) -> StorePeer | PlacePeer:
    """The other side of a move, by what the record of it says.

    Earlier builds recorded the folder of a place as it was given, by its path. `PlaceUnknown` for a path from a
    folder that is not known any more.
    """
    if is_url(name):
        return peer_at(name)
    folder = Path(name)
    if not folder.is_absolute():
        problem = "the record of the move has only this path, and not from which folder it was to be followed"
        raise PlaceUnknown(url=name, problem=problem)
    is_place = (folder / POINTS_NAME).is_dir() and not (folder / STORE_NAME).exists()
    return peer_at(f"file://{name}" if is_place else name)


def place_peer_at(source: str) -> PlacePeer:
    """The place `source` from which a session is taken; `PlaceUnknown` for a store's folder, too."""
    peer = peer_at(source)
    if isinstance(peer, StorePeer):
        raise PlaceUnknown(
            url=source,
            problem="it is the folder of a store, and a session that was moved there is resumed by a runtime over it; "
            "a place is named by a URL, such as file:///folder",
        )
    return peer


def hand_over(store: Store, session_id: str, node_id: str, peer: Peer, stopped: Stopped = never) -> Moved:
    """Give a session, whose last node is `node_id`, to `peer`. When this returns it is owned there and not here.

    It can be called off while the content is sent (`TransferStopped`), but not once the two sides settle who owns it.

    If it fails before the other side has accepted, the session is owned here as before. `NotOwner` if it is not owned
    here, or if the other side can't be asked any more: then the session is in doubt until `settle` reaches it.
    """
    moved = peer.receive(store, node_id, stopped)
    go_on(stopped)
    moving = begin_move(store, session_id, peer.name)
    try:
        peer.accept(session_id, moving.epoch, node_id, store.id)
    except PlaceUnknown:
        abort_move(store, session_id, moving.epoch)  # nothing was written there, and nothing ever will be
        raise
    except Exception:
        if settle(store, session_id, peer).may_be_used:
            raise
        return moved  # it was accepted all the same, and only the answer was lost
    finish_move(store, session_id, moving.epoch)
    return moved


def settle(store: Store, session_id: str, peer: Peer | None = None) -> Ownership:
    """Who owns a session, after asking the other side if that is in doubt here.

    `NotOwner` if the other side can't be asked; `ownership.override_move` is then for a person to decide.
    """
    owner = ownership(store, session_id)
    if owner.status is not OwnerStatus.MOVING:
        return owner
    try:
        other = peer or _peer_on_record(owner.peer)
        answer = other.decline(session_id, owner.epoch, store.session_head(session_id), store.id)
    except (SeraiError, OSError) as error:
        raise NotOwner(
            session_id=session_id,
            problem=f"was being moved to {owner.peer}, which can't be asked whether it has come ({error})",
            remedy="try again when it can, or, if nobody uses the session there, take it back with "
            f"`serai sessions settle {session_id} --take-back`",
        ) from error
    if answer is OwnerStatus.DECLINED:
        return abort_move(store, session_id, owner.epoch)
    return finish_move(store, session_id, owner.epoch)


def require_owned(store: Store, session_id: str) -> None:
    """`NotOwner` unless the session may be used here; one in doubt is settled first."""
    owner = ownership(store, session_id)
    if owner.status is OwnerStatus.MOVING:
        owner = settle(store, session_id)
    if not owner.may_be_used:
        raise NotOwner(
            session_id=session_id,
            problem=f"was moved to {owner.peer} (epoch {owner.epoch})"
            if owner.status is OwnerStatus.MOVED
            else f"was offered by {owner.peer} and not taken (epoch {owner.epoch})",
            remedy="use it there, have it moved back, or, if nobody uses it there, take it back with "
            f"`serai sessions settle {session_id} --take-back`",
        )
