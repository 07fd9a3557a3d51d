"""The other process of `test_real_engine.py`: resumes every point of a walk and compares what comes after it.

`python -m tests.runtime.resume_elsewhere MODEL FOLDER PRECISION`; FOLDER holds `store` and `walk.npz`. The next logits
are compared at every point, bit by bit, then eight tokens; at every tenth point all tokens to the end.
"""

import asyncio
import sys
from pathlib import Path

import numpy as np

from serai.runtime import SamplingParams, open_runtime

SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3)


async def resume_all(model: str, folder: Path, precision: str) -> None:
    walk = np.load(folder / "walk.npz")
    expected, prompt = walk["expected"].tolist(), int(walk["prompt"])
    async with open_runtime(model, budget="1GiB", store=folder / "store", precision=precision) as rt:
        for cut, point in enumerate(walk["points"]):
            session = await rt.resume(str(point))
            assert session.position == prompt + cut
            assert (await session.logits()).tobytes() == walk["logits"][cut].tobytes(), f"other logits at {cut}"
            count = len(expected) - cut if cut % 10 == 0 else min(8, len(expected) - cut)
            params = SamplingParams.from_record({**SAMPLED.to_record(), "max_tokens": count})
            tokens = (await session.generate(params).collect()).tokens
            assert list(tokens) == expected[cut : cut + count], f"other tokens after {cut}"
            await session.close()
        print(f"{len(walk['points'])} resumed, {rt.counters.prefilled_tokens} tokens computed again")


if __name__ == "__main__":
    asyncio.run(resume_all(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
