"""`serai sessions export, import, push, pull`: from one store to another, as one file or through a place far away.

These copy. They don't settle who may go on with a session; two copies that both go on are two sessions of one id.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import bytes_text, reporting
from serai.runtime.cli.stored import Name, StoreFolder, open_to_change, open_to_look

if TYPE_CHECKING:
    from serai.checkpoints.transfer import Moved

PIPE = "-"

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A folder, or what fsspec understands, such as s3://bucket/folder.")
]


def export(
    name: Name,
    file: Annotated[str, typer.Argument(metavar="FILE", help='Where to write; "-" is stdout.')],
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Write a point, all it continues from and its state to one file."""
    from serai.checkpoints.transfer import export as write_bundle
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
        told = f"{moved.nodes:,} nodes and {moved.parts:,} parts: {bytes_text(moved.bytes)} in {file}"
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
    from serai.checkpoints.receiving import import_bundle

    with reporting(as_json=as_json) as out, ExitStack() as stack:
        if file == PIPE:
            source = _Pipe(sys.stdin.buffer, "stdin")
        else:
            source = stack.enter_context(_Pipe.file(Path(file), "rb"))
        moved = import_bundle(stack.enter_context(open_to_change(store, create=True)), source)
        out.result(asdict(moved), _came(moved))


def push(name: Name, url: Url, store: StoreFolder = None, as_json: Json = False) -> None:
    """Send a point, all it continues from and its state to a place; only what is missing there."""
    from serai.checkpoints.remote import FsspecPlace
    from serai.checkpoints.remote import push as send

    with reporting(as_json=as_json) as out, open_to_look(store) as opened:
        moved = send(opened, FsspecPlace(url), opened.resolve(name))
        out.result(
            asdict(moved) | {"url": url},
            f"sent {moved.parts:,} parts ({moved.parts_had:,} were there): {bytes_text(moved.bytes)}",
            f"fetch it by its id: {moved.node_id}",
        )


def pull(
    node: Annotated[str, typer.Argument(metavar="ID", help="The id of a node, as push told it.")],
    url: Url,
    store: StoreFolder = None,
    as_json: Json = False,
) -> None:
    """Fetch a point that was pushed; only what is missing here. The store is made if there is none."""
    from serai.checkpoints.remote import FsspecPlace
    from serai.checkpoints.remote import pull as fetch

    with reporting(as_json=as_json) as out:
        place = FsspecPlace(url)
        with open_to_change(store, create=True) as opened:
            moved = fetch(opened, place, node)
        out.result(asdict(moved) | {"url": url}, _came(moved))


def _came(moved: "Moved") -> str:
    new = f"{moved.nodes:,} nodes, {moved.snapshots:,} states and {moved.parts:,} parts are new"
    return f"{new} ({moved.parts_had:,} parts were here)\nresume it by its id: {moved.node_id}"


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
