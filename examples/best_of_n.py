"""Five answers to one question from five forks of one session, side by side in the same steps; the likeliest one wins.

python examples/best_of_n.py [MODEL]
"""

import asyncio
import math
import sys

from serai.runtime import SamplingParams, Session, open_runtime

QUESTION = "The code of the red box is 4172. The home of Mira is Oslo. The home of Mira is"
N = 5
SAMPLED = SamplingParams(temperature=0.9, seed=11, max_tokens=12, logprobs=0)


async def answer(fork: Session) -> tuple[float, str]:
    """One answer, and the mean log-probability of its tokens. Each fork draws from a random branch of its own."""
    pieces, logprobs = [], []
    async for token in fork.generate(SAMPLED):
        pieces.append(token.text)
        logprobs.append(token.logprob if token.logprob is not None else -math.inf)
    return sum(logprobs) / len(logprobs), "".join(pieces).strip()


async def main(model: str) -> None:
    async with open_runtime(model, budget="1GiB") as rt:
        session = await rt.session()
        used = await session.append(QUESTION)
        forks = await session.fork_many(N)
        answers = sorted(await asyncio.gather(*(answer(fork) for fork in forks)), reverse=True)
        for score, text in answers:
            print(f"{score:7.3f}  {text!r}")
        print(f"{N} answers; the question's {used.prefilled} tokens were read once: {rt.counters.prefilled_tokens}")
        print(f"the best: {answers[0][1]!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
