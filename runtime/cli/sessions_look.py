"""`serai sessions ls, show, diff, resume`: what is stored, without changing it."""

import os
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from serai.runtime.cli.options import Json, PrecisionName
from serai.runtime.cli.output import bytes_text, counted, pairs, reporting, table
from serai.runtime.cli.run import default_store, run
from serai.runtime.cli.stored import Name, StoreFolder, open_to_look, store_folder, when, words

if TYPE_CHECKING:
    from serai.checkpoints.nodes import NodeRecord
    from serai.checkpoints.reports import SnapshotInfo
    from serai.checkpoints.store import Store

LAST_NODES = 20


def ls(store: StoreFolder = None, as_json: Json = False) -> None:
    """List the stored sessions, latest activity last, and what they take on disk."""
    with reporting(as_json=as_json) as out, open_to_look(store) as opened:
        found, tags, sizes = opened.sessions(), opened.tags(), opened.sizes()
        shown = table("session", "tokens", "turn", "nodes", "state", "last", "label")
        shown.columns[0].no_wrap = True
        shown.columns[-1].justify = "left"
        for one in found:
            state = "yes" if one.has_snapshot else "replay"
            figures = f"{one.position:,}", f"{one.turn:,}", f"{one.nodes:,}", state, when(one.updated_s)
            shown.add_row(one.session_id, *figures, words(one.label))
        tagged = table("tag", "node", "note")
        tagged.columns[-1].justify = "left"
        notes = {tag: opened.note(tag) for tag in tags}
        for tag, node in sorted(tags.items()):
            tagged.add_row(words(tag), node, words(notes[tag]))
        out.result(
            {
                "store": opened.location,
                "sessions": [asdict(one) for one in found],
                "tags": tags,
                "notes": notes,
                "sizes": asdict(sizes) | {"file_bytes": sizes.file_bytes},
            },
            *([shown] if found else []),
            *([tagged] if tags else []),
            f"{counted(len(found), 'session')}, {counted(sizes.snapshots, 'state')}, {bytes_text(sizes.file_bytes)} "
            f"in {opened.location}",
        )


def show(name: Name, store: StoreFolder = None, as_json: Json = False) -> None:
    """Show a point of a session: what it is, the nodes it continues from, and the state stored for it."""
    from serai.checkpoints.moving.ownership import ownership

    with reporting(as_json=as_json) as out, open_to_look(store) as opened:
        node_id = opened.resolve(name)
        path = opened.path(node_id)
        node, nearest = path[-1], opened.nearest_snapshot(node_id)
        state = None if nearest is None else opened.snapshot_info(nearest)
        owner, tags = ownership(opened, node.session_id), opened.tags()
        steps = [_step(opened, one, tags) for one in path]
        replayed = node.position - (0 if state is None else state.position)
        nodes = table(
            "node", "kind", "at", "tokens", "state", "when", "tags", title=f"\nHow it came about ({len(path)})"
        )
        for column in nodes.columns[:-1]:
            column.no_wrap = True
        for step, one in list(zip(steps, path, strict=True))[-LAST_NODES:]:
            figures = one.kind.value, f"{one.position:,}", f"+{len(one.tokens):,}"
            has_state = "yes" if step["has_snapshot"] else "-"
            nodes.add_row(one.id, *figures, has_state, when(one.created_s), words(", ".join(_tags_of(one.id, tags))))
        notes = {tag: opened.note(tag) for tag in _tags_of(node.id, tags)}
        rows: list[tuple[str | Text, str | Text]] = [
            ("Node", node.id),
            *((words(f"Tag {tag}"), words(note)) for tag, note in notes.items()),
            ("Session", f"{node.session_id}, {owner.status.value} at epoch {owner.epoch}"),
            ("At", f"{node.position:,} tokens, turn {node.turn:,}" + (", inexact" if node.inexact else "")),
            ("Goes on in", counted(len(opened.children(node_id)), "node")),
            ("State", _state_text(state, replayed)),
        ]
        told = {
            "node": _node(node)
            | {"tags": _tags_of(node.id, tags), "notes": notes, "children": opened.children(node_id)},
            "owner": {"status": owner.status.value, "epoch": owner.epoch, "peer": owner.peer},
            "state": None if state is None else _state(state),
            "replay_tokens": replayed,
            "path": steps,
        }
        out.result(told, words(node.label) if node.label else Text("(no label)"), pairs(rows), nodes)


def diff(
    one: Annotated[str, typer.Argument(metavar="ONE", help="A session, node or tag.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another.")],
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Compare two points: the tokens they begin with alike, and the bytes their states share."""
    from serai.checkpoints.upkeep.compare import compare

    with reporting(as_json=as_json) as out, open_to_look(store) as opened:
        ids = opened.resolve(one), opened.resolve(other)
        found = compare(opened, *ids)
        shown = table("", "one", "other", "common")
        shown.add_row("Tokens", *(f"{count:,}" for count in (*found.positions, found.common_tokens)))
        shown.add_row("Bytes of state", *(bytes_text(size) for size in (*found.own_bytes, found.shared_bytes)))
        told = f"{ids[0]} and {ids[1]} have no node in common"
        if found.common_node is not None:
            told = f"the last node both continue from is {found.common_node}"
        out.result({"nodes": list(ids)} | asdict(found), shown, told)


def resume(
    name: Name,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Go on with this model at once, as serai run does.")
    ] = None,
    prompt: Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="Text to read first.")] = None,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Say how to go on from a point; with a model, do it."""
    from serai.checkpoints.errors import NotOwner
    from serai.checkpoints.moving.ownership import ownership

    with reporting(as_json=as_json) as out:
        with open_to_look(store) as opened:
            node = opened.node(opened.resolve(name))
            nearest = opened.nearest_snapshot(node.id)
            state = None if nearest is None else opened.snapshot_info(nearest)
            owner = ownership(opened, node.session_id)
        if not owner.may_be_used:
            problem = f"is {owner.status.value} (epoch {owner.epoch}, {owner.peer})"
            raise NotOwner(session_id=node.session_id, problem=problem, remedy="resume it where it is owned")
        precision = PrecisionName.FAST if state is None else PrecisionName(state.fingerprint.precision)
        if model is None:
            options = ["--resume", node.id]
            if store is not None and store != default_store(os.environ):
                options += ["--store", str(store)]
            if precision is not PrecisionName.FAST:
                options += ["--precision", precision.value]
            command = f"serai run MODEL {shlex.join(options)}"
            replayed = node.position - (0 if state is None else state.position)
            told = {"node": node.id, "session": node.session_id, "position": node.position}
            out.result(
                told | {"precision": precision.value, "replay_tokens": replayed, "command": command},
                f"{node.position:,} tokens, {_state_text(state, replayed)}",
                "go on with the model it was made with:",
            )
            if not as_json:
                typer.echo(command)  # in one piece however narrow the terminal is, to be copied
            return
    run(model, prompt, resume=node.id, store=store_folder(store), precision=precision, as_json=as_json)


def _step(store: "Store", node: "NodeRecord", tags: dict[str, str]) -> dict[str, object]:
    return {
        "id": node.id,
        "session": node.session_id,
        "kind": node.kind.value,
        "position": node.position,
        "added_tokens": len(node.tokens),
        "turn": node.turn,
        "created_s": node.created_s,
        "has_snapshot": store.has_snapshot(node.id),
        "tags": _tags_of(node.id, tags),
    }


def _node(node: "NodeRecord") -> dict[str, object]:
    return {
        "id": node.id,
        "session": node.session_id,
        "parent": node.parent_id,
        "kind": node.kind.value,
        "position": node.position,
        "visible_tokens": node.visible_tokens,
        "turn": node.turn,
        "label": node.label,
        "namespace": node.namespace,
        "created_s": node.created_s,
        "inexact": node.inexact,
        "metadata": dict(node.metadata),
    }


def _state(state: "SnapshotInfo") -> dict[str, object]:
    return {
        "node": state.node_id,
        "position": state.position,
        "raw_bytes": state.raw_bytes,
        "reason": state.reason,
        "created_s": state.created_s,
        "layout": state.layout.describe(),
        "stored_as": {"state": state.storage.state.value, "latents": state.storage.latents.value},
        "fingerprint": state.fingerprint.as_json(),
    }


def _state_text(state: "SnapshotInfo | None", replayed: int) -> str:
    if state is None:
        return f"none is stored; {replayed:,} tokens are replayed"
    again = f"; {replayed:,} tokens after it are replayed" if replayed else ""
    by = f"{state.fingerprint.precision} precision, SIMD path {state.fingerprint.simd}"
    return f"{bytes_text(state.raw_bytes)} at {state.position:,} tokens, {by}{again}"


def _tags_of(node_id: str, tags: dict[str, str]) -> list[str]:
    return sorted(tag for tag, tagged in tags.items() if tagged == node_id)
