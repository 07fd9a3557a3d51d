"""The index: SQLite in WAL mode, saying which nodes, snapshots, parts and tags exist.

A row makes a file visible and its deletion makes it invisible; files are always complete before their row is committed,
and are unlinked only after their row is gone. What is still to be unlinked is itself a row (`erasures`), so that a kill
in between is made good when the store is next opened.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from typing import Any, Final

from serai.checkpoints.errors import StoreInvalid
from serai.checkpoints.files.disk import Disk
from serai.checkpoints.reports import Erased
from serai.checkpoints.rows import Counts, Erasure, FileKind, NodeRow, PartRow, SnapshotRow
from serai.checkpoints.schema import INDEX_VERSION, SCHEMA

_NODE_COLUMNS: Final = (
    "sequence, id, session, parent, kind, position, turn, label, namespace, created_s, inexact, chain, file_bytes"
)
_SNAPSHOT_COLUMNS: Final = (
    "node, manifest, position, raw_bytes, reason, lossy, created_s, used_s, file_bytes, set_aside"
)


class Index:
    """The open index. Every method is safe from any thread; several are made one step by holding `lock`."""

    def __init__(self, path: str, *, may_begin: bool, disk: Disk, read_only: bool = False) -> None:
        """Open the index at `path`, or begin it if that is allowed and nothing is there.

        `disk` is told of commits. A `read_only` index can be read beside the process that writes to it.
        """
        self._disk = disk
        self.lock = threading.RLock()
        self._path = path
        try:
            self._sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
            if read_only:
                self._sql.execute("PRAGMA query_only=ON")
            else:
                self._sql.execute("PRAGMA journal_mode=WAL")
                self._sql.execute("PRAGMA synchronous=FULL")
                self._sql.execute("PRAGMA secure_delete=ON")
            self._prepare(may_begin and not read_only)
        except sqlite3.DatabaseError as error:
            raise self._unreadable(str(error)) from error

    def _prepare(self, may_begin: bool) -> None:
        self._sql.execute("PRAGMA foreign_keys=ON")
        self._sql.execute("PRAGMA trusted_schema=OFF")
        version = self._sql.execute("PRAGMA user_version").fetchone()[0]
        if may_begin and version == 0:
            self._sql.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version={INDEX_VERSION}; COMMIT;")
        elif version != INDEX_VERSION:
            raise self._unreadable(f"it is of version {version}, not {INDEX_VERSION}")

    def _unreadable(self, problem: str) -> StoreInvalid:
        remedy = "rebuild it from the files with `serai sessions fsck --rebuild`"
        return StoreInvalid(path=self._path, problem=f"the index is unreadable ({problem})", remedy=remedy)

    @contextmanager
    def change(self) -> Iterator[None]:
        """One transaction: all of the block's changes, durable on leaving it, or none."""
        with self.lock:
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._disk.passing("before a commit")
                self._sql.execute("COMMIT")
            except BaseException:
                if self._sql.in_transaction:
                    self._sql.execute("ROLLBACK")
                raise
            self._disk.passing("after a commit")

    def note(self, write: Callable[[], None]) -> None:
        """A transaction of mere notes: a full or read-only disk must not keep anyone from reading, so it may fail."""
        with suppress(sqlite3.OperationalError), self.change():
            write()

    @property
    def changes(self) -> int:
        """How many rows have changed since it was opened, those of a transaction under way included."""
        with self.lock:
            return self._sql.total_changes

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.lock:
            return self._sql.execute(query, values).fetchall()

    def _one(self, query: str, values: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        rows = self._rows(query, values)
        return rows[0] if rows else None

    def close(self) -> None:
        with self.lock:
            self._sql.close()

    def flush(self) -> None:
        """Fold the write-ahead log into the main file, so that erased rows are in neither."""
        with self.lock:
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # nodes

    def next_sequence(self) -> int:
        row = self._one("SELECT COALESCE(MAX(sequence), 0) + 1 FROM nodes")
        assert row is not None
        return int(row[0])

    def add_node(self, row: NodeRow) -> None:
        values = _values(row, "inexact")
        self._rows(f"INSERT INTO nodes ({_NODE_COLUMNS}) VALUES ({_marks(values)})", values)
        self._rows("DELETE FROM erasures WHERE kind = ? AND name = ?", (FileKind.NODE.value, row.id))

    def node(self, node_id: str) -> NodeRow | None:
        return _node(self._one(f"SELECT {_NODE_COLUMNS} FROM nodes WHERE id = ?", (node_id,)))

    def nodes(self, session: str | None = None) -> list[NodeRow]:
        """All nodes, or a session's, oldest first."""
        where, values = ("", ()) if session is None else ("WHERE session = ?", (session,))
        rows = self._rows(f"SELECT {_NODE_COLUMNS} FROM nodes {where} ORDER BY sequence", values)
        return [node for node in map(_node, rows) if node is not None]

    def children(self, node_id: str) -> list[str]:
        return [row[0] for row in self._rows("SELECT id FROM nodes WHERE parent = ? ORDER BY sequence", (node_id,))]

    def head(self, session: str) -> str | None:
        row = self._one("SELECT id FROM nodes WHERE session = ? ORDER BY sequence DESC LIMIT 1", (session,))
        return None if row is None else str(row[0])

    def sessions(self) -> list[tuple[str, int]]:
        """Every session with its number of nodes, latest activity last."""
        return [
            (row[0], row[1])
            for row in self._rows("SELECT session, COUNT(*) FROM nodes GROUP BY session ORDER BY MAX(sequence)")
        ]

    def remove_node(self, node_id: str) -> Erased:
        """Remove a childless node's row with its snapshot and tags, and queue their files: what goes. Call inside
        `change`."""
        gone = self.remove_snapshot(node_id)
        for file, file_bytes in self._rows("SELECT file, file_bytes FROM tags WHERE node = ?", (node_id,)):
            self._erase(FileKind.TAG, file)
            gone += Erased(file_bytes=file_bytes)
        self._rows("DELETE FROM tags WHERE node = ?", (node_id,))
        ((file_bytes,),) = self._rows("SELECT file_bytes FROM nodes WHERE id = ?", (node_id,))
        self._rows("DELETE FROM nodes WHERE id = ?", (node_id,))
        self._erase(FileKind.NODE, node_id)
        return gone + Erased(nodes=1, file_bytes=file_bytes)

    # snapshots and parts

    def snapshot(self, node_id: str) -> SnapshotRow | None:
        row = self._one(f"SELECT {_SNAPSHOT_COLUMNS} FROM snapshots WHERE node = ?", (node_id,))
        return None if row is None else _snapshot(row)

    def snapshots(self) -> list[SnapshotRow]:
        rows = self._rows(f"SELECT {_SNAPSHOT_COLUMNS} FROM snapshots ORDER BY number")
        return [_snapshot(row) for row in rows]

    def part(self, name: str) -> PartRow | None:
        row = self._one("SELECT hash, raw_bytes, file_bytes, base, damaged FROM parts WHERE hash = ?", (name,))
        return None if row is None else _part(row)

    def part_is_of(self, name: str, namespace: str) -> bool:
        """Whether a snapshot of the namespace uses a part."""
        query = """SELECT 1 FROM parts p JOIN uses u ON u.part = p.number JOIN snapshots s ON s.number = u.snapshot
                   JOIN nodes n ON n.id = s.node WHERE p.hash = ? AND n.namespace = ? LIMIT 1"""
        return self._one(query, (name, namespace)) is not None

    def parts(self) -> list[PartRow]:
        rows = self._rows("SELECT hash, raw_bytes, file_bytes, base, damaged FROM parts ORDER BY hash")
        return [_part(row) for row in rows]

    def usable(self, node_id: str) -> bool:
        """Whether a node has a snapshot that is neither set aside nor known to rest on a damaged part."""
        query = """SELECT 1 FROM snapshots s WHERE s.node = ? AND s.set_aside IS NULL AND NOT EXISTS
                   (SELECT 1 FROM parts p JOIN uses u ON u.part = p.number WHERE p.damaged AND u.snapshot = s.number)"""
        return self._one(query, (node_id,)) is not None

    def unusable(self) -> set[str]:
        """The nodes whose snapshot is not `usable`."""
        query = """SELECT s.node FROM snapshots s WHERE s.set_aside IS NOT NULL OR EXISTS
                   (SELECT 1 FROM parts p JOIN uses u ON u.part = p.number WHERE p.damaged AND u.snapshot = s.number)"""
        return {row[0] for row in self._rows(query)}

    def set_aside(self, row: SnapshotRow, why: str, manifest: str, file_bytes: int) -> None:
        """Never load a snapshot again, but keep its parts; `manifest` is the one that says so. Call inside `change`."""
        self._rows(
            "UPDATE snapshots SET set_aside = ?, manifest = ?, file_bytes = ? WHERE node = ?",
            (why, manifest, file_bytes, row.node),
        )
        if manifest != row.manifest:
            self._erase(FileKind.MANIFEST, row.manifest)

    def mark_damaged(self, name: str) -> None:
        """Note that a part's file is not what its name says; the next snapshot with that content writes it anew."""
        self._rows("UPDATE parts SET damaged = 1 WHERE hash = ?", (name,))

    def add_snapshot(self, row: SnapshotRow, written: Iterable[PartRow], shared: Iterable[PartRow]) -> None:
        """Put a snapshot in place of the node's former one. Call inside `change`.

        `written` are the parts whose files are new and sound, `shared` the others it uses, bases of deltas included.
        """
        former = self._detach(row.node)
        values = _values(row, "lossy")
        self._rows(f"INSERT INTO snapshots ({_SNAPSHOT_COLUMNS}) VALUES ({_marks(values)})", values)
        self._rows("DELETE FROM erasures WHERE kind = ? AND name = ?", (FileKind.MANIFEST.value, row.manifest))
        for part in shared:  # erased meanwhile, perhaps, by whoever had them
            self._add_part(row.node, part, "ON CONFLICT (hash) DO NOTHING")
        for part in written:
            self._add_part(
                row.node,
                part,
                "ON CONFLICT (hash) DO UPDATE SET file_bytes = excluded.file_bytes, base = excluded.base, damaged = 0",
            )
        self._erase_unused(former)

    def _add_part(self, node_id: str, part: PartRow, on_conflict: str) -> None:
        self._rows(
            f"INSERT INTO parts (hash, raw_bytes, file_bytes, base, damaged) VALUES (?, ?, ?, ?, ?) {on_conflict}",
            (part.hash, part.raw_bytes, part.file_bytes, part.base, int(part.damaged)),
        )
        self._rows("DELETE FROM erasures WHERE kind = ? AND name = ?", (FileKind.PART.value, part.hash))
        self._rows(
            "INSERT OR IGNORE INTO uses (snapshot, part) "
            "SELECT s.number, p.number FROM snapshots s, parts p WHERE s.node = ? AND p.hash = ?",
            (node_id, part.hash),
        )

    def remove_snapshot(self, node_id: str) -> Erased:
        """Remove a node's snapshot, if any, and the parts only it used; queue their files: what goes. Call inside
        `change`."""
        row = self.snapshot(node_id)
        if row is None:
            return Erased()
        part_bytes = self._erase_unused(self._detach(node_id))
        return Erased(snapshots=1, file_bytes=row.file_bytes + part_bytes)

    def touch(self, node_id: str, now_s: float) -> None:
        """Note that a snapshot was used."""
        self._rows("UPDATE snapshots SET used_s = ? WHERE node = ?", (now_s, node_id))

    def _detach(self, node_id: str) -> list[int]:
        """Remove a snapshot's row, queue its manifest, and return the numbers of the parts it used."""
        row = self._one("SELECT number, manifest FROM snapshots WHERE node = ?", (node_id,))
        if row is None:
            return []
        used = [part for (part,) in self._rows("SELECT part FROM uses WHERE snapshot = ?", (row[0],))]
        self._rows("DELETE FROM snapshots WHERE number = ?", (row[0],))
        self._erase(FileKind.MANIFEST, row[1])
        return used

    def _erase_unused(self, parts: list[int]) -> int:
        """Remove those of these parts that no snapshot uses, and queue their files; the bytes of these."""
        gone_bytes = 0
        for number in parts:
            if self._one("SELECT 1 FROM uses WHERE part = ? LIMIT 1", (number,)) is None:
                ((name, file_bytes),) = self._rows("SELECT hash, file_bytes FROM parts WHERE number = ?", (number,))
                self._rows("DELETE FROM parts WHERE number = ?", (number,))
                self._erase(FileKind.PART, name)
                gone_bytes += file_bytes
        return gone_bytes

    # tags

    def set_tag(self, tag: str, node_id: str, file: str, file_bytes: int) -> None:
        """Point a tag at a node and queue the file that said otherwise. Call inside `change`."""
        self.remove_tag(tag)
        self._rows(
            "INSERT INTO tags (tag, node, file, file_bytes) VALUES (?, ?, ?, ?)",
            (tag, node_id, file, file_bytes),
        )
        self._rows("DELETE FROM erasures WHERE kind = ? AND name = ?", (FileKind.TAG.value, file))

    def remove_tag(self, tag: str) -> bool:
        """Remove a tag and queue its file; whether there was one. Call inside `change`."""
        row = self._one("SELECT file FROM tags WHERE tag = ?", (tag,))
        if row is None:
            return False
        self._rows("DELETE FROM tags WHERE tag = ?", (tag,))
        self._erase(FileKind.TAG, row[0])
        return True

    def tagged(self, tag: str) -> str | None:
        row = self._one("SELECT node FROM tags WHERE tag = ?", (tag,))
        return None if row is None else str(row[0])

    def tag_files(self) -> dict[str, str]:
        """Every tag with the name of its file."""
        return dict(self._rows("SELECT tag, file FROM tags"))

    def tags(self) -> dict[str, str]:
        """Every tag with its node's id."""
        return dict(self._rows("SELECT tag, node FROM tags ORDER BY tag"))

    # files still to be unlinked

    def erasures(self) -> list[Erasure]:
        return [Erasure(FileKind(kind), name) for kind, name in self._rows("SELECT kind, name FROM erasures")]

    def erased(self, done: Iterable[Erasure]) -> None:
        """Forget erasures whose files are gone. Call inside `change`."""
        for item in done:
            self._rows("DELETE FROM erasures WHERE kind = ? AND name = ?", (item.kind.value, item.name))

    def _erase(self, kind: FileKind, name: str) -> None:
        self._rows("INSERT OR IGNORE INTO erasures (kind, name) VALUES (?, ?)", (kind.value, name))

    def file_bytes(self) -> dict[FileKind, int]:
        """Bytes on disk of all files that rows stand for, by kind."""
        tables = {FileKind.NODE: "nodes", FileKind.MANIFEST: "snapshots", FileKind.PART: "parts", FileKind.TAG: "tags"}
        sums = {kind: self._one(f"SELECT COALESCE(SUM(file_bytes), 0) FROM {table}") for kind, table in tables.items()}
        return {kind: int(row[0]) for kind, row in sums.items() if row is not None}

    def uses(self) -> list[tuple[str, int]]:
        """The nodes of all snapshots, each with the number of every part that its snapshot uses."""
        rows = self._rows("SELECT s.node, u.part FROM snapshots s JOIN uses u ON u.snapshot = s.number")
        return [(node, part) for node, part in rows]

    def part_bytes(self) -> dict[int, int]:
        """The bytes of each part's file, by the part's number."""
        return dict(self._rows("SELECT number, file_bytes FROM parts"))

    def counts(self) -> Counts:
        row = self._one(
            "SELECT (SELECT COUNT(DISTINCT session) FROM nodes), (SELECT COUNT(*) FROM nodes), "
            "(SELECT COUNT(*) FROM snapshots), (SELECT COUNT(*) FROM parts), "
            "(SELECT COALESCE(SUM(raw_bytes), 0) FROM parts)"
        )
        assert row is not None
        return Counts(*row)


def _values(row: NodeRow | SnapshotRow, flag: str) -> tuple[Any, ...]:
    names = (field.name for field in fields(row))
    return tuple(int(getattr(row, name)) if name == flag else getattr(row, name) for name in names)


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" * len(values))


def _part(row: tuple[Any, ...]) -> PartRow:
    return PartRow(hash=row[0], raw_bytes=row[1], file_bytes=row[2], base=row[3], damaged=bool(row[4]))


def _snapshot(row: tuple[Any, ...]) -> SnapshotRow:
    values = dict(zip(_SNAPSHOT_COLUMNS.split(", "), row, strict=True))
    return SnapshotRow(**{**values, "lossy": bool(values["lossy"])})


def _node(row: tuple[Any, ...] | None) -> NodeRow | None:
    if row is None:
        return None
    values = dict(zip(_NODE_COLUMNS.split(", "), row, strict=True))
    return NodeRow(**{**values, "inexact": bool(values["inexact"])})
