"""Many sessions ask about one document. It is read once, whoever comes, and after a restart it isn't read at all.

python examples/shared_document.py [MODEL]
"""

import asyncio
import sys
import tempfile

from serai.runtime import Runtime, SamplingParams, open_runtime

DOCUMENT = (
    "The code of the red box is 4172. The home of Mira is Oslo. The job of Tom is baker. "
    "The place of the blue key is the cellar. The pet of Anna is grey cat. "
) * 8
QUESTIONS = ("The code of the red box is", "The home of Mira is", "The job of Tom is", "The pet of Anna is")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


async def ask(rt: Runtime, question: str) -> tuple[int, int, str]:
    """A session of its own. The document is an append of its own, so that others can start from its end."""
    async with await rt.session(label=question) as session:
        document = await session.append(DOCUMENT)
        asked = await session.append(question)
        done = await session.generate(GREEDY).collect()
        return document.prefilled + asked.prefilled, document.reused + asked.reused, done.text.strip()


async def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as store:
        for when in ("at first", "after a restart"):
            async with open_runtime(model, budget="1GiB", store=store) as rt:
                found = await asyncio.gather(*(ask(rt, question) for question in QUESTIONS))
                print(when)
                for question, (prefilled, reused, answer) in zip(QUESTIONS, found, strict=True):
                    print(f"  {prefilled:5} tokens read, {reused:5} known   {question} {answer}")
                print(f"  {rt.counters.prefilled_tokens} tokens computed, {rt.counters.reused_tokens} reused")
                await rt.settle()  # what others may start from is in the store before the process ends


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
