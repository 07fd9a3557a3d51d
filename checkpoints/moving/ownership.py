"""Who owns a session that moves between stores: never two at once, whatever is killed when.

Each side keeps one small document a session, replaced durably at each step. Epochs only grow; a side that knows an
epoch never takes part in an older one.

    source                          destination
                (the content is sent, see `handover`)
    begin_move  MOVING, epoch+1
                                    accept_move  OWNED at that epoch
    finish_move MOVED

A source killed in between is in doubt: it may not use the session before it has asked the other side, which answers by
`decline_move`: had it accepted, the answer says OWNED and the source calls `finish_move`; had it not, it records that
it never will, the answer says DECLINED, and the source takes the session back with `abort_move`. `override_move` is for
a person who knows that the other side is gone.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from serai.checkpoints.errors import NotOwner, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.format import DocumentKind, frame_document, read_document
from serai.checkpoints.names import check_id, check_text
from serai.checkpoints.store import Store


class OwnerStatus(Enum):
    """Whether this store's runtime may use a session."""

    OWNED = "owned"
    MOVING = "moving"
    MOVED = "moved"
    DECLINED = "declined"


@dataclass(frozen=True, slots=True)
class Ownership:
    """One side's view of a session; `peer` names the other side of its last move."""

    session_id: str
    epoch: int
    status: OwnerStatus
    peer: str

    @property
    def may_be_used(self) -> bool:
        """Whether the session may be resumed here."""
        return self.status is OwnerStatus.OWNED


def ownership(store: Store, session_id: str) -> Ownership:
    """Who owns a session as far as this store knows; one that was never moved is owned at epoch 0."""
    check_id(session_id, "session id")
    what = f"the owner of session {session_id}"
    with store._doing("reading an owner"), store._index.lock:
        try:
            with store._folders.owners.reading(session_id, what) as reader:
                value = jsonio.decode(read_document(reader, DocumentKind.OWNER).data, what)
        except FileNotFoundError:
            return Ownership(session_id, 0, OwnerStatus.OWNED, "")
    return owner_of(value, session_id, what)


def owner_of(value: dict[str, Any], session_id: str, what: str) -> Ownership:
    """The owner a document's content names; `SnapshotCorrupt` if it names none, or that of another session."""
    try:
        found = Ownership(
            session_id=jsonio.field(value, "session", str, what),
            epoch=jsonio.count(value, "epoch", what),
            status=OwnerStatus(jsonio.field(value, "status", str, what)),
            peer=jsonio.field(value, "peer", str, what),
        )
    except ValueError as error:
        raise SnapshotCorrupt(what=what, problem=str(error)) from error
    if found.session_id != session_id:
        raise SnapshotCorrupt(what=what, problem=f"its file speaks of session {found.session_id}")
    return found


def _record(store: Store, owner: Ownership) -> Ownership:
    value = {"session": owner.session_id, "epoch": owner.epoch, "status": owner.status.value, "peer": owner.peer}
    document = frame_document(DocumentKind.OWNER, jsonio.encode(value))
    store._replace_file(document.data, store._folders.owners, owner.session_id)
    return owner


def begin_move(store: Store, session_id: str, peer: str) -> Ownership:
    """Source: from now on the session may not be used here. `NotOwner` unless it is owned here."""
    check_text(peer, "peer", may_be_empty=False)
    with store._doing("beginning a move"), store._index.lock:
        owner = ownership(store, session_id)
        if not owner.may_be_used:
            problem, remedy = f"is {owner.status.value} (epoch {owner.epoch}, {owner.peer})", "settle that move first"
            raise NotOwner(session_id=session_id, problem=problem, remedy=remedy)
        return _record(store, Ownership(session_id, owner.epoch + 1, OwnerStatus.MOVING, peer))


def accept_move(store: Store, session_id: str, epoch: int, peer: str) -> Ownership:
    """Destination: the session, whose bundle is here, is owned here from now on. Accepting twice is one acceptance."""
    check_text(peer, "peer", may_be_empty=False)
    store.session_head(session_id)  # it must have come
    with store._doing("accepting a move"), store._index.lock:
        owner = ownership(store, session_id)
        if owner == Ownership(session_id, epoch, OwnerStatus.OWNED, peer):
            return owner
        if epoch <= owner.epoch or owner.status is OwnerStatus.MOVING:
            problem = f"cannot be taken at epoch {epoch}: it is {owner.status.value} at epoch {owner.epoch} here"
            raise NotOwner(session_id=session_id, problem=problem, remedy="begin a new move at its owner")
        return _record(store, Ownership(session_id, epoch, OwnerStatus.OWNED, peer))


def decline_move(store: Store, session_id: str, epoch: int, peer: str) -> Ownership:
    """Destination: the answer to a source in doubt. What is not accepted by now never will be at this epoch."""
    check_text(peer, "peer", may_be_empty=False)
    with store._doing("answering about a move"), store._index.lock:
        owner = ownership(store, session_id)
        if owner.epoch >= epoch:
            return owner
        return _record(store, Ownership(session_id, epoch, OwnerStatus.DECLINED, peer))


def finish_move(store: Store, session_id: str, epoch: int) -> Ownership:
    """Source: the other side has accepted. Its copy here may be erased."""
    return _settle(store, session_id, epoch, OwnerStatus.MOVED)


def abort_move(store: Store, session_id: str, epoch: int) -> Ownership:
    """Source: the other side has declined; the session is owned here again."""
    return _settle(store, session_id, epoch, OwnerStatus.OWNED)


def override_move(store: Store, session_id: str) -> Ownership:
    """Take a session back without the other side's answer, on a person's word that it will not use it."""
    with store._doing("overriding a move"), store._index.lock:
        owner = ownership(store, session_id)
        return _record(store, Ownership(session_id, owner.epoch + 1, OwnerStatus.OWNED, owner.peer))


def _settle(store: Store, session_id: str, epoch: int, status: OwnerStatus) -> Ownership:
    with store._doing("settling a move"), store._index.lock:
        owner = ownership(store, session_id)
        if owner.epoch == epoch and owner.status is status:
            return owner
        if owner.epoch != epoch or owner.status is not OwnerStatus.MOVING:
            problem = f"is {owner.status.value} at epoch {owner.epoch}, not moving at epoch {epoch}"
            raise NotOwner(session_id=session_id, problem=problem, remedy="ask who owns it")
        return _record(store, Ownership(session_id, epoch, status, owner.peer))
