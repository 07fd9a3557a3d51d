"""Changing the files of a store at random, and looking at what reading them does.

Every byte of every file may be wrong: bits flipped, bytes set, pieces cut, repeated or taken from another file, and
manifests rewritten with odd values under a hash that fits. Reading must give the very content that was written, or one
of this project's errors; anything else (another content, a foreign error, memory out of proportion) is an escape.

As a module it prints one JSON object: `python -m serai.checkpoints.harness.fuzzing [--files N] [--seed S]`.
"""

import argparse
import io
import json
import random
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serai.checkpoints.errors import SeraiError
from serai.checkpoints.files import jsonio
from serai.checkpoints.files.codec import Packing
from serai.checkpoints.format import (
    DOCUMENT_HEADER_BYTES,
    PART_HEADER_BYTES,
    DocumentKind,
    PartHeader,
    frame_document,
    unpack_part_header,
)
from serai.checkpoints.harness.samples import FINGERPRINT, same_bits, sample_node, sample_state
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import export
from serai.checkpoints.nodes import NodeRecord
from serai.checkpoints.snapshot import Snapshot
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import fsck

# Twice what the store's own buffers and a part's content can take, and far below what a lying size could ask for.
_MOST_GROWTH_KIB: Final = 64 << 10

_NUMBERS: Final = (0, 1, -1, 2**31, 2**53, 2**63, 2**64, 1e308, True, False)
_TEXTS: Final = ("", "..", "/etc/passwd", "a" * 26, "ab" * 32, "\0", "é" * 64, "os.system")
_ODDS: Final[tuple[Any, ...]] = (*_NUMBERS, *_TEXTS, None, [], {}, [[]], ["ab" * 32], {"state": "same"})


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """`fuzzed` files, `refused` of them with an error of ours, `escapes` that did anything else than be right."""

    fuzzed: int
    refused: int
    escapes: tuple[str, ...]


def changed(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """`data` with one to three random changes; `other` is a file to take pieces from."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3))):
        place = dice.randrange(len(out)) if out else 0
        if dice.random() < 0.5:
            place = min(place, dice.randrange(256))  # headers are where it hurts
        length = dice.choice((1, 2, 4, 8, 64, 1000))
        match dice.randrange(7):
            case 0 if out:
                out[place] ^= 1 << dice.randrange(8)
            case 1:
                out[place : place + length] = dice.randbytes(length)
            case 2:
                out[place : place + length] = dice.choice((b"\0", b"\xff")) * length
            case 3:
                del out[place : place + length]
            case 4:
                out[place:place] = out[place : place + length] or b"x"
            case 5:
                start = dice.randrange(max(1, len(other)))
                out[place : place + length] = other[start : start + length]
            case _:
                del out[place:]
    return bytes(out)


def rewritten(value: Any, dice: random.Random) -> Any:
    """A JSON value with one random spot replaced by something odd, or removed."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value))
        copy = dict(value)
        if dice.random() < 0.15:
            del copy[key]
        else:
            copy[key] = rewritten(value[key], dice)
        return copy
    if isinstance(value, list) and value and dice.random() < 0.8:
        place = dice.randrange(len(value))
        if dice.random() < 0.2:
            return value[:place] + value[place + 1 :]
        return [*value[:place], rewritten(value[place], dice), *value[place + 1 :]]
    if isinstance(value, int) and dice.random() < 0.5:
        return value + dice.choice((-1, 1, 7, 1 << 20))
    return dice.choice(_ODDS)


class _Target:
    """A store with two snapshots, one of them packed as a delta, and the ways to read all of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "store"
        self.store = Store.open(str(self.folder), threads=2)
        self.states: dict[str, Snapshot] = {}
        root = self._saved(sample_node(5), sample_state(5, 1, smooth=True), Packing.NONE)
        self.last = self._saved(sample_node(6, root), sample_state(11, 1, smooth=True), Packing.SMALL)
        self.store.tag("here", self.last.id)
        sink = io.BytesIO()
        export(self.store, self.last.id, sink)
        self.bundle = sink.getvalue()
        self.receiver = Store.open(str(folder / "receiver"), threads=2)
        kinds = ("nodes", "manifests", "parts", "tags")
        self.files = sorted(file for kind in kinds for file in (self.folder / kind).rglob("*") if file.is_file())

    def _saved(self, node: NodeRecord, state: Snapshot, packing: Packing) -> NodeRecord:
        self.store.record(node)
        self.store.save(node.id, state, FINGERPRINT, reason="turn", packing=packing)
        self.states[node.id] = state
        return node

    def read_all(self) -> str | None:
        """Read nodes, snapshots and tags; what is wrong beyond an error of ours, or None."""
        wrong = None
        for node_id, state in self.states.items():
            if not same_bits(self.store.load(node_id, FINGERPRINT), state):
                wrong = "a snapshot loads with other bits"
        if self.store.tokens(self.last.id).tolist() != list(range(11)):
            wrong = "a node has other token ids"
        return wrong

    def check(self) -> str | None:
        """The same by way of `fsck`, which reads tags too and must not raise."""
        fsck(self.store, remove_orphans=False)
        return None

    def import_(self, data: bytes) -> str | None:
        """Import a bundle; what is wrong beyond an error of ours, or None."""
        try:
            import_bundle(self.receiver, io.BytesIO(data))
            if not same_bits(self.receiver.load(self.last.id), self.states[self.last.id]):
                return "an imported snapshot has other bits"
        finally:
            for session in self.receiver.sessions():
                self.receiver.delete_session(session.session_id)
        return None

    def point_index_at(self, node_id: str, manifest_hash: str) -> None:
        """Have the index believe a rewritten manifest."""
        with self.store._index.change():
            self.store._index._rows("UPDATE snapshots SET manifest = ? WHERE node = ?", (manifest_hash, node_id))

    def close(self) -> None:
        self.store.close()
        self.receiver.close()


def run(folder: Path, *, files: int, seed: int = 0) -> FuzzReport:
    """Fuzz `files` files in `folder`; the same seed gives the same changes."""
    dice = random.Random(seed)
    target = _Target(folder)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused, escapes = 0, []
    for number in range(files):
        kind = dice.randrange(8)
        if kind == 0:
            name, read = _fuzz_bundle(target, dice)
        elif kind == 1:
            name, read = _fuzz_manifest(target, dice)
        elif kind == 2:
            name, read = _fuzz_part_header(target, dice)
        elif kind == 3:
            name, read = _fuzz_node(target, dice)
        else:
            name, read = _fuzz_file(target, dice)
        try:
            wrong = read()
        except SeraiError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what this is looking for
            escapes.append(f"{number} ({name}): {type(error).__name__}: {error}")
        else:
            if wrong is not None:
                escapes.append(f"{number} ({name}): {wrong}")
        growth_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
        if growth_kib > _MOST_GROWTH_KIB:
            escapes.append(f"{number} ({name}): memory grew by {growth_kib} KiB")
            before_kib += growth_kib
    target.close()
    return FuzzReport(files, refused, tuple(escapes))


def _fuzz_file(target: _Target, dice: random.Random) -> tuple[str, Callable[[], str | None]]:
    file = dice.choice(target.files)
    data = file.read_bytes()
    other = dice.choice(target.files).read_bytes()
    by_fsck = dice.random() < 0.1 or file.parent.name == "tags"

    def read() -> str | None:
        file.write_bytes(changed(data, other, dice))
        try:
            return target.check() if by_fsck else target.read_all()
        finally:
            file.write_bytes(data)

    return str(file.relative_to(target.folder)), read


def _fuzz_manifest(target: _Target, dice: random.Random) -> tuple[str, Callable[[], str | None]]:
    node_id = dice.choice(sorted(target.states))
    with target.store.reading_index() as index:
        row = index.snapshot(node_id)
    assert row is not None
    folder = target.folder / "manifests"
    value = jsonio.decode((folder / row.manifest).read_bytes()[DOCUMENT_HEADER_BYTES:], "a manifest")

    def read() -> str | None:
        try:
            body = jsonio.encode(rewritten(value, dice))
        except ValueError:
            body = json.dumps(rewritten(value, dice)).encode()
        document = frame_document(DocumentKind.MANIFEST, body)
        (folder / document.hash).write_bytes(document.data)
        target.point_index_at(node_id, document.hash)
        try:
            return target.read_all()
        finally:
            target.point_index_at(node_id, row.manifest)
            if document.hash != row.manifest:
                (folder / document.hash).unlink()

    return f"manifest of {node_id}", read


def _fuzz_part_header(target: _Target, dice: random.Random) -> tuple[str, Callable[[], str | None]]:
    """A part whose header is odd and whose check sum fits."""
    file = dice.choice([file for file in target.files if file.is_relative_to(target.folder / "parts")])
    data = file.read_bytes()
    head = unpack_part_header(data[:PART_HEADER_BYTES], len(data), "a part")
    names = [other.parent.name + other.name for other in target.files if len(other.parent.name) == 2]
    sizes = (0, 1, head.raw_bytes, head.stored_bytes, head.raw_bytes + 1, 1 << 20, 1 << 28, 1 << 60)
    odd = PartHeader(
        codec=dice.choice((head.codec, 0, 1, 2, 3, 4, 5, 2**32 - 1)),
        raw_bytes=dice.choice((head.raw_bytes, dice.choice(sizes))),
        stored_bytes=dice.choice((head.stored_bytes, dice.choice(sizes))),
        hash=dice.choice((head.hash, dice.choice(names))),
        base=dice.choice((head.base, head.hash, dice.choice(names), None)),
    )

    def read() -> str | None:
        file.write_bytes(odd.pack() + data[PART_HEADER_BYTES:])
        try:
            return target.read_all()
        finally:
            file.write_bytes(data)

    return f"header of part {file.name}", read


def _fuzz_node(target: _Target, dice: random.Random) -> tuple[str, Callable[[], str | None]]:
    """A node rewritten with odd values under a hash that fits, read from its store and out of a bundle."""
    file = target.folder / "nodes" / target.last.id
    data = file.read_bytes()
    value = jsonio.decode(data[DOCUMENT_HEADER_BYTES:], "a node")
    body = json.dumps(rewritten(value, dice)).replace("Infinity", "1e999").replace("NaN", "null").encode()
    document = frame_document(DocumentKind.NODE, body)

    def read() -> str | None:
        file.write_bytes(document.data)
        try:
            sink = io.BytesIO()
            export(target.store, target.last.id, sink)
            wrong = target.import_(sink.getvalue())
            return wrong or target.read_all()
        finally:
            file.write_bytes(data)

    return "node", read


def _fuzz_bundle(target: _Target, dice: random.Random) -> tuple[str, Callable[[], str | None]]:
    data = changed(target.bundle, target.bundle, dice)
    return "bundle", lambda: target.import_(data)


def main(arguments: list[str]) -> int:
    """The command line; 0 if nothing escaped."""
    parser = argparse.ArgumentParser(prog="python -m serai.checkpoints.harness.fuzzing", description=__doc__)
    parser.add_argument("--files", type=int, default=20_000, help="how many files to fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="where to work; a temporary folder unless given")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="serai-fuzz-", dir=options.dir) as folder:
        report = run(Path(folder), files=options.files, seed=options.seed)
    found = {"files_fuzzed": report.fuzzed, "refused": report.refused, "fuzz_escapes": len(report.escapes)}
    print(json.dumps({**found, "escapes": report.escapes}))
    return int(bool(report.escapes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
