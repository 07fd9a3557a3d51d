"""One session reads a notebook; three forks of it ask three questions. Forking copies nothing.

python examples/fork_three_ways.py [MODEL]
"""

import asyncio
import sys
import time

from serai.runtime import Chat, SamplingParams, open_runtime

NOTEBOOK = (
    "The code of the red box is 4172. The home of Mira is Oslo. The job of Tom is baker. "
    "The place of the blue key is the cellar. The pet of Anna is grey cat."
)
QUESTIONS = ("What is the code of the red box?", "What is the job of Tom?", "What is the place of the blue key?")
GREEDY = SamplingParams(temperature=0, max_tokens=60)


async def ask(chat: Chat, question: str) -> str:
    reply = await chat.send(question, GREEDY).collect()
    return reply.message.text


async def main(model: str) -> None:
    async with open_runtime(model, budget="1GiB") as rt:
        reader = await rt.chat(thinking=False)
        await reader.send(NOTEBOOK, GREEDY).collect()
        position = reader.session.position
        before = rt.status().budget.live_bytes

        started = time.perf_counter()
        forks = await reader.fork_many(3)
        took_ms = 1e3 * (time.perf_counter() - started)
        print(f"3 forks took {took_ms:.2f} ms and {rt.status().budget.live_bytes - before} bytes of state")

        # All three are answered in the same steps.
        answers = await asyncio.gather(*(ask(fork, question) for fork, question in zip(forks, QUESTIONS, strict=True)))
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question:40} {answer}")
        print(f"the reader stayed at its position, {position}: {reader.session.position == position}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
