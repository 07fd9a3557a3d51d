"""A conversation took a wrong turn. Go back to it, say something else, and keep what was said before and after.

python examples/edit_and_retry.py [MODEL]
"""

import asyncio
import sys
import tempfile

from serai.runtime import SamplingParams, open_runtime

TURNS = (
    "The code of the red box is 4172. The home of Mira is Oslo. ",
    "The job of Tom is sailor. ",
    "The pet of Anna is grey cat. ",
)
BETTER = "The job of Tom is baker. "
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


async def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as store:
        async with open_runtime(model, budget="1GiB", store=store) as rt:
            session = await rt.session(label="draft")
            for said in TURNS:
                await session.append(said)
                await session.generate(GREEDY).collect()
            print(f"three turns, {session.position} tokens")

            first = await session.fork(turn=0)
            print(f"a fork at the end of turn 0 begins at token {first.position}")
            whole = await session.fork(label="as it was")

            cost = session.replay_tokens(turn=0)
            edited = await session.edit(1, BETTER)
            print(f"turn 1 was edited: {cost} tokens read again, {edited.prefilled} new ones")
            again = await session.generate(GREEDY).collect()

            # The definition of what should come out: the same said from the start, in a namespace that shares nothing.
            straight = await rt.session(namespace="alone")
            await straight.append(TURNS[0])
            await straight.generate(GREEDY).collect()
            await straight.append(BETTER)
            expected = await straight.generate(GREEDY).collect()
            print("equal to having said so at once:", again.tokens == expected.tokens)
            print(f"what was there before is kept in {whole.label!r}, {whole.position} tokens")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
