"""Nodes and tags: what is said of a session tree, and the walk along it."""

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.errors import SessionGone, SnapshotCorrupt
from serai.checkpoints.files import jsonio
from serai.checkpoints.format import DocumentKind, frame_document, read_document
from serai.checkpoints.names import check_tag, check_text, is_id
from serai.checkpoints.nodes import NodeRecord, StoredNode, chain_of, decode, encode, row_of
from serai.checkpoints.reports import SessionInfo
from serai.checkpoints.rows import NodeRow
from serai.checkpoints.store_folder import StoreFolder


class Tree(StoreFolder):
    """The store's nodes and tags."""

    def record(self, *nodes: NodeRecord) -> None:
        """Keep nodes, parents before children; their token ids are durable when this returns: those of all or of none.

        A parent must be stored or among them (`SessionGone`), `position` must be the parent's plus the tokens added,
        and what continues from an inexact node must be inexact (ValueError).
        """
        with self._doing("recording a node"), self._index.lock, ExitStack() as taking_back:
            first = self._index.next_sequence()
            rows: dict[str, NodeRow] = {}
            for sequence, node in enumerate(nodes, start=first):
                parent = None if node.parent_id is None else rows.get(node.parent_id) or self._row(node.parent_id)
                start = 0 if parent is None else parent.position
                if node.position != start + len(node.tokens):
                    raise ValueError(
                        f"{len(node.tokens)} tokens after position {start} do not end at position {node.position}"
                    )
                if parent is not None and parent.inexact and not node.inexact:
                    raise ValueError(f"node {node.id} continues from node {parent.id}, which is inexact, and so is it")
                if node.id in rows or self._index.node(node.id) is not None:
                    raise ValueError(f"node {node.id} is stored already, and nodes never change")
                chain = chain_of("" if parent is None else parent.chain, node.tokens)
                document = frame_document(DocumentKind.NODE, encode(node, sequence=sequence, chain=chain))
                self._write_file(document.data, self._folders.nodes, node.id)
                taking_back.enter_context(self._taking_back(self._folders.nodes, node.id))
                rows[node.id] = row_of(node, sequence=sequence, chain=chain, file_bytes=len(document.data))
            with self._index.change():
                for row in rows.values():
                    self._index.add_node(row)

    def node(self, node_id: str) -> NodeRecord:
        """The node with this id; `SessionGone` if there is none."""
        return self._stored_node(node_id).node

    def _stored_node(self, node_id: str) -> StoredNode:
        what = f"node {node_id}"
        with self._doing("reading a node"), self._index.lock:
            row = self._row(node_id)
            try:
                with self._folders.nodes.reading(row.id, what) as reader:
                    stored = decode(read_document(reader, DocumentKind.NODE).data, what)
            except FileNotFoundError as error:
                raise SnapshotCorrupt(what=what, problem="its file is missing") from error
        if stored.node.id != row.id or stored.chain != row.chain:
            raise SnapshotCorrupt(what=what, problem=f"its file holds node {stored.node.id} of another history")
        return stored

    def children(self, node_id: str) -> list[str]:
        """Ids of the nodes that continue from this one, oldest first."""
        with self._doing("reading the index"), self._index.lock:
            return self._index.children(self._row(node_id).id)

    def parent(self, node_id: str) -> str | None:
        """The id of the node that this one continues from; None for a root."""
        with self._doing("reading the index"):
            return self._row(node_id).parent

    def ancestry(self, node_id: str) -> list[str]:
        """Ids from the root to this node."""
        with self._doing("reading the index"), self._index.lock:
            ids = []
            row: NodeRow | None = self._row(node_id)
            while row is not None:
                ids.append(row.id)
                row = None if row.parent is None else self._row(row.parent)
            return ids[::-1]

    def path(self, node_id: str) -> list[NodeRecord]:
        """The nodes from the root to this one; their token ids are verified against the chain."""
        chain, records = "", []
        for step in self.ancestry(node_id):
            stored = self._stored_node(step)
            chain = chain_of(chain, stored.node.tokens)
            if chain != stored.chain:
                raise SnapshotCorrupt(what=f"node {step}", problem="its token ids do not continue its parent's")
            records.append(stored.node)
        return records

    def tokens(self, node_id: str) -> NDArray[np.int32]:
        """Every token id up to and including this node: int32 `[position]`."""
        return np.concatenate([node.tokens for node in self.path(node_id)]).astype(np.int32, copy=False)

    def session_head(self, session_id: str) -> str:
        """The node a session recorded last; `SessionGone` for an unknown session."""
        with self._doing("reading the index"):
            head = self._index.head(session_id)
        if head is None:
            raise SessionGone(name=session_id)
        return head

    def sessions(self) -> list[SessionInfo]:
        """Every stored session, latest activity last."""
        with self._doing("reading the index"), self._index.lock:
            return [self._session(session, count) for session, count in self._index.sessions()]

    def _session(self, session: str, count: int) -> SessionInfo:
        rows = self._index.nodes(session)
        head = rows[-1]
        return SessionInfo(
            session_id=session,
            head_id=head.id,
            nodes=count,
            position=head.position,
            turn=head.turn,
            label=head.label,
            namespace=head.namespace,
            created_s=rows[0].created_s,
            updated_s=head.created_s,
            has_snapshot=self._index.usable(head.id),
            inexact=head.inexact,
        )

    def resolve(self, text: str) -> str:
        """The node id that a node id, session id (its head) or tag stands for; `SessionGone` if it is none of them."""
        with self._doing("reading the index"), self._index.lock:
            if is_id(text):
                row = self._index.node(text)
                found = row.id if row is not None else self._index.head(text)
            else:
                found = self._index.tagged(text)
        if found is None:
            raise SessionGone(name=text)
        return found

    def tag(self, tag: str, node_id: str, note: str = "") -> None:
        """Give a node a name, taking it from the node that had it, and a note of what it is there for.

        `NameInvalid` for a text that cannot be a tag, or a note that is no printable line of 256 characters at most.
        """
        check_tag(tag)
        check_text(note, "note", may_be_empty=True)
        with self._doing("tagging a node"), self._index.lock:
            row = self._row(node_id)
            if self._index.tagged(tag) == row.id and self.note(tag) == note:
                return
            value = {"tag": tag, "node": row.id, "set_s": self._now(), "note": note}
            document = frame_document(DocumentKind.TAG, jsonio.encode(value))
            self._write_file(document.data, self._folders.tags, document.hash)
            with self._taking_back(self._folders.tags, document.hash), self._index.change():
                self._index.set_tag(tag, row.id, document.hash, len(document.data))
            self._sweep()

    def note(self, tag: str) -> str:
        """What a tag is there for, as it was given. `SessionGone` if there is no such tag."""
        what = f"the tag {tag!r}"
        with self._doing("reading a tag"), self._index.lock:
            file = self._index.tag_files().get(tag)
            if file is None:
                raise SessionGone(name=tag)
            try:
                with self._folders.tags.reading(file, what) as reader:
                    value = jsonio.decode(read_document(reader, DocumentKind.TAG).data, what)
            except FileNotFoundError as error:
                raise SnapshotCorrupt(what=what, problem="its file is missing") from error
        return jsonio.field(value, "note", str, what) if "note" in value else ""  # older ones have none

    def untag(self, tag: str) -> None:
        """Remove a tag; the node stays. `SessionGone` if there is no such tag."""
        with self._doing("removing a tag"), self._index.lock:
            with self._index.change():
                found = self._index.remove_tag(tag)
            if not found:
                raise SessionGone(name=tag)
            self._sweep()

    def tags(self) -> dict[str, str]:
        """Every tag with the id of its node."""
        with self._doing("reading the index"):
            return self._index.tags()
