"""The other process of `test_real_engine.py`: resumes every point of a walk and compares what comes after it.

`python -m tests.runtime.resume_elsewhere MODEL FOLDER PRECISION`; FOLDER holds `store` and `walk.npz`. The next logits
are compared at every point, bit by bit, then three tokens; at every hundredth point all tokens to the end.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from serai.runtime import open_runtime
from serai.runtime.bench.killed import PROMPT, TOKENS, go


async def resume_all(model: str, folder: Path, precision: str) -> None:
    walk = np.load(folder / "walk.npz")
    expected = walk["expected"].tolist()
    async with open_runtime(model, budget="1GiB", store=folder / "store", precision=precision) as rt:
        for cut, point in enumerate(walk["points"]):
            before = rt.counters.prefilled_tokens
            session = await rt.resume(str(point))
            assert rt.counters.prefilled_tokens == before, f"tokens were computed again at {cut}"
            assert session.position == len(PROMPT) + cut
            assert (await session.logits()).tobytes() == walk["logits"][cut].tobytes(), f"other logits at {cut}"
            end = TOKENS if cut % 100 == 0 else min(cut + 3, TOKENS)
            for at in range(cut, end):
                await go(session, at, at + 1)
            assert session.tokens().tolist() == expected[: len(PROMPT) + end], f"other tokens after {cut}"
            await session.close()
        print(f"{len(walk['points'])} resumed, 0 tokens computed again")


if __name__ == "__main__":
    asyncio.run(resume_all(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
