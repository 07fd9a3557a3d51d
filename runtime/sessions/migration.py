"""Moving a session to another store, or to a place from which another runtime takes it (see `moving/handover`), and
copying points between stores.

What costs time, the state, goes while the session is still owned here and is sent only as far as it is missing there.
Then ownership changes hands in a few small writes. A cancelled caller waits for these, but of the content at most for
the object that a place is being given or asked for, or that is read again because an attempt before had left it.
"""

from typing import TYPE_CHECKING

from serai.checkpoints.moving.direct import fetch, send
from serai.checkpoints.moving.handover import hand_over, peer_at, place_peer_at
from serai.checkpoints.moving.ownership import ownership
from serai.checkpoints.moving.transfer import Moved, Stopped
from serai.checkpoints.store import Store
from serai.runtime.errors import BadParameter, SeraiError
from serai.runtime.sessions.journal import Journal, Point
from serai.runtime.to_the_end import in_thread_until_stopped

if TYPE_CHECKING:
    from serai.runtime.sessions.durable import DurableSession


async def migrate(session: "DurableSession", journal: Journal, target: str) -> Point:
    """What `Session.migrate` does, for a session held by that call; it has ended unless it is owned here as before."""
    store = _need(journal)
    peer = peer_at(target)
    point = await session.record.save_settled(await session.hot(), session.timeline, "migrate")
    owned = False  # unless it is found to be

    def move(stopped: Stopped) -> None:
        nonlocal owned
        try:
            hand_over(store, session.id, point.id, peer, stopped)
        finally:  # on this thread: a cancelled caller, who waits no second time, must know it too
            owned = _is_owned(store, session.id)

    try:
        await in_thread_until_stopped(move)
    finally:
        if not owned:
            session.moved()
    return point


def _is_owned(store: Store, session_id: str) -> bool:
    try:
        return ownership(store, session_id).may_be_used
    except SeraiError:
        return False  # what can't be read can't be claimed


async def take(journal: Journal, session_id: str, source: str) -> None:
    """Fetch a session that was moved to the place `source` and own it from now on."""
    store = _need(journal)
    peer = place_peer_at(source)
    await in_thread_until_stopped(lambda stopped: peer.take(store, session_id, stopped))


async def push(journal: Journal, name: str, target: str) -> Moved:
    """Copy a stored point to another store or a place."""
    store = _need(journal)
    return await in_thread_until_stopped(lambda stopped: send(store, store.resolve(name), target, stopped))


async def pull(journal: Journal, name: str, source: str) -> Moved:
    """Copy a point from another store or a place."""
    store = _need(journal)
    return await in_thread_until_stopped(lambda stopped: fetch(store, name, source, stopped))


def _need(journal: Journal) -> Store:
    if journal.store is None:
        raise BadParameter('moving a session needs a store here too; open the runtime with store="some/folder"')
    return journal.store
