"""What a fork costs at the size of Kimi K3: the session is real, its state only has the right shape."""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

from serai.checkpoints.names import new_id
from serai.checkpoints.nodes import NodeKind
from serai.checkpoints.snapshot import Fingerprint, LatentType, StateLayout
from serai.runtime.engine_thread import EngineThread
from serai.runtime.services import Services, assemble
from serai.runtime.sessions.holding import Holding
from serai.runtime.sessions.journal import Journal
from serai.runtime.sessions.session import Session
from serai.runtime.sessions.turns import Span, Timeline
from serai.runtime.state import StatePool
from serai.runtime.step import Slice, StepPlan, StepResult

K3_STATE = StateLayout(
    kda_shape=(69, 96, 128, 128),
    conv_shape=(69, 3, 3, 96 * 128),
    mla_layers=24,
    latent_width=576,
    latent_type=LatentType.BFLOAT16,
    page_tokens=64,
    vocab=163_840,
)
"""Kimi K3's: 434 MB of KDA matrices, 31 MB of convolution tails and 27 KB a token."""

TOKENS = 131_072


@dataclass(frozen=True, slots=True)
class ForkCost:
    """The slowest fork's time, the bytes of state all of them took, and the bytes of the state they share."""

    slowest_s: float
    median_s: float
    added_bytes: int
    state_bytes: int


async def fork_cost(times: int, tokens: int = TOKENS) -> ForkCost:
    """Fork a K3-shaped session so many times. The state's pages are reserved and never touched: a fork does neither."""
    with _services() as services:
        pool = services.pool
        empty = pool.empty()
        state = pool.draft(empty, tokens, with_logits=True).commit()
        empty.release()
        ids = array("i", [number % K3_STATE.vocab for number in range(tokens)])
        parent = Session(
            services,
            session_id=new_id(),
            timeline=Timeline(ids, [Span(0, 0, generated=False)]),
            holding=Holding(services.keeper, state, tokens),
            namespace="",
            label="",
        )
        parent.record.started(parent.timeline, NodeKind.ROOT)  # forks hang under it without a token of their own
        before, seconds, forks = pool.live_bytes, [], []
        for _ in range(times):
            began_s = time.perf_counter()
            forks.append(await parent.fork())
            seconds.append(time.perf_counter() - began_s)
        cost = ForkCost(max(seconds), sorted(seconds)[times // 2], pool.live_bytes - before, before)
        for session in (*forks, parent):
            await session.close()
        return cost


class _NoEngine:
    """Nothing is fed here."""

    def step(self, plan: StepPlan) -> StepResult:
        raise AssertionError("a fork feeds nothing")

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        raise AssertionError("a fork feeds nothing")


@contextmanager
def _services() -> Iterator[Services]:
    told = [one.name for one in fields(Fingerprint) if one.type in (str, "str")]
    fingerprint = Fingerprint(**dict.fromkeys(told, "none"), experts_per_token=0)
    thread = EngineThread()
    try:
        yield assemble(
            engine=_NoEngine(),
            thread=thread,
            pool=StatePool(K3_STATE),
            journal=Journal(None, fingerprint, K3_STATE),
            tokenizer=None,
            vocab_size=K3_STATE.vocab,
            max_positions=1 << 20,
            stop_ids=frozenset(),
        )
    finally:
        thread.close()
