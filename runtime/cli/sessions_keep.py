"""`serai sessions rm, tag, gc, fsck`: keeping a store in order. Each needs the store for itself."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import FAILED, bytes_text, counted, pairs, reporting
from serai.runtime.cli.stored import StoreFolder, Yes, ask, open_to_change, store_folder

if TYPE_CHECKING:
    from serai.checkpoints.store import Store

DAY_S = 86_400.0


def rm(
    name: Annotated[str, typer.Argument(metavar="ID", help="A session, or a node that nothing continues from.")],
    store: StoreFolder = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Erase a session or one node for good: token ids, states and tags. What other sessions continue from stays."""
    from serai.runtime.errors import BadParameter

    with reporting(as_json=as_json) as out, open_to_change(store) as opened:
        if name in opened.tags():
            raise BadParameter(f"{name!r} is a tag; erase it with serai sessions tag --remove, or name the node's id")
        is_session = any(one.session_id == name for one in opened.sessions())
        ask(_question(opened, name, is_session), yes=yes)
        erased = opened.delete_session(name) if is_session else opened.delete(opened.resolve(name))
        out.result(
            {"erased": name} | asdict(erased),
            f"erased {counted(erased.nodes, 'node')} and {counted(erased.snapshots, 'state')}, "
            f"{bytes_text(erased.file_bytes)}",
        )


def tag(
    name: Annotated[str, typer.Argument(metavar="TAG", help="The name to give, such as before-the-release.")],
    target: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A session, node or other tag.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away; its node stays.")] = False,
    note: Annotated[
        str | None, typer.Option("--note", metavar="TEXT", help="What the point is worth keeping for, in one line.")
    ] = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Give a point a name to resume it by, and perhaps a note; a tag that exists moves. gc keeps the states of tagged
    points."""
    from serai.runtime.errors import BadParameter

    with reporting(as_json=as_json) as out:
        if remove == (target is not None) or (remove and note is not None):
            raise BadParameter("name a point to tag, or give --remove and the tag alone")
        with open_to_change(store) as opened:
            before = opened.tags().get(name)
            node = None if target is None else opened.resolve(target)
            if node is None:
                opened.untag(name)
            else:
                opened.tag(name, node, note or "")
        told = f"{name!r} is no tag any more" if node is None else f"{name!r} is node {node}"
        moved = f"; it was {before}" if node is not None and before not in (None, node) else ""
        out.result({"tag": name, "node": node, "before": before, "note": note or ""}, told + moved)


def gc(
    snapshots: Annotated[
        int | None, typer.Option("--states", min=0, metavar="N", help="Keep the last N states of each session.")
    ] = None,
    state_days: Annotated[
        float | None, typer.Option("--state-days", min=0, metavar="D", help="Keep states used within D days.")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", metavar="SIZE", help='Drop states of least value above, say, "20GB".')
    ] = None,
    session_days: Annotated[
        float | None,
        typer.Option("--session-days", min=0, metavar="D", help="Erase whole sessions without activity for D days."),
    ] = None,
    store: StoreFolder = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Free disk. A dropped state costs a replay, never content; only --session-days erases tokens, and asks first.
    Tagged points keep their state, and the last of each session goes by --max-size alone. Without options only what
    killed saves left is removed."""
    from serai.checkpoints.upkeep.gc import GcPolicy, collect
    from serai.runtime.memory.byte_sizes import parse_bytes

    with reporting(as_json=as_json) as out, open_to_change(store) as opened:
        policy = GcPolicy(
            snapshots_per_session=snapshots,
            snapshot_idle_s=None if state_days is None else state_days * DAY_S,
            max_bytes=None if max_size is None else parse_bytes(max_size, name="--max-size"),
            session_idle_s=None if session_days is None else session_days * DAY_S,
        )
        if policy.session_idle_s is not None:
            now_s = opened.now()
            idle = [one for one in opened.sessions() if now_s - one.updated_s > policy.session_idle_s]
            if idle:
                many = counted(len(idle), "session")
                ask(f"erase {many} without activity for {session_days:g} days, for good?", yes=yes)
        done = collect(opened, policy)
        left = opened.sizes().file_bytes
        out.result(
            asdict(done) | {"file_bytes": left},
            f"{counted(done.snapshots, 'state')} and {counted(done.sessions, 'session')} erased, "
            f"{counted(done.orphan_files, 'stray file')} removed: {bytes_text(done.freed_bytes)} freed, "
            f"{bytes_text(left)} left",
        )


def fsck(
    rebuild: Annotated[
        bool,
        typer.Option(
            "--rebuild",
            help="Make the index anew from the other files first; for one that is lost.",
        ),
    ] = False,
    keep_orphans: Annotated[
        bool, typer.Option("--keep-orphans", help="Only name the files that belong to nothing.")
    ] = False,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Read every file and compare it with its hash and the index; fails if anything is damaged. Damaged states aren't
    used again: their sessions are replayed from their tokens."""
    from serai.checkpoints.upkeep.fsck import fsck as check
    from serai.checkpoints.upkeep.fsck import rebuild as rebuild_index

    with reporting(as_json=as_json) as out:
        lost = rebuild_index(str(store_folder(store))).problems if rebuild else ()
        with open_to_change(store) as opened:
            # What a rebuild could not place is still there to be looked at, unless a person says otherwise.
            found = check(opened, remove_orphans=not (keep_orphans or lost))
        problems = (*lost, *found.problems)
        counts = f"{counted(found.nodes, 'node')}, {counted(found.snapshots, 'state')}, {counted(found.parts, 'part')}"
        orphans = "kept" if keep_orphans or lost else "removed"
        out.result(
            asdict(found) | {"problems": list(problems), "clean": not problems, "rebuilt": rebuild},
            pairs([("Read", counts), ("Stray files", f"{len(found.orphans):,} {orphans}")]),
            "everything is whole" if not problems else f"{len(problems):,} problems",
        )
        for problem in problems:
            out.note(f"serai: {problem}")
        if problems:
            raise typer.Exit(FAILED)


def _question(store: "Store", name: str, is_session: bool) -> str:
    """What is about to be erased, with its size."""
    if not is_session:
        node = store.node(store.resolve(name))
        return (
            f"erase the last {counted(len(node.tokens), 'token')} of session {node.session_id} (node {name}), for good?"
        )
    info = next(one for one in store.sessions() if one.session_id == name)
    tags = sum(store.node(node).session_id == name for node in store.tags().values())
    tagged = f", {tags:,} of them tagged" if tags else ""
    return f"erase session {name} ({info.position:,} tokens, {counted(info.nodes, 'node')}{tagged}), for good?"
