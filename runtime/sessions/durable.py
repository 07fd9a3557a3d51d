"""A session and what is written down of it: its timeline, marks on the way, and its whole state when it pauses."""

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.names import check_text
from serai.runtime.services import Services
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.journal import Point
from serai.runtime.sessions.live import Life, LiveSession
from serai.runtime.sessions.migration import migrate
from serai.runtime.sessions.turns import Timeline


class DurableSession(LiveSession):
    """Adds the timeline, and its record in the store."""

    def __init__(
        self,
        services: Services,
        *,
        session_id: str,
        timeline: Timeline,
        holding: Holding,
        namespace: str,
        label: str,
        workflow: str | None,
        append_metadata: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(
            services, session_id=session_id, holding=holding, namespace=namespace, label=label, workflow=workflow
        )
        self.append_metadata: Mapping[str, Any] = append_metadata or {}
        self._timeline = timeline

    @property
    def turn(self) -> int:
        """The present turn's index, from 0."""
        return self._timeline.turn.index

    @property
    def timeline(self) -> Timeline:
        return self._timeline

    def tokens(self) -> NDArray[np.int32]:
        """All token ids read so far, int32 `[position]`."""
        return self._timeline.ids()

    def text(self) -> str:
        """The timeline as text; control tokens are left out."""
        return self._services.need_tokenizer().decode(self._timeline.ids().tolist())

    def rename(self, label: str) -> None:
        """Call the session something else from now on. Raises `NameInvalid` for what can't be a label."""
        check_text(label, "label", may_be_empty=True)
        self.label = label
        self.record.label_is(label)

    @property
    def head(self) -> str:
        """The id of the session's last node; `flush` makes it durable, with all that was read and generated."""
        return self.record.point()

    async def flush(self) -> None:
        """Make every token so far durable (with a store)."""
        await self.record.flush()

    async def mark(self, metadata: Mapping[str, Any], *, node_id: str | None = None) -> str:
        """Write a node at the present position that keeps `metadata`, and go on from it; gives its id.

        The node is durable when this returns (with a store). `node_id` is for a name that was given out before.
        """
        with self.use("mark"):
            self.record.marked(self._timeline, metadata, node_id)
            try:
                await self.record.flush()
            except BaseException:
                self.record.take_back(self._timeline)
                raise
            return self.head

    async def write_beside(
        self,
        appended: NDArray[np.int32],
        generated: NDArray[np.int32],
        *,
        append_metadata: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        node_id: str | None = None,
    ) -> str:
        """Write down how the timeline could go on, by an append and a generation (int32 ids), and stay where it is.

        Nothing is read: whoever resumes the node, whose id is given back, reads its tokens then. Durable when this
        returns (with a store).
        """
        with self.use("write"):
            there = self._timeline.twin()
            there.appended(appended)
            record = self.record.beside(there, appended, append_metadata or {})
            there.generates(there.turn.seed)
            for token in generated.tolist():
                there.generated(token)
            record.said(generated, there, metadata or {}, node_id)
            await record.flush()
            return record.point()

    async def children(self) -> tuple[str, ...]:
        """The ids of the nodes that continue from this session's last node, in this session or another."""
        self._check_open()
        await self.record.flush()
        return await self._services.journal.children(self.record.point())

    async def pause(self) -> Point:
        """Make the whole state durable, free its memory and give back the point to resume from.

        When the state can't be stored the session stays open, as it was.
        """
        with self.use("pause"):
            point = await self.record.save_settled(await self.hot(), self._timeline, "pause")
        self._end(Life.PAUSED)
        return point

    async def migrate(self, to: str | PathLike[str]) -> Point:
        """Move the session to another store; when this returns it is owned there, and here no longer.

        `to` is the folder of a store on this machine that nobody has open, where a runtime over that store resumes the
        session; or the URL of a place (`file:///folder`, `s3://bucket/folder`), from which `Runtime.take` takes it.
        Only what is missing there is sent. A stream that a reader has open is held between two tokens, the one that is
        being computed handed out first, and ends with `FinishReason.MOVED`; whoever resumes the session goes on with
        the token that would have been next. Beside any other call it raises `SessionBusy`. If it fails the session
        stays open, as it was, and a stream goes on, unless the other side can't be asked whether it has come
        (`NotOwner`): then it ends, in doubt, and `Runtime.resume` asks. A cancelled call comes back at the latest after
        the object that a place is being given, or that is read because a call before had left it, as if it had failed;
        once all was sent, with the session moved.
        """
        async with self.use_between_tokens("migrate"):
            return await migrate(self, self._services.journal, fspath(to))
