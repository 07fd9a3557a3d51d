"""How long a paused session takes to be there again, beside reading its tokens anew."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
import numpy as np

from serai.runtime.bench.mid import MID_K3, cached_mid_model, narrowed, with_layers
from serai.runtime.bench.raw_disk import drop_page_cache
from serai.runtime.opening import open_runtime

RESUMED_TOKENS = 32_768
QUICK_TOKENS = 4_096
BUDGET = "2GiB"
IDS_BELOW = 500
"""Token ids are drawn from 0 to here: ordinary tokens of any vocabulary."""

LAYERS, NARROWER, VOCAB = 8, 4, 32_768
MODEL = narrowed(with_layers(MID_K3, LAYERS, VOCAB), NARROWER)
"""The mid-size model at the scale at which two cores read 32,768 tokens in two minutes. A larger one takes longer to
read by its products of matrices, and to resume only by its layers' states: the ratio grows with the width."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What was measured, on `model`."""

    model: str
    tokens: int
    resume_s: float
    prefill_s: float
    state_bytes: int


async def resume_and_prefill(folder: Path, models: Path, tokens: int, rounds: int) -> Resumed:
    """Median seconds to resume a session of so many tokens from disk, and the seconds it took to read them.

    Both through the runtime, in `fast` precision, with a store in `folder`; `models` keeps the model. Each resume is
    the first of a runtime opened anew, with the store dropped from the page cache, so that nothing of the session is
    left in memory.
    """
    made = await anyio.to_thread.run_sync(lambda: cached_mid_model(models, MODEL))
    ids = np.random.default_rng(0).integers(0, IDS_BELOW, tokens)
    async with open_runtime(made.folder, budget=BUDGET, store=folder) as rt:
        async with await rt.session() as other:
            await other.append(ids[::-1][:300])  # what is done once a process is done now
        session = await rt.session()
        began_s = time.perf_counter()
        await session.append(ids)
        prefill_s = time.perf_counter() - began_s
        point = await session.pause()
    seconds = []
    for _ in range(rounds):
        await anyio.to_thread.run_sync(drop_page_cache, folder)
        async with open_runtime(made.folder, budget=BUDGET, store=folder) as rt:
            began_s = time.perf_counter()
            session = await rt.resume(point)
            seconds.append(time.perf_counter() - began_s)
            if rt.counters.prefilled_tokens:
                raise AssertionError("tokens were read again, so no resume was timed")
            await session.close()
    name = f"mid-size K3 layout at 1/{NARROWER} width, {MODEL.layers} layers ({made.nbytes / 1e6:,.0f} MB)"
    return Resumed(name, tokens, statistics.median(seconds), prefill_s, point.state_bytes)
