"""One model with its budget, its store and its sessions. `opening.open_runtime` makes it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from os import PathLike, fspath
from typing import Any

import anyio
import anyio.to_thread

from serai.checkpoints.moving.transfer import Moved
from serai.checkpoints.names import check_text, new_id
from serai.checkpoints.nodes import NodeKind
from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.gc import GcPolicy, GcReport
from serai.runtime.chat import ChatFormat, Message, chat_format_for
from serai.runtime.driver import Counters
from serai.runtime.errors import EndsUnwritten, SeraiError, ShuttingDown
from serai.runtime.figures import ModelFacts, figures
from serai.runtime.memory.accounts import Quota
from serai.runtime.services import Services
from serai.runtime.sessions.conversation import Chat
from serai.runtime.sessions.events import Watcher
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.journal import Point, Stored
from serai.runtime.sessions.migration import pull, push, take
from serai.runtime.sessions.session import Session
from serai.runtime.sessions.starts import Accept
from serai.runtime.sessions.turns import Timeline
from serai.runtime.state import State, StatePool
from serai.runtime.status import Status
from serai.runtime.step import StepEngine
from serai.runtime.text.tokenizer import Tokenizer


class Runtime:
    """An open model. Made by `open_runtime`; everything it gives out ends with it."""

    def __init__(self, services: Services, facts: ModelFacts) -> None:
        self.facts = facts
        self._services = services
        self._closing = False
        self._resuming: dict[object, str] = {}  # what each call is after: a node's id, a session's or a tag
        self._collecting: anyio.Event | None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when its folder has none, and then only token ids can be read."""
        return self._services.tokenizer

    @property
    def pool(self) -> StatePool:
        """Where the sessions' states come from: what a state of so many tokens takes, and how much is held."""
        return self._services.pool

    @property
    def store(self) -> Store | None:
        """Where sessions are kept; None when nothing is durable."""
        return self._services.journal.store

    @property
    def max_positions(self) -> int:
        """The model's context, in tokens."""
        return self._services.max_positions

    @property
    def engine_error(self) -> SeraiError | None:
        """Why the engine takes no more work, if so: `EngineFailed` or `ShuttingDown`."""
        return self._services.driver.refusal

    @property
    def is_stepping(self) -> bool:
        """Whether the engine is at a step now."""
        return self._services.driver.is_stepping

    @property
    def waiting_calls(self) -> int:
        """Calls that the engine has to finish."""
        return self._services.driver.waiting

    @property
    def counters(self) -> Counters:
        """What the engine has done so far; the object stays current."""
        return self._services.driver.counters

    async def session(self, *, namespace: str = "", label: str = "", priority: int = 0) -> Session:
        """A new, empty session. Raises `NameInvalid` for what can't be a namespace or label, `OverQuota` when the
        namespace may have no more.

        `priority` from -4 to 4 shares out the engine while several want it: each is worth twice the rows of the one
        below, and none waits for ever.
        """
        self._check_open()
        check_text(namespace, "namespace", may_be_empty=True)
        check_text(label, "label", may_be_empty=True)
        self._services.pool.accounts.of(namespace).check_sessions()
        session = Session(
            self._services,
            session_id=new_id(),
            timeline=Timeline(),
            holding=Holding(self._services.keeper, self._services.pool.empty(namespace), 0),
            namespace=namespace,
            label=label,
            priority=priority,
        )
        session.record.started(session.timeline, NodeKind.ROOT)
        try:
            await session.record.flush()
        except BaseException:
            session.abandon()  # nobody was given it
            raise
        return session

    def chat_format(self) -> ChatFormat:
        """The prompt format of the model's family, spelled by its tokenizer.

        Raises `BadParameter` for a model without a tokenizer, `ChatFormatMismatch` for one that doesn't spell it.
        """
        tokenizer, config = self._services.need_tokenizer(), self.facts.config
        return chat_format_for("" if config is None else config.family.value, tokenizer)

    async def chat(
        self,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        thinking_effort: str | None = None,
        namespace: str = "",
        label: str = "",
    ) -> Chat:
        """A new conversation in the model's own prompt format.

        `tools` are function declarations in OpenAI's shape. `thinking` and `thinking_effort` default to what the
        model's family does. Raises `PromptInvalid` for what the format can't say, `ChatFormatMismatch` for a
        model whose tokenizer doesn't spell it.
        """
        chat_format = self.chat_format()
        options = chat_format.markup.options(tools=tools, thinking=thinking, thinking_effort=thinking_effort)
        session = await self.session(namespace=namespace, label=label)
        opening = [] if system is None else [Message.system(system)]
        try:
            return Chat.begin(session, chat_format, options, opening)
        except BaseException:
            session.abandon()
            raise

    async def resume_chat(self, point: Point | str, *, as_is: bool = False) -> Chat:
        """As `resume`, for a session that a chat has filled."""
        chat_format = self.chat_format()
        session = await self.resume(point, as_is=as_is)
        try:
            return Chat.over(session, chat_format)
        except BaseException:
            session.abandon()  # nobody was given it
            raise

    def chat_over(self, session: Session) -> Chat:
        """The conversation that a live session holds; raises `PromptInvalid` when no chat has filled it."""
        return Chat.over(session, self.chat_format())

    async def take(self, session_id: str, source: str) -> Session:
        """Take over a session that `Session.migrate` has moved to the place with the URL `source`, and resume it.

        A cancelled call comes back after the object that is being fetched, and the session stays where it was; once all
        was there, it is owned here, and `resume` gives it. Raises `NotOwner` if another store has taken it,
        `SessionGone` if no such session was moved there, `PlaceUnknown` for what is no place.
        """
        self._check_open()
        await take(self._services.journal, session_id, source)
        return await self.resume(session_id)

    async def push(self, point: Point | str, target: str | PathLike[str]) -> Moved:
        """Copy a durable point (a `Point`, the id of a node or session, or a tag), all it continues from and its state
        to another store, by its folder, where one is made if there is none, or to a place, by its URL; only what is
        missing there is sent.

        What was copied may go on in both. A cancelled call comes back at the latest after the object that a place is
        being given, or that is read because a call before had left it; unless all was there by then nothing is seen of
        it, and the next call sends what is missing. Raises `SessionGone`, or `StoreBusy` for the store of another
        running runtime: that one has to `pull`.
        """
        self._check_open()
        return await push(self._services.journal, str(point), fspath(target))

    async def pull(self, name: str, source: str | PathLike[str]) -> Moved:
        """Copy a point, all it continues from and its state from another store, by its folder, which another runtime
        may be using; or from a place, by its URL, to which the node `name` was pushed. Only what is missing is fetched.

        `Moved.node_id` is what to resume. A cancelled call is as one of `push`. Raises `SessionGone` if nothing there
        has the name.
        """
        self._check_open()
        return await pull(self._services.journal, name, fspath(source))

    async def replay_tokens(self, point: Point | str) -> int:
        """How many tokens `resume` would have to read once more, for want of a snapshot of this build at the point."""
        self._check_open()
        stored = await self._services.keeper.find(str(point))
        return stored.replay_tokens

    async def resume(
        self, point: Point | str, *, as_is: bool = False, take_back: bool = False, background: bool = False
    ) -> Session:
        """A live session at a durable point: a `Point`, or the id of a node or session, or a tag.

        At the end of a session that is not live, that session goes on; anywhere else a new one branches off. Both keep
        the point's random branch. A state without a usable snapshot is rebuilt by replaying its token ids, which gives
        the same bits; a snapshot of another build or SIMD path is used only `as_is`, and marks the session inexact, as
        is all that follows: its states are stored under nodes of their own, never in the place of an exact one. Where
        that session goes on and pauses, such a node is its end: whoever resumes it by its id from then on goes on
        inexactly, and the point itself is what an exact one branches off from.
        An exact state that was replayed is written in the background, a few seconds later and if nobody has stored it
        by then: under the point if it had no snapshot and more than `Policy.save_after_tokens` were replayed; in the
        place of a snapshot there that lies otherwise in memory than this build has it (which is never used) or whose
        files are damaged, however few they were. One of another build, or that was set aside, stays.
        The end of a session that was moved elsewhere raises `NotOwner`; one whose move was broken off asks the other
        side first. `take_back` is a person's word that the session is used nowhere else.
        With `background` the session is given at once, cold, and its state is read or rebuilt while nobody waits for
        it: `SessionStatus.replay_tokens` says what that still takes, and the first call that needs it waits.
        Raises `SessionGone`, `ModelMismatch`, or `OutOfBudget` (`OverQuota` for the namespace it is of).
        """
        self._check_open()
        while self._collecting is not None:  # it may be about to erase what is asked for
            await self._collecting.wait()
        call = object()
        self._resuming[call] = str(point)  # no live session stands for it yet
        try:
            accept = Accept.AS_IS if as_is else Accept.OWN
            stored = await self._services.keeper.find(str(point), accept, take_back=take_back)
            self._resuming[call] = stored.node.id
            return await self._resumed(stored, background=background)
        finally:
            del self._resuming[call]

    async def _resumed(self, stored: Stored, *, background: bool) -> Session:
        """A live session at a stored point."""
        keeper, node, timeline = self._services.keeper, stored.node, stored.timeline
        account = self._services.pool.accounts.of(node.namespace)
        account.check_sessions()
        state: State | None = None
        replayed = 0
        # What an inexact snapshot makes of the session is known only once it has been read.
        background = background and not (stored.way.start is not None and stored.way.start.inexact)
        if not background:
            state, replayed = await keeper.rebuild(stored)
        goes_on = stored.is_head and node.session_id not in self._services.live
        if goes_on:
            # It may have been live while the state was rebuilt, and have gone on or away since.
            try:
                is_head = await self._services.journal.is_head(node)
                goes_on = is_head and node.session_id not in self._services.live
            except BaseException:
                if state is not None:
                    state.release()
                raise
        try:
            self._check_open()
            account.check_sessions()
        except SeraiError:
            if state is not None:
                state.release()
            raise
        session = Session(
            self._services,
            session_id=node.session_id if goes_on else new_id(),
            timeline=timeline,
            holding=Holding(keeper, state, node.position, replay_tokens=stored.replay_tokens if background else 0),
            namespace=node.namespace,
            label=node.label,
            append_metadata=stored.append_metadata,
            replayed_tokens=replayed,
        )
        session.record.continues(stored.path, inexact=state is not None and state.inexact)
        if not goes_on:
            session.record.started(timeline, NodeKind.FORK)
        if background:
            self._services.returning.expect(session, 0.0)
        return session

    async def collect(self, policy: GcPolicy) -> GcReport:
        """Free disk by a policy while sessions live: what they and the resumes under way stand on is kept, as is what
        has a tag. Raises `BadParameter` without a store.
        """
        self._check_open()
        while self._collecting is not None:
            await self._collecting.wait()
        protected = self.points_in_use().keys()
        self._collecting = anyio.Event()
        try:
            return await self._services.journal.collect(policy, protected)
        finally:
            self._collecting.set()
            self._collecting = None

    def points_in_use(self) -> dict[str, str]:
        """What live sessions and resumes under way stand on in the store: the ids of nodes, and of which session each
        is; or a session or tag that was asked for, and "". Whoever deletes it takes from a session what it is about to
        write its next node under."""
        live = (session.record.durable_node() for session in self._services.live.values())
        return dict.fromkeys(self._resuming.values(), "") | {one.id: one.session_id for one in live if one}

    def live_on(self, session_id: str) -> tuple[str, ...]:
        """The ids of the live sessions whose last node in the store is that session's: its own, and forks of it that
        have written nothing yet."""
        live = self._services.live.items()
        return tuple(id_ for id_, one in live if (at := one.record.durable_node()) and at.session_id == session_id)

    def set_quota(self, namespace: str, quota: Quota | None) -> None:
        """Bound what a namespace may have from now on (`Quota` says of what); None takes its quota away.

        A namespace that has more already keeps it, and gets no more. Calls that wait look again at once. Raises
        `NameInvalid` for what can't be a namespace.
        """
        self._services.pool.accounts.set_quota(namespace, quota)
        self._services.admission.freed()

    def find(self, session_id: str) -> Session | None:
        """The live session of that id."""
        return self._services.live.get(session_id)

    def status(self) -> Status:
        """A snapshot of the runtime's figures."""
        return figures(self._services, self.facts)

    def wrap_engine(self, wrap: Callable[[StepEngine], StepEngine]) -> None:
        """Put `wrap(engine)` in the engine's place from the next step on: what slows, counts or breaks its steps."""
        self._services.driver.engine = wrap(self._services.driver.engine)

    def watch(self, most: int = 1_000, namespace: str | None = None) -> AbstractContextManager[Watcher]:
        """A stream of what happens to sessions: `with rt.watch() as events: async for event in events: ...`."""
        return self._services.events.watch(most, namespace)

    async def recall(self) -> None:
        """Learn what the store has that new sessions may start from."""
        await self._services.recall()

    @property
    def is_working(self) -> bool:
        """Whether a step is being computed or a snapshot being written in the background at this moment."""
        return self._services.driver.is_stepping or self._services.saver.is_writing

    def check(self) -> None:
        """Raise `AssertionError` unless every byte of state in memory has a holder; for when nothing is under way."""
        self._services.check()

    async def settle(self) -> None:
        """Wait until what waits to be written in the background now has been written, whatever comes meanwhile."""
        await self._services.saver.settle()

    async def drive(self) -> None:
        """Execute the sessions' steps until `close`; `running` gives it a task."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._services.run)
            await self._services.driver.run()
            tasks.cancel_scope.cancel()
        self._services.prefixes.clear()

    async def close(self) -> None:
        """End every live session and take no more work; what was durable stays durable.

        A session that can't be written keeps no other from it: its error is raised at the end, or `EndsUnwritten` for
        those of several.
        """
        self._closing = True
        failures: dict[str, Exception] = {}
        try:
            for session in list(self._services.live.values()):
                try:
                    await session.break_off()
                except Exception as error:  # noqa: BLE001  # raised below
                    failures[session.id] = error
        finally:
            self._services.driver.close()
        if len(failures) > 1:
            raise EndsUnwritten(failures) from next(iter(failures.values()))
        for failure in failures.values():
            raise failure

    def _check_open(self) -> None:
        if self._closing:
            raise ShuttingDown


@asynccontextmanager
async def running(runtime: Runtime) -> AsyncIterator[Runtime]:
    """Drive the runtime's steps for the length of the block, and end its sessions after it.

    What the block raises comes out as it is, not in a group with the runtime's own tasks.
    """
    failure: BaseException | None = None
    await runtime.recall()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runtime.drive)
        try:
            yield runtime
        except BaseException as error:  # noqa: BLE001  # raised again below, cancellation included
            failure = error
        try:
            with anyio.CancelScope(shield=True):
                await runtime.close()
        except Exception as error:  # noqa: BLE001  # raised below, unless the block has said something before
            if failure is not None:
                failure.add_note(f"and closing the runtime failed: {error}")
            failure = failure or error
    if failure is not None:
        raise failure
