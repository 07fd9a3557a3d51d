"""Name a point of a conversation, go on, go back, and return to the named point: the same answer, token for token.

python examples/time_travel.py [MODEL]
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from serai.checkpoints import Store
from serai.runtime import Chat, SamplingParams, open_runtime

NOTEBOOK = "The code of the red box is 4172. The home of Mira is Oslo."
CORRECTION = "Correction: the code of the red box is 9035, not 4172."
QUESTION = "What is the code of the red box?"
GREEDY = SamplingParams(temperature=0, max_tokens=60)
TAG = "before the correction"


async def ask(chat: Chat) -> list[int]:
    """The token ids of the answer, which is printed."""
    before = chat.session.position
    reply = await chat.send(QUESTION, GREEDY).collect()
    print(f"   {QUESTION} {reply.message.text}")
    return [int(token) for token in chat.session.tokens()[before:]]


async def read(model: str, store: Path) -> str:
    """Read the notebook and put the session away; gives the id of that point."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        chat = await rt.chat(thinking=False, label="reader")
        await chat.send(NOTEBOOK, GREEDY).collect()
        return (await chat.pause()).id


async def travel(model: str, store: Path) -> bool:
    """Go on from the tag, go back in the session, and come back to the tag."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        chat = await rt.resume_chat(TAG)
        position = chat.session.position
        print(f"2. resumed {TAG!r} at position {position}, was told a correction, and asked:")
        await chat.send(CORRECTION, GREEDY).collect()
        await ask(chat)

        await chat.session.rewind(position=position)
        print(f"3. rewound to position {chat.session.position}; what came after stays stored as a branch")
        # A chat reads its place in the conversation from its session, so one over the rewound session is a new one.
        point = await chat.session.pause()
        rewound = await ask(await rt.resume_chat(point))

        again = await rt.resume_chat(TAG)
        print(f"4. resumed {TAG!r} once more, in a session of its own: position {again.session.position}")
        tagged = await ask(again)
        print("both answers equal:", rewound == tagged)
        return rewound == tagged


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "sessions"
        point = asyncio.run(read(model, store))
        with Store.open(str(store)) as opened:  # as `serai sessions tag` does
            opened.tag(TAG, point)
        print(f"1. read a notebook and tagged that point {TAG!r}")
        if not asyncio.run(travel(model, store)):
            sys.exit("the answers differ")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "nano")
