"""What every session of one runtime shares."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from serai.runtime.admission import Admission
from serai.runtime.driver import Driver
from serai.runtime.errors import BadParameter
from serai.runtime.events import EventFeed
from serai.runtime.holding import Keeper
from serai.runtime.journal import Journal
from serai.runtime.loop_delay import LoopDelay
from serai.runtime.residency import reclaim
from serai.runtime.state import StatePool
from serai.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serai.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Services:
    """The parts that sessions are made of, each with one owner, wired up once by `assemble`."""

    driver: Driver
    pool: StatePool
    admission: Admission
    journal: Journal
    keeper: Keeper
    tokenizer: Tokenizer | None
    vocab_size: int
    max_positions: int
    stop_ids: frozenset[int]
    now_s: Callable[[], float] = anyio.current_time
    events: EventFeed = field(default_factory=EventFeed)
    loop_delay: LoopDelay = field(default_factory=LoopDelay)
    live: "dict[str, Session]" = field(default_factory=dict)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `BadParameter` when the model has none."""
        if self.tokenizer is None:
            raise BadParameter("this model's folder has no tokenizer, so text can't be read; give token ids instead")
        return self.tokenizer

    async def reclaim(self, needed_bytes: int) -> bool:
        """Move idle sessions to the store until about so much is free; whether any was moved."""
        if not self.journal.is_durable:
            return False
        return await reclaim(tuple(self.live.values()), needed_bytes, self.now_s())


def assemble(
    *,
    driver: Driver,
    pool: StatePool,
    admission: Admission,
    journal: Journal,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_positions: int,
    stop_ids: frozenset[int],
) -> Services:
    """The services of one runtime; from now on a full pool makes idle sessions move out."""
    services = Services(
        driver=driver,
        pool=pool,
        admission=admission,
        journal=journal,
        keeper=Keeper(driver, pool, admission, journal),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_positions=max_positions,
        stop_ids=stop_ids,
    )
    admission.reclaim = services.reclaim
    return services
