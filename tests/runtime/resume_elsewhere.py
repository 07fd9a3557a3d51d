"""The other process of `test_real_engine.py`: resumes every point of a walk and compares what comes after it.

`python -m tests.runtime.resume_elsewhere MODEL FOLDER PRECISION`; FOLDER holds `store` and `walk.npz`. The next logits
are compared at every point, bit by bit, then three tokens; at every hundredth point all tokens to the end.
"""

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from serai.runtime import SamplingParams, Session, open_runtime

Part = list[int] | SamplingParams

MIXED: tuple[Part, ...] = (
    SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=100, ignore_eos=True
    ),
    np.random.default_rng(2).integers(0, 1000, 50).tolist(),
    SamplingParams(temperature=1.1, top_p=0.9, seed=8, presence_penalty=0.5, max_tokens=100, ignore_eos=True),
    np.random.default_rng(3).integers(0, 1000, 50).tolist(),
)
"""What is read and sampled in turns: 300 tokens."""


def steps_of(parts: Sequence[Part]) -> Iterator[int | SamplingParams]:
    """The same, token by token: what is read next, or how the next one is drawn."""
    for part in parts:
        if isinstance(part, SamplingParams):
            one = SamplingParams.from_record({**part.to_record(), "max_tokens": 1})
            yield from [one] * (part.max_tokens or 0)
        else:
            yield from part


async def take(session: Session, step: int | SamplingParams) -> None:
    if isinstance(step, SamplingParams):
        await session.generate(step).collect()
    else:
        await session.append([step])


async def resume_all(model: str, folder: Path, precision: str) -> None:
    walk = np.load(folder / "walk.npz")
    expected, prompt, steps = walk["expected"].tolist(), int(walk["prompt"]), list(steps_of(MIXED))
    async with open_runtime(model, budget="1GiB", store=folder / "store", precision=precision) as rt:
        for cut, point in enumerate(walk["points"]):
            before = rt.counters.prefilled_tokens
            session = await rt.resume(str(point))
            assert rt.counters.prefilled_tokens == before, f"tokens were computed again at {cut}"
            assert session.position == prompt + cut
            assert (await session.logits()).tobytes() == walk["logits"][cut].tobytes(), f"other logits at {cut}"
            end = len(steps) if cut % 100 == 0 else min(cut + 3, len(steps))
            for step in steps[cut:end]:
                await take(session, step)
            assert session.tokens().tolist() == expected[: prompt + end], f"other tokens after {cut}"
            await session.close()
        print(f"{len(walk['points'])} resumed, 0 tokens computed again")


if __name__ == "__main__":
    asyncio.run(resume_all(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
