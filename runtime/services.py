"""What every session of one runtime shares."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

import anyio

from serai.runtime.driver import Driver
from serai.runtime.engine_thread import EngineThread
from serai.runtime.loop_delay import LoopDelay
from serai.runtime.memory import admission
from serai.runtime.memory.admission import Admission
from serai.runtime.memory.ledger import check_holders
from serai.runtime.memory.residency import reclaim
from serai.runtime.scheduler import Limits
from serai.runtime.sessions.contents import need
from serai.runtime.sessions.events import EventFeed
from serai.runtime.sessions.holding import Keeper
from serai.runtime.sessions.journal import Journal
from serai.runtime.sessions.prefixes import Prefixes
from serai.runtime.sessions.returning import Returning
from serai.runtime.sessions.saver import Saver
from serai.runtime.sessions.store_size import StoreSize
from serai.runtime.state import State, StatePool, session_bytes
from serai.runtime.step import StepEngine
from serai.runtime.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LEAST_STATES_FOR_REUSE = 6
"""A running session has up to three fixed states; as many again are the fewest worth keeping for others."""

if TYPE_CHECKING:
    from serai.runtime.sessions.generation import Generation
    from serai.runtime.sessions.session import Session


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept so that nothing is computed twice.

    `reuse` turns the keeping of states on, `guess` the reading ahead of tokens that were read before (the tokens drawn
    are the same either way). While a long append is read, a state is kept every `snapshot_every` tokens. One is written
    in the background when more than `save_after_tokens` would have to be replayed without it.
    """

    reuse: bool = True
    guess: bool = True
    snapshot_every: int = 20_000
    save_after_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that sessions are made of, each with one owner, wired up once by `assemble`."""

    driver: Driver
    pool: StatePool
    admission: Admission
    journal: Journal
    prefixes: Prefixes
    keeper: Keeper
    saver: Saver
    store_size: StoreSize
    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int
    stop_ids: frozenset[int]
    policy: Policy
    session_bytes: int = 0
    """What each session is counted with beside its state and its token ids."""
    now_s: Callable[[], float] = time.monotonic
    """asyncio's clock, asked directly: several times a token, and by way of the loop it takes microseconds."""
    events: EventFeed = field(default_factory=EventFeed)
    loop_delay: LoopDelay = field(default_factory=LoopDelay)
    returning: Returning = field(default_factory=Returning)
    live: "dict[str, Session]" = field(default_factory=dict)
    reading: "WeakSet[Generation]" = field(default_factory=WeakSet)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `BadParameter` when the model has none."""
        return need(self.tokenizer)

    async def reclaim(self, needed_bytes: int, namespace: str | None = None) -> bool:
        """Free about so much, of one namespace or of all: first what is only kept for reuse, then idle sessions move to
        the store."""
        freed = self.prefixes.reclaim(needed_bytes, namespace)
        if freed >= needed_bytes:
            return True
        let_go = self.saver.let_go(namespace)
        if not self.journal.is_durable:
            return freed > 0 or let_go
        sessions = tuple(one for one in self.live.values() if namespace in (None, one.namespace))
        moved = await reclaim(sessions, needed_bytes - freed, self.now_s())
        return moved or let_go or freed > 0

    def check(self) -> None:
        """Hold the budget's ledger against what is held, to the last reference; raises `AssertionError`.

        For moments when no call is under way and nothing is being written: those hold states of their own.
        """
        check_holders(self.pool, self._held())

    def _held(self) -> Iterator[State]:
        yield from (state for session in self.live.values() if (state := session.held) is not None)
        yield from (state for generation in self.reading if (state := generation.ahead) is not None)
        yield from self.prefixes.states()
        yield from self.saver.states()

    async def run(self) -> None:
        """What goes on behind the sessions, until it is cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.loop_delay.measure)
            tasks.start_soon(self.saver.run)
            tasks.start_soon(self.returning.run)
            tasks.start_soon(self.store_size.run)

    async def recall(self) -> None:
        """Learn which prefixes the store has snapshots of; warn if there is no room to keep any in memory."""
        if self.policy.reuse:
            self._warn_of_little_room()
            for prefix in await self.journal.known_prefixes():
                self.prefixes.stored(prefix.namespace, prefix.digest, prefix.position, prefix.node_id)

    def _warn_of_little_room(self) -> None:
        """Reuse that silently never came about would look like slowness."""
        tokens = min(self.policy.snapshot_every, self.max_positions)
        limit, most = self.pool.limit_bytes, session_bytes(self.pool.layout, tokens)
        if limit is not None and limit < LEAST_STATES_FOR_REUSE * most:
            log.warning(
                "hardly anything can be reused: a state of %d tokens takes %d bytes and there is room for %d bytes of "
                "them, sessions included; raise the budget, or keep states closer (Policy.snapshot_every)",
                tokens,
                most,
                limit,
            )


def assemble(
    *,
    engine: StepEngine,
    thread: EngineThread,
    pool: StatePool,
    journal: Journal,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_positions: int,
    stop_ids: frozenset[int],
    limits: Limits | None = None,
    policy: Policy | None = None,
    session_bytes: int = 0,
) -> Services:
    """The services of one runtime. Each session is counted with `session_bytes` beside its state and token ids."""
    bound_s = admission.NOBODY_UNDER_WAY_S if journal.is_durable else admission.NOTHING_MOVES_S
    gate = Admission(pool, nobody_under_way_s=bound_s)
    driver = Driver(engine, thread, pool, gate, limits or Limits())
    prefixes = Prefixes(pool)
    policy = policy or Policy()
    saver = Saver(journal, prefixes, reuse=policy.reuse)
    services = Services(
        driver=driver,
        pool=pool,
        admission=gate,
        journal=journal,
        prefixes=prefixes,
        keeper=Keeper(driver, pool, gate, journal, prefixes, saver, save_after_tokens=policy.save_after_tokens),
        saver=saver,
        store_size=StoreSize(journal.file_bytes if journal.is_durable else None),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        stop_ids=stop_ids,
        policy=policy,
        session_bytes=session_bytes,
    )
    gate.reclaim = services.reclaim
    driver.first_use_failed = services.keeper.distrust
    saver.on_written = gate.freed
    return services
