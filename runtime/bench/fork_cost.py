"""What a fork costs at the size of Kimi K3: the session is real, its state only has the right shape."""

import time
from dataclasses import dataclass

from serai.checkpoints.nodes import NodeKind
from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda_panels import PANEL, panels_of
from serai.runtime.bench.no_engine import services_without_engine, session_at

K3_STATE = StateLayout(
    kda_shape=(69, 96 * panels_of(128), 128, PANEL),
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
    with services_without_engine(K3_STATE) as services:
        pool = services.pool
        empty = pool.empty()
        state = pool.draft(empty, tokens, with_logits=True).commit()
        empty.release()
        parent = session_at(services, state)
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
