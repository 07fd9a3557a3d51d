"""The smallest use: read something, ask about it.

python examples/hello.py [MODEL]
"""

import asyncio
import sys

from serai.runtime import SamplingParams, open_runtime


async def main(model: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60)
    async with open_runtime(model, budget="1GiB") as rt:
        chat = await rt.chat(thinking=False)
        await chat.send("The code of the red box is 4172. The home of Mira is Oslo.", greedy).collect()
        reply = await chat.send("What is the code of the red box?", greedy).collect()
        print(reply.message.text)
        print(chat.session)
        print(rt.status())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nano"))
