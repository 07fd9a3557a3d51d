"""Places: what a server must know of a node to go on from it, and how that is kept with the node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.nodes import MAX_METADATA_BYTES, NodeRecord
from serai.runtime.chat import Cursor
from serai.runtime.server.ask import Setting
from serai.runtime.server.catalogue import Known
from serai.runtime.server.jsonsize import json_bytes

KEPT_KEY = "serai:server"
"""Under this key a place's node keeps what the server knows of it."""

Tokens = NDArray[np.int32]
NOTHING: Tokens = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Place:
    """A point to go on from. `position` counts all its tokens; `document` is the response as its client saw it, and
    `input` the items it answered (None when they were too large to be kept). `fork` is its number among the forks of
    `previous`; 0 for what is none, and for one of before these were kept."""

    id: str
    namespace: str
    position: int
    cursor: Cursor
    setting: Setting
    chain: str
    previous: str | None
    document: Mapping[str, Any] | None = None
    input: tuple[Mapping[str, Any], ...] | None = ()
    fork: int = 0

    def metadata(self) -> dict[str, Any]:
        kept: dict[str, Any] = {
            "cursor": self.cursor.to_json(),
            "setting": self.setting.to_json(),
            "chain": self.chain,
            "previous": self.previous,
            "document": self.document,
            "input": None if self.input is None else list(self.input),
            "fork": self.fork,
        }
        if json_bytes(kept) > MAX_METADATA_BYTES // 2:
            kept["input"] = None
        return {KEPT_KEY: kept}

    @classmethod
    def of(cls, node: NodeRecord) -> "Place | None":
        """The place a node is, if it is one."""
        kept = node.metadata.get(KEPT_KEY)
        if kept is None:
            return None
        return cls(
            id=node.id,
            namespace=node.namespace,
            position=node.position,
            cursor=Cursor.from_json(kept["cursor"]),
            setting=Setting.from_json(kept["setting"]),
            chain=kept["chain"],
            previous=kept["previous"],
            document=kept["document"],
            input=None if kept["input"] is None else tuple(kept["input"]),
            fork=kept.get("fork", 0),
        )

    def known(self) -> Known:
        return Known(self.id, self.namespace, self.chain, self.previous, self.document is not None, self.fork)


@dataclass(frozen=True, slots=True)
class Ending:
    """The tokens of a reply as history has them, where that differs from what was read: `prompt` begins the reply
    without the request's notes, `reply` are the reply's own."""

    prompt: Tokens
    reply: Tokens
