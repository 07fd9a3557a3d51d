"""`serai sessions export, import, push, pull`: from one store to another, as one file, straight, or through a place.

These copy, and two copies that both go on are two sessions of one id. With `push --move` and `pull --take` a session
changes hands instead; `settle` says who owns one, after asking the other side of a move that was broken off.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import bytes_text, counted, reporting
from serai.runtime.cli.stored import Name, StoreFolder, Yes, ask, open_to_change, open_to_look

if TYPE_CHECKING:
    from serai.checkpoints.moving.transfer import Moved

PIPE = "-"

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="Another store, by its folder, or a place, by its URL: file:///folder, s3://bucket/folder."
    ),
]


def export(
    name: Name,
    file: Annotated[str, typer.Argument(metavar="FILE", help='Where to write; "-" is stdout.')],
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a point, all it continues from and its state to one file."""
    from serai.checkpoints.moving.transfer import export as write_bundle
    from serai.runtime.errors import BadParameter

    with reporting(as_json=as_json) as out, open_to_look(store) as opened:
        if file == PIPE and as_json:
            raise BadParameter("--json and the file can't both go to stdout; name a file")
        node_id = opened.resolve(name)
        with ExitStack() as stack:
            if file == PIPE:
                sink = _Pipe(sys.stdout.buffer, "stdout")
            else:
                path = Path(file)
                unfinished = path.with_name(f".{path.name}.unfinished")
                sink = stack.enter_context(_Pipe.file(unfinished, "wb"))
                stack.callback(unfinished.unlink, missing_ok=True)
            moved = write_bundle(opened, node_id, sink)
            sink.finish()
            if file != PIPE:
                _rename(unfinished, path)
        told = f"{counted(moved.nodes, 'node')} and {counted(moved.parts, 'part')}: {bytes_text(moved.bytes)} in {file}"
        if file == PIPE:
            out.note(told)
        else:
            out.result(asdict(moved) | {"file": file}, told)


def import_(
    file: Annotated[str, typer.Argument(metavar="FILE", help='What export wrote; "-" is stdin.')],
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Take a file that export wrote into the store, all of it or nothing; the store is made if there is none."""
    from serai.checkpoints.moving.receiving import import_bundle

    with reporting(as_json=as_json) as out, ExitStack() as stack:
        if file == PIPE:
            source = _Pipe(sys.stdin.buffer, "stdin")
        else:
            source = stack.enter_context(_Pipe.file(Path(file), "rb"))
        moved = import_bundle(stack.enter_context(open_to_change(store, create=True)), source)
        out.result(asdict(moved), _came(moved))


def push(
    name: Name,
    url: Url,
    move: Annotated[
        bool, typer.Option("--move", help="Hand the session over: from then on it is used where it is taken.")
    ] = False,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Send a point, all it continues from and its state to a store, made if there is none, or a place; only what is
    missing there."""
    from serai.checkpoints.moving.handover import StorePeer, hand_over, peer_at
    from serai.runtime.errors import BadParameter

    with reporting(as_json=as_json) as out:
        peer = peer_at(url)
        with (open_to_change if move else open_to_look)(store) as opened:
            node_id = opened.resolve(name)
            session_id = opened.node(node_id).session_id
            if move and opened.session_head(session_id) != node_id:
                raise BadParameter(f"{name!r} is a point within session {session_id}; only a whole session is moved")
            if move:
                moved = hand_over(opened, session_id, node_id, peer)
            else:
                moved = peer.receive(opened, node_id)
        if isinstance(peer, StorePeer):
            hint = f"resume it there by its id: {session_id if move else moved.node_id}"
        else:
            hint = f"take it by its id: {session_id}" if move else f"fetch it by its id: {moved.node_id}"
        out.result(
            asdict(moved) | {"url": url, "session_id": session_id, "handed_over": move},
            f"sent {counted(moved.parts, 'part')} ({moved.parts_had:,} were there): {bytes_text(moved.bytes)}",
            hint,
        )


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="The id of a node, or with --take a session, as push told; in a store a session or tag, too.",
        ),
    ],
    url: Url,
    take: Annotated[
        bool, typer.Option("--take", help="Take over a session that was pushed with --move; it is used here then.")
    ] = False,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Fetch a point from another store, which may be in use, or one that was pushed to a place; only what is missing
    here. The store is made if there is none."""
    from serai.checkpoints.moving.direct import fetch
    from serai.checkpoints.moving.handover import place_peer_at

    with reporting(as_json=as_json) as out:
        peer = place_peer_at(url) if take else None
        with open_to_change(store, create=True) as opened:
            moved = fetch(opened, name, url) if peer is None else peer.take(opened, name)
        out.result(asdict(moved) | {"url": url, "taken": take}, _came(moved))


def settle(
    name: Name,
    take_back: Annotated[
        bool,
        typer.Option(
            "--take-back", help="Own it here whatever the other side says: you know that nobody uses it there."
        ),
    ] = False,
    store: StoreFolder = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Say who owns a session, after asking the other side of a move that was broken off."""
    from serai.checkpoints.moving.handover import settle as find_out
    from serai.checkpoints.moving.ownership import override_move, ownership

    with reporting(as_json=as_json) as out, open_to_change(store) as opened:
        session_id = opened.node(opened.resolve(name)).session_id
        if take_back and not ownership(opened, session_id).may_be_used:
            ask("Is it certain that nobody uses the session where it was moved to?", yes=yes)
            owner = override_move(opened, session_id)
        else:
            owner = find_out(opened, session_id)
        where = (
            "it is owned here" if owner.may_be_used else f"it is {owner.status.value}, and its other side {owner.peer}"
        )
        out.result(
            {"session_id": session_id, "status": owner.status.value, "epoch": owner.epoch, "peer": owner.peer},
            f"{where} (epoch {owner.epoch})",
        )


def _came(moved: "Moved") -> str:
    nodes, states, parts = (
        counted(number, noun)
        for number, noun in ((moved.nodes, "node"), (moved.snapshots, "state"), (moved.parts, "part"))
    )
    return f"new: {nodes}, {states} and {parts} ({moved.parts_had:,} were here)\nresume it by its id: {moved.node_id}"


def _rename(unfinished: Path, path: Path) -> None:
    from serai.runtime.errors import BadParameter

    try:
        unfinished.replace(path)
    except OSError as error:
        raise BadParameter(f"{path} can't be written: {error.strerror}; name a file that can be") from None


class _Pipe:
    """One end of a transfer that is no part of the store, so that its errors aren't taken for the store's."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name

    @classmethod
    def file(cls, path: Path, mode: str) -> "_Pipe":
        from serai.runtime.errors import BadParameter

        try:
            return cls(path.open(mode), str(path))  # type: ignore[arg-type]  # the modes given are binary
        except OSError as error:
            raise BadParameter(f"{path} can't be opened: {error.strerror}; name another file") from None

    def __enter__(self) -> "_Pipe":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, count: int, /) -> bytes:
        """At most `count` bytes, none at the end."""
        from serai.runtime.errors import BadParameter

        try:
            return self._stream.read(count)
        except OSError as error:
            raise BadParameter(f"{self._name} can't be read: {error.strerror}") from None

    def write(self, data: bytes, /) -> None:
        """All of the bytes."""
        from serai.runtime.errors import BadParameter

        try:
            self._stream.write(data)
        except OSError as error:
            raise BadParameter(f"{self._name} can't be written: {error.strerror}") from None

    def finish(self) -> None:
        """Everything written is on the disk, where there is one."""
        from serai.runtime.errors import BadParameter

        try:
            self._stream.flush()
            if self._name != "stdout":
                os.fsync(self._stream.fileno())
        except OSError as error:
            raise BadParameter(f"{self._name} can't be written: {error.strerror}") from None
