"""What a process takes while states of megabytes are made and let go of, for a test that runs it in one of its own."""

import gc

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.runtime.bench.resident import resident_bytes
from serai.runtime.memory.give_back import keep_little
from serai.runtime.state import State, StatePool
from tests.runtime.test_state import advance

LAYOUT = StateLayout(
    kda_shape=(8, 8, 128, 128),
    conv_shape=(8, 3, 3, 1024),
    mla_layers=2,
    latent_width=576,
    latent_type=LatentType.FLOAT32,
    page_tokens=64,
    vocab=16_384,
)


def grow() -> tuple[int, int, int]:
    """By how many bytes the process has grown with the states, what the pool counted, and what was left after."""
    keep_little()
    pool = StatePool(LAYOUT)
    states: list[State] = [advance(pool, pool.empty(), [1] * 70)]
    gc.collect()
    before, counted_before = resident_bytes(), _counted(pool)
    for number in range(40):
        parent = states[number // 2]
        states.append(advance(pool, parent, [number] * 7))
    grown, counted = resident_bytes() - before, _counted(pool) - counted_before
    for state in states[1:]:
        state.release()
    pool.trim()
    gc.collect()
    return grown, counted, resident_bytes() - before


def _counted(pool: StatePool) -> int:
    return pool.live_bytes + pool.spare_bytes
