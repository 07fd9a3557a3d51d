"""How long a paused session takes to be there again, beside reading its tokens anew."""

import statistics
import time
from pathlib import Path

import anyio.to_thread
import numpy as np

from serai.runtime.bench.raw_disk import drop_page_cache
from serai.runtime.opening import open_runtime

RESUMED_TOKENS = 32_768
QUICK_TOKENS = 4_096
BUDGET = "1GiB"
IDS_BELOW = 500
"""Token ids are drawn from 0 to here: ordinary tokens of any vocabulary."""


async def resume_and_prefill(folder: Path, tokens: int, rounds: int, model: str | Path = "nano") -> tuple[float, float]:
    """Median seconds to resume a session of so many tokens from disk, and the seconds it took to read them.

    Both through the runtime, in `fast` precision, with a store in `folder`. Each resume is the first of a runtime
    opened anew, with the page cache dropped, so that nothing of the session is left in memory.
    """
    ids = np.random.default_rng(0).integers(0, IDS_BELOW, tokens)
    async with open_runtime(model, budget=BUDGET, store=folder) as rt:
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
        async with open_runtime(model, budget=BUDGET, store=folder) as rt:
            began_s = time.perf_counter()
            session = await rt.resume(point)
            seconds.append(time.perf_counter() - began_s)
            await session.close()
    return statistics.median(seconds), prefill_s
