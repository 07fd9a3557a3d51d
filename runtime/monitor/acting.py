"""Actions on the sessions of a runtime in this process; the server's endpoint and the embedded monitor share them."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from serai.checkpoints.names import check_text
from serai.runtime.monitor.files import new_file
from serai.runtime.monitor.source import Action, ActionKind, ActionRefused, Outcome

if TYPE_CHECKING:
    from serai.checkpoints.store import Store
    from serai.runtime.runtime import Runtime
    from serai.runtime.sessions.session import Session


async def act(
    runtime: "Runtime",
    action: Action,
    *,
    store: "Store | None" = None,
    cancel: Callable[[str], bool] | None = None,
) -> Outcome:
    """Do one action. `store` is the runtime's own; tags and erasing need it. `cancel` ends the call that a session is
    in the middle of, by the session's id, and tells whether there was one; who owns the calls provides it.

    Raises `ActionRefused`, or what the session's own call raises.
    """
    match action.kind:
        case ActionKind.FORK:
            parent = _live(runtime, action)
            if action.value is not None:
                check_text(action.value, "label", may_be_empty=True)
            fork = await parent.fork(turn=action.turn, position=action.position, label=action.value)
            return Outcome(f"forked at position {fork.position:,}", fork.id)
        case ActionKind.PAUSE:
            point = await _live(runtime, action).pause()
            return Outcome(f"paused at position {point.position:,}, {point.written_bytes:,} bytes written", point.id)
        case ActionKind.RESUME:
            return await _resume(runtime, action.session_id)
        case ActionKind.CANCEL:
            if cancel is None:
                raise ActionRefused("the calls of this runtime belong to its program, so only that can cancel them")
            session = _live(runtime, action)
            if not cancel(session.id):
                raise ActionRefused(f"session {session.id} has no call under way to cancel")
            return Outcome("the call was cancelled; the session keeps the tokens it had handed out")
        case ActionKind.TAG:
            return await _tag(_live(runtime, action), _need(store, "tags"), action.value or "")
        case ActionKind.LABEL:
            session = _live(runtime, action)
            session.rename(action.value or "")
            return Outcome("labelled")
        case ActionKind.DELETE:
            return await _delete(runtime, store, action.session_id)


async def export(runtime: "Runtime", session_id: str, path: Path, *, store: "Store | None") -> Outcome:
    """Write a session, live or stored, as a bundle to a new file; raises `ActionRefused`."""
    from serai.checkpoints.moving import transfer

    kept = _need(store, "exporting")
    session = runtime.find(session_id)
    node = session_id if session is None else await _durable_point(session)

    def write() -> transfer.Moved:
        with new_file(path) as file:
            return transfer.export(kept, kept.resolve(node), file)

    moved = await anyio.to_thread.run_sync(write)
    return Outcome(f"{moved.bytes:,} bytes written to {path}", moved.node_id)


async def _resume(runtime: "Runtime", name: str) -> Outcome:
    session = runtime.find(name)
    if session is None:
        session = await runtime.resume(name)
        return Outcome(f"resumed at position {session.position:,}", session.id)
    with session.use("resume"):
        await session.hot()
    return Outcome(f"in memory at position {session.position:,}", session.id)


async def _tag(session: "Session", store: "Store", tag: str) -> Outcome:
    node = await _durable_point(session)
    await anyio.to_thread.run_sync(store.tag, tag, node)
    return Outcome(f"tagged position {session.position:,} as {tag!r}", node)


async def _delete(runtime: "Runtime", store: "Store | None", session_id: str) -> Outcome:
    session = runtime.find(session_id)
    if session is not None:
        await session.close()
    if store is None:
        return Outcome("closed; nothing of it was stored")
    for other_id in runtime.live_on(session_id):
        other = runtime.find(other_id)
        if other is not None:
            await other.flush()  # it has written nothing of its own, and would lose what it stands on
    erased = await anyio.to_thread.run_sync(store.delete_session, session_id)
    return Outcome(f"erased {erased.nodes:,} nodes and {erased.file_bytes:,} bytes of files")


async def _durable_point(session: "Session") -> str:
    """The id of the session's last node, once that is written."""
    with session.use("writing its point"):
        await session.record.flush()
        return session.record.point()


def _live(runtime: "Runtime", action: Action) -> "Session":
    session = runtime.find(action.session_id)
    if session is None:
        raise ActionRefused(f"session {action.session_id} is not live, so there is nothing to {action.kind.value}")
    return session


def _need(store: "Store | None", what: str) -> "Store":
    if store is None:
        raise ActionRefused(f"{what} needs the store, and this runtime was opened without one")
    return store
