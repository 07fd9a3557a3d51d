"""What a monitor is told of one session beyond its figures: what it says, and the points it can be forked at.

Privacy: text leaves the process only as an answer to who may see the session (over HTTP: whoever has the key it belongs
to), only while somebody has that session open, and no log keeps it.
"""

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from serai.runtime.errors import SessionGone
from serai.runtime.monitor.transcript import Passage, transcript

if TYPE_CHECKING:
    from serai.checkpoints.nodes import NodeRecord
    from serai.checkpoints.store import Store
    from serai.runtime.runtime import Runtime
    from serai.runtime.sessions.session import Session

MOST_NODES = 100
"""The latest nodes; a session of a day has thousands."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node on the way to where the session stands: `tokens` were added by a `kind` of call in `turn`.

    `stored` and `in_memory` say whether a snapshot of it is in the store, and whether its state is kept in memory;
    forking where neither is reads the tokens since the nearest one before once more.
    """

    id: str
    kind: str
    position: int
    turn: int
    tokens: int
    stored: bool
    in_memory: bool


@dataclass(frozen=True, slots=True)
class SessionDetail:
    """`passages` end where the session stands; `nodes` come in order, `earlier_nodes` more before them."""

    session_id: str
    position: int
    passages: tuple[Passage, ...]
    nodes: tuple[NodeStatus, ...]
    earlier_nodes: int

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and numbers."""
        body = asdict(self)
        body["passages"] = [passage_json(one) for one in self.passages]
        return body


def passage_json(passage: Passage) -> dict[str, str | bool]:
    return {"voice": passage.voice.value, "text": passage.text, "is_cut": passage.is_cut}


async def look(runtime: "Runtime", session: "Session", *, store: "Store | None") -> SessionDetail:
    """One live session. Never waits for it: a call may be under way."""
    tokenizer = runtime.tokenizer
    ids = session.timeline.ids()
    passages = () if tokenizer is None else transcript(ids, tokenizer)
    nodes = session.record.nodes()
    shown, kept = nodes[-MOST_NODES:], session.kept_positions()
    starts = [0, *(node.position for node in nodes)][-len(shown) - 1 :]
    stored = frozenset[str]() if store is None else await anyio.to_thread.run_sync(_with_snapshot, store, shown)
    return SessionDetail(
        session_id=session.id,
        position=len(ids),
        passages=passages,
        nodes=tuple(
            NodeStatus(
                id=node.id,
                kind=node.kind.value,
                position=node.position,
                turn=node.turn,
                tokens=node.position - start,
                stored=node.id in stored,
                in_memory=node.position in kept,
            )
            for node, start in zip(shown, starts, strict=False)
        ),
        earlier_nodes=len(nodes) - len(shown),
    )


def _with_snapshot(store: "Store", nodes: "tuple[NodeRecord, ...]") -> frozenset[str]:
    """The ids of those that have a loadable snapshot; for a worker thread."""
    found = set()
    for node in nodes:
        with suppress(SessionGone):  # not written yet
            if store.has_snapshot(node.id):
                found.add(node.id)
    return frozenset(found)
