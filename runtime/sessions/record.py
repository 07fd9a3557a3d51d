"""One session's part of the journal: its nodes so far, those still to be written, and what each node keeps."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind, NodeRecord
from serai.runtime.errors import NodeElsewhere
from serai.runtime.sessions.journal import Entry, Journal, Point, append_metadata_of
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State


class Record:
    """The path from the root to the session's last node; whatever is not durable yet is at its end."""

    def __init__(self, journal: Journal, session_id: str, *, namespace: str, label: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self.namespace = namespace
        self._label = label
        self._path: list[Entry] = []
        self._generated = array("i")
        self._facts: Mapping[str, Any] = {}
        self._stays: tuple[int, Mapping[str, Any]] = (0, {})  # where the state was last that fell behind, and its facts
        self._inexact = False

    def label_is(self, label: str) -> None:
        """What the nodes to come are called."""
        self._label = label

    @property
    def inexact(self) -> bool:
        """Whether all that follows is: it comes, or once came, from an inexact state."""
        return self._inexact

    @property
    def is_durable(self) -> bool:
        """Whether there is a store that it is written to."""
        return self._journal.is_durable

    def point(self) -> str:
        """The id of the session's last node; durable once `flush` has returned."""
        return self._path[-1].node.id

    def append_metadata(self) -> Mapping[str, Any]:
        """What the last append on the way here was given to keep."""
        return append_metadata_of(self.nodes())

    def settled(self, timeline: Timeline) -> bool:
        """Note what has changed since the last node without a token: how many forks were made. Whether any was."""
        self._close_generation()
        changed: bool = (self._path[-1].node.sampler or {}).get("forks") != timeline.forks
        if changed:
            self.started(timeline, NodeKind.PAUSE)
        return changed

    def nodes(self) -> tuple[NodeRecord, ...]:
        """The nodes from the root to the last one."""
        return tuple(entry.node for entry in self._path)

    def position_of(self, node_id: str) -> int:
        """Where on the way here a node lies. Raises `NodeElsewhere` if it doesn't."""
        for entry in self._path:
            if entry.node.id == node_id:
                return entry.node.position
        raise NodeElsewhere(node_id=node_id, session_id=self._session_id)

    def continues(self, path: Sequence[NodeRecord], *, inexact: bool) -> None:
        """The session goes on from the end of a path that is durable, from a state that is `inexact`, or not."""
        self._path = [Entry(node, durable=True) for node in path]
        self._inexact = inexact or any(node.inexact for node in path)

    def branched_from(self, other: "Record") -> None:
        """The session begins where another one stands now; what that one has not written yet is written by both."""
        self._path = list(other._path)
        self._generated = other._generated[:]
        self._facts = other._facts
        self._stays = other._stays
        self._inexact = other._inexact

    def take_back(self, timeline: Timeline) -> None:
        """The last append did not succeed: go on from where `timeline` ends, even if its node reached the store."""
        if self.is_written:
            self.cut(timeline, NodeKind.REWIND)
        else:
            self._path.pop()
            while self._path[-1].node.position > len(timeline):  # nodes on the way through it
                self._path.pop()

    def cut(self, timeline: Timeline, kind: NodeKind) -> None:
        """Go on from an earlier position, where `timeline` now ends: under the last node at or before it."""
        self._close_generation()
        while self._path and self._path[-1].node.position > len(timeline):
            self._path.pop()
        start = self._path[-1].node.position if self._path else 0
        self._add(kind, timeline.ids(start), timeline)

    def rewound(self, timeline: Timeline) -> "Record":
        """A record of its own that has gone back to where `timeline` ends; this one stays as it is."""
        self._close_generation()  # what either writes of it, the other needn't
        other = Record(self._journal, self._session_id, namespace=self.namespace, label=self._label)
        other.branched_from(self)
        other.cut(timeline, NodeKind.REWIND)
        return other

    def durable_node(self) -> NodeRecord | None:
        """The last node that has reached the store; None before the first has."""
        return next((entry.node for entry in reversed(self._path) if entry.durable), None)

    @property
    def is_written(self) -> bool:
        """Whether the last node has reached the store."""
        return self._path[-1].durable

    def started(self, timeline: Timeline, kind: NodeKind) -> None:
        """The session's first node of its own."""
        self._close_generation()
        self._add(kind, np.zeros(0, np.int32), timeline)

    def appended(
        self,
        ids: NDArray[np.int32],
        timeline: Timeline,
        metadata: Mapping[str, Any],
        *,
        on_the_way: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """An append, with a node at each of the positions `on_the_way`, whose prefix digests are given: states of those
        are worth storing. All of them become durable, or none."""
        self._close_generation()
        start, before = len(timeline) - len(ids), self.append_metadata()
        turn, done = timeline.turn.index, start
        for position, digest in on_the_way:
            facts = {**facts_of(timeline, None), "prefix": digest.hex()}
            self._add_node(NodeKind.APPEND, ids[done - start : position - start], position, turn, facts, before)
            done = position
        self._add(NodeKind.APPEND, ids[done - start :], timeline, metadata=metadata)

    def generation_begins(self, params: Mapping[str, Any], timeline: Timeline) -> None:
        """Parameters, seed and branch, to be durable before the first token is shown."""
        self._close_generation()
        self._add(NodeKind.GENERATE, np.zeros(0, np.int32), timeline, params=params)

    def generated(self, token: int, timeline: Timeline) -> None:
        self._generated.append(token)
        self._facts = facts_of(timeline, None)

    def state_stays(self, timeline: Timeline) -> None:
        """The tokens that follow are handed out before the state is past them."""
        self._stays = len(timeline), facts_of(timeline, None)

    def state_comes(self) -> None:
        """It is past all that was handed out."""
        self._stays = 0, {}

    def reaches(self, position: int) -> bool:
        """Whether a state at `position` can be stored: there is a node, or will be one, or `divide` makes one."""
        last = self._path[-1].node
        if position > last.position:
            return position in (self._stays[0], last.position + len(self._generated))
        return any(entry.node.position == position for entry in reversed(self._path))

    def divide(self) -> None:
        """Have a node where the state stays, if that is within what was generated since the last one."""
        last, (position, facts) = self._path[-1].node, self._stays
        count = position - last.position
        if 0 < count < len(self._generated):
            tokens = np.array(self._generated[:count], dtype=np.int32)
            del self._generated[:count]
            self._add_node(NodeKind.GENERATE, tokens, position, last.turn, facts)

    def marked(self, timeline: Timeline, metadata: Mapping[str, Any], node_id: str | None) -> None:
        """A node at the present position, which keeps `metadata`."""
        self._close_generation()
        self._add(NodeKind.PAUSE, np.zeros(0, np.int32), timeline, metadata=metadata, node_id=node_id)

    def beside(self, timeline: Timeline, appended: NDArray[np.int32], metadata: Mapping[str, Any]) -> "Record":
        """A record of its own that has gone on with an append, from where this one and `timeline` stand."""
        other = Record(self._journal, self._session_id, namespace=self.namespace, label=self._label)
        other.branched_from(self)
        other.appended(appended, timeline, metadata)
        return other

    def said(
        self, tokens: NDArray[np.int32], timeline: Timeline, metadata: Mapping[str, Any], node_id: str | None
    ) -> None:
        """A whole generation, which keeps `metadata`."""
        self._add(NodeKind.GENERATE, tokens, timeline, metadata=metadata, node_id=node_id)

    async def flush(self) -> None:
        """Make everything so far durable."""
        self._close_generation()
        await self._journal.write([entry for entry in self._path if not entry.durable])

    async def save(self, state: State, reason: str) -> Point:
        """Make everything so far durable, and the state, which is that of the last node at its position, with it.

        An inexact one gets a node of its own where that node is exact: others resume there, and must find what it has.
        """
        state.retain()  # whoever ends the session while this waits does not take it away
        try:
            self._close_generation()
            node = self._last_at(state.position)
            if state.inexact and not node.inexact:
                facts = {**(node.sampler or {}), "params": None}
                self._add_node(NodeKind.PAUSE, np.zeros(0, np.int32), node.position, node.turn, facts)
                node = self._last_at(state.position)
            await self.flush()
            return await self._journal.save(node, state, reason)
        finally:
            state.release()

    def _last_at(self, position: int) -> NodeRecord:
        for entry in reversed(self._path):
            if entry.node.position == position:
                return entry.node
        raise AssertionError(f"session {self._session_id} has no node at position {position}, where its state is")

    async def save_settled(self, state: State, timeline: Timeline, reason: str) -> Point:
        """As `save`, of the end of `timeline`, to which no fork was added that the last node doesn't know of.

        Whoever resumes there would otherwise give the next fork a branch that one has already.
        """
        self.settled(timeline)
        point = await self.save(state, reason)
        while self.settled(timeline):  # forked while that was written; the state is the same
            await self.flush()
            point = replace(point, id=self.point())
        return point

    def _close_generation(self) -> None:
        """Turn the tokens generated since the last node into a node, or two where the state is between them."""
        if not self._generated:
            return
        self.divide()
        last = self._path[-1].node
        tokens = np.array(self._generated, dtype=np.int32)
        del self._generated[:]
        self._add_node(NodeKind.GENERATE, tokens, last.position + len(tokens), last.turn, self._facts)

    def _add(
        self,
        kind: NodeKind,
        tokens: NDArray[np.int32],
        timeline: Timeline,
        *,
        params: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        node_id: str | None = None,
    ) -> None:
        facts = facts_of(timeline, params)
        self._add_node(kind, tokens, len(timeline), timeline.turn.index, facts, metadata, node_id)

    def _add_node(
        self,
        kind: NodeKind,
        tokens: NDArray[np.int32],
        position: int,
        turn: int,
        facts: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        node_id: str | None = None,
    ) -> None:
        node = NodeRecord(
            id=new_id() if node_id is None else node_id,
            session_id=self._session_id,
            kind=kind,
            position=position,
            tokens=tokens,
            parent_id=self._path[-1].node.id if self._path else None,
            sampler=facts,
            turn=turn,
            label=self._label,
            namespace=self.namespace,
            metadata=metadata or {},
            inexact=self._inexact,
        )
        self._path.append(Entry(node))
        self._stays = 0, {}  # a node is there by now, and after going back other ids may be


def facts_of(timeline: Timeline, params: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a node keeps of the timeline besides its token ids. `prefix` is the digest of all ids up to the node."""
    turn = timeline.turn
    return {
        "branch": timeline.branch,
        "forks": timeline.forks,
        "generated": turn.generating,
        "seed": turn.seed,
        "prefix": timeline.digest().hex(),
        "params": None if params is None else dict(params),
    }
