"""The one file that touches sessions: places to go on from, on top of the runtime's nodes.

A **place** is an immutable node with what a server must know to go on from it. Its session is *parked*: kept as it
stands, and every request that goes on works on a fork of it, which copies nothing. The memory of parked sessions is
taken back by the runtime's admission as of any idle session, and the longest unused ones are ended here; a place of
the store is then resumed when it is asked for, by replaying at most the tokens since its last stored state.
"""

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np

from serai.checkpoints.names import is_id
from serai.checkpoints.store import Store
from serai.runtime.chat import ChatFormat
from serai.runtime.driver import Counters
from serai.runtime.errors import NodeInUse, SeraiError, SessionGone
from serai.runtime.runtime import Runtime
from serai.runtime.server.catalogue import Catalogue, Known
from serai.runtime.server.errors import response_not_found
from serai.runtime.server.places import NOTHING, Ending, Place, Tokens
from serai.runtime.sessions.conversation import CURSOR_KEY
from serai.runtime.sessions.session import Session

log = logging.getLogger(__name__)

DELETED_TAG = "serai deleted "
"""A deleted place that others are built on keeps its tokens for them; this tag says that it is no place any more."""


@dataclass(eq=False, slots=True)
class _Parked:
    place: Place
    session: Session
    stored: bool
    pending: Tokens = field(default_factory=lambda: NOTHING)
    used_s: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)


class Sessions:
    """Begins, goes on, keeps and ends sessions for the server. `spawn` gives a task to work that nobody waits for."""

    def __init__(self, runtime: Runtime, *, keep_hot: int, unstored_ttl_s: float) -> None:
        self.runtime = runtime
        self.catalogue = Catalogue()
        self.format: ChatFormat = runtime.chat_format()
        self._keep_hot = keep_hot
        self._unstored_ttl_s = unstored_ttl_s
        self._parked: dict[str, _Parked] = {}
        self._restoring: dict[str, anyio.Lock] = {}
        self._to_erase: set[str] = set()
        self._to_delete: set[str] = set()  # places that were in use when they were deleted

    # what the model and the engine are

    @property
    def store(self) -> Store | None:
        return self.runtime.store

    @property
    def max_positions(self) -> int:
        return self.runtime.max_positions

    @property
    def engine_error(self) -> SeraiError | None:
        """Why the engine takes no more work, if it doesn't."""
        return self.runtime.engine_error

    @property
    def engine_waiting(self) -> int:
        """Calls that wait for the engine now."""
        return self.runtime.waiting_calls

    @property
    def counters(self) -> Counters:
        return self.runtime.counters

    @property
    def parked(self) -> int:
        return len(self._parked)

    def is_parked(self, session_id: str) -> bool:
        """Whether requests go on from where that session stands."""
        return any(one.session.id == session_id for one in self._parked.values())

    # places

    async def load(self) -> None:
        """Learn the places of the store; until it has returned, a client's old conversation may be read anew."""
        store = self.store
        if store is None:
            return
        deleted = await anyio.to_thread.run_sync(_deleted_in, store)
        gone = await anyio.to_thread.run_sync(_places_at, store, deleted)
        for known in await anyio.to_thread.run_sync(_places_of, store, deleted):
            self.catalogue.add(known)
        for known in gone:  # what was built on a fork draws by its number still
            if known.previous is not None:
                self.catalogue.forked(known.previous, known.fork)
        self._to_delete.update(deleted)

    async def place(self, place_id: str, namespace: str) -> Place:
        """What is known of a place. Raises a 404 for one that this namespace doesn't have."""
        parked = self._parked.get(place_id)
        place = parked.place if parked is not None else await self._stored_place(place_id)
        if place is None or place.namespace != namespace or self.catalogue.get(place_id, namespace) is None:
            raise response_not_found(place_id)
        return place

    async def _stored_place(self, place_id: str) -> Place | None:
        store = self.store
        if store is None or not is_id(place_id):
            return None
        try:
            return Place.of(await anyio.to_thread.run_sync(store.node, place_id))
        except SessionGone:
            return None

    # sessions to work on

    async def begin(self, namespace: str, label: str = "") -> Session:
        return await self.runtime.session(namespace=namespace, label=label)

    async def go_on(self, place: Place) -> tuple[Session, int]:
        """A session that stands at a place and is the caller's own, and how many tokens had to be read for it."""
        parked, replayed = await self._unpark(place)
        parked.used_s = anyio.current_time()
        try:
            async with parked.lock:
                if len(parked.pending):
                    replayed += len(parked.pending)
                    await self._read_pending(parked)
                return await self.branch(parked.session, None), replayed
        finally:
            # It was forgotten before it was restored, or meanwhile, when its session was another: the last one here
            # ends it, even one that was cancelled as it asked for the lock.
            if self._parked.get(place.id) is not parked and not parked.lock.locked():
                await self.end(parked.session, erase=not parked.stored)

    async def _read_pending(self, parked: _Parked) -> None:
        """Read the ending of a place, on a session of its own: the place stays the last node of the one before."""
        before = parked.session
        session = await self.branch(before, None)
        try:
            await session.append(parked.pending, metadata={CURSOR_KEY: parked.place.cursor.to_json()})
        except BaseException:
            await self.end(session, erase=not parked.stored)
            raise
        session.stand_by()
        parked.session, parked.pending = session, NOTHING
        await self.end(before, erase=not parked.stored)

    async def _unpark(self, place: Place) -> tuple[_Parked, int]:
        """What stands at a place, and how many tokens were read for it. It stays parked unless the place was deleted
        meanwhile: who has begun goes on, and nobody else can."""
        lock = self._restoring.setdefault(place.id, anyio.Lock())
        try:
            async with lock:
                parked = self._parked.get(place.id)
                if parked is not None and parked.session.is_open:
                    return parked, 0
                self._parked.pop(place.id, None)  # somebody ended it by its session's id
                if self.store is None:
                    raise response_not_found(place.id)
                try:
                    session = await self.runtime.resume(place.id)
                except SessionGone:  # it was there when the request looked for it
                    raise response_not_found(place.id) from None
                parked = _Parked(place, session, stored=True)
                if self.catalogue.get(place.id, place.namespace) is not None:
                    self._park(parked)
                return parked, session.replayed_tokens
        finally:
            if not lock.locked() and self._restoring.get(place.id) is lock:
                del self._restoring[place.id]

    async def branch(self, session: Session, choice: int | None) -> Session:
        """A fork. Going on from a place keeps its random branch, as resuming it does; a choice has one of its own."""
        return await (session.twin() if choice is None else session.fork(choice=choice))

    async def end(self, session: Session, *, erase: bool = False) -> None:
        """Free a session; with `erase`, as if it had never been."""
        with anyio.CancelScope(shield=True):
            if erase:
                session.forgo_states()
            try:
                await session.close()
            except SeraiError:
                await self._break_off(session)
            if erase and self.store is not None:
                await self._erase_all((session.id,))

    async def _break_off(self, session: Session) -> None:
        """End a session that is busy or can't be written down: its memory is freed in any case."""
        try:
            await session.break_off()
        except SeraiError:
            log.exception("what session %s said last could not be stored", session.id)

    async def _erase_all(self, session_ids: Collection[str]) -> None:
        """Delete sessions. Nodes that others were built on can't go yet, nor a session that somebody has just gone on
        from: `tidy` tries again once those may have."""
        if not session_ids:
            return
        in_use = self.runtime.points_in_use()
        busy = {*in_use, *in_use.values()}
        self._to_erase.update(busy & set(session_ids))
        free = [one for one in session_ids if one not in busy]
        if free and self.store is not None:
            await anyio.to_thread.run_sync(self._erase, self.store, free)

    def _erase(self, store: Store, session_ids: Iterable[str]) -> None:
        for session_id in session_ids:
            try:
                store.delete_session(session_id)
                store.session_head(session_id)  # what is left of it is what others were built on
                self._to_erase.add(session_id)
            except SessionGone:
                self._to_erase.discard(session_id)
            except SeraiError as error:
                log.warning("session %s is still stored, and will be deleted later: %s", session_id, error)
                self._to_erase.add(session_id)

    # keeping what was said

    async def keep(
        self,
        place_of: Callable[[int], Place],
        session: Session,
        *,
        ending: Ending | None,
        store: bool,
        parked: bool = True,
    ) -> Place:
        """Make where a session stands a place. When this returns it is durable, if it is to be stored at all.

        `place_of(position)` gives the place. With an `ending`, the session stands before the reply, whose canonical
        tokens the place has beside it; they are read when somebody goes on. Takes the session over in any case.
        """
        added = 0 if ending is None else len(ending.prompt) + len(ending.reply)
        place = place_of(session.position + added)
        with anyio.CancelScope(shield=True):
            try:
                if store and self.store is not None:
                    await self._record(place, session, ending)
                else:
                    await session.flush()
            except BaseException:
                await self.end(session, erase=not store)
                raise
            if store and self.store is None and not parked:
                parked = True  # nothing else holds it
            if parked or store:
                self.catalogue.add(place.known())
            if parked:
                pending = NOTHING if ending is None else np.concatenate([ending.prompt, ending.reply])
                self._park(_Parked(place, session, store, pending))
            else:
                await self.end(session, erase=not store)
        return place

    async def _record(self, place: Place, session: Session, ending: Ending | None) -> None:
        """Write the place's node, and before it those of an ending."""
        if ending is None:
            await session.mark(place.metadata(), node_id=place.id)
            return
        await session.flush()
        await session.write_beside(
            ending.prompt,
            ending.reply,
            append_metadata={CURSOR_KEY: place.cursor.to_json()},
            metadata=place.metadata(),
            node_id=place.id,
        )

    def _park(self, parked: _Parked) -> _Parked:
        parked.used_s = anyio.current_time()
        parked.session.stand_by()
        self._parked[parked.place.id] = parked
        return parked

    # upkeep

    async def tidy(self, *, now_s: float) -> None:
        """Forget what was not to be stored, and end what was not used for longest."""
        for parked in list(self._parked.values()):
            if not parked.stored and now_s - parked.used_s >= self._unstored_ttl_s:
                await self.forget(parked.place.id)
        await self._erase_all(tuple(self._to_erase))
        await self._delete_later()
        for parked in self._too_many():
            if parked.stored and self.store is not None:
                await self._unload(parked)
            else:
                await self.forget(parked.place.id)

    def _too_many(self) -> list[_Parked]:
        """Those beyond `keep_hot`: one by one what was not used for longest in the namespace that has most."""
        lines: defaultdict[str, deque[_Parked]] = defaultdict(deque)
        for parked in sorted(self._parked.values(), key=lambda one: one.used_s):
            lines[parked.place.namespace].append(parked)
        beyond = range(self._keep_hot, len(self._parked))
        return [max(lines.values(), key=len).popleft() for _ in beyond]

    async def _unload(self, parked: _Parked) -> None:
        """End a parked session; its place stays in the store."""
        if parked.session.doing is None and not parked.lock.statistics().locked:
            self._parked.pop(parked.place.id, None)
            await self.end(parked.session)

    async def forget(self, place_id: str) -> None:
        """Delete a place: it can't be gone on from any more. What others built on it stays theirs."""
        parked = self._parked.pop(place_id, None)
        known = self.catalogue.remove(place_id)
        if parked is not None:
            await self.end(parked.session, erase=not parked.stored)
        store = self.store
        if store is None or (parked is not None and not parked.stored) or not is_id(place_id):
            return

        in_use = self.runtime.points_in_use()  # by requests that have gone on from it, and not written a node yet
        if place_id in in_use:
            self._to_delete.add(place_id)

        def work() -> None:
            if place_id in in_use or store.children(place_id):
                store.tag(DELETED_TAG + place_id, place_id)
            else:
                store.delete(place_id)

        try:
            await anyio.to_thread.run_sync(work)
        except SessionGone:
            log.debug("place %s was not stored", place_id)
        except SeraiError:
            if known is not None:
                self.catalogue.add(known)  # it is there still: whoever asks again can have it deleted
            raise

    async def _delete_later(self) -> None:
        """Delete the places that were in use then and aren't now, unless others have been built on them."""
        in_use = self.runtime.points_in_use() if self._to_delete else {}
        free = [one for one in self._to_delete if one not in in_use]
        if free and self.store is not None:
            await anyio.to_thread.run_sync(self._delete, self.store, free)

    def _delete(self, store: Store, place_ids: Iterable[str]) -> None:
        for place_id in place_ids:
            try:
                store.delete(place_id)
            except (NodeInUse, SessionGone):
                log.debug("place %s is gone, or keeps its tokens for what was built on it", place_id)
            except SeraiError as error:
                log.warning("place %s is still stored, and will be deleted later: %s", place_id, error)
                continue
            self._to_delete.discard(place_id)

    async def close(self, *, save_s: float = 30.0) -> None:
        """End what is parked. States are stored, the latest used first, until `save_s` are over: whoever goes on from
        there after a restart reads nothing again, and from the others the tokens since their last stored state."""
        await self.runtime.settle()
        until_s = anyio.current_time() + save_s
        while self._parked:  # what ends late may be parked meanwhile
            parked = max(self._parked.values(), key=lambda one: one.used_s)
            del self._parked[parked.place.id]
            if parked.stored and anyio.current_time() < until_s:
                await self._store_state(parked)
            await self.end(parked.session, erase=not parked.stored)

    async def _store_state(self, parked: _Parked) -> None:
        try:
            await parked.session.demote()
        except SeraiError as error:
            log.warning("the state of response %s is not stored, its tokens are: %s", parked.place.id, error)


def _deleted_in(store: Store) -> set[str]:
    """The ids of deleted places whose tokens are still there."""
    return {tag.removeprefix(DELETED_TAG) for tag in store.tags() if tag.startswith(DELETED_TAG)}


def _places_of(store: Store, deleted: Collection[str]) -> list[Known]:
    """Every place of a store, oldest session first."""
    ids = dict.fromkeys(node_id for info in store.sessions() for node_id in store.ancestry(info.head_id))
    return _places_at(store, [node_id for node_id in ids if node_id not in deleted])


def _places_at(store: Store, node_ids: Iterable[str]) -> list[Known]:
    """What places these nodes are, those that are none or can't be read left out."""
    found: list[Known] = []
    for node_id in node_ids:
        try:
            place = Place.of(store.node(node_id))
        except SeraiError as error:
            log.warning("%s", error)
            continue
        if place is not None:
            found.append(place.known())
    return found
