"""A session moves from one process and store to another within a sampled answer, and has one owner throughout.

python examples/migrate_between_processes.py [MODEL]
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from serai.runtime import SamplingParams, open_runtime
from serai.runtime.errors import NotOwner

PROMPT = "The code of the red box is 4172. The home of Mira is Oslo."
FIRST, REST = 10, 30


def sampled(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=7, max_tokens=count, ignore_eos=True)


async def leave(model: str, here: Path, there: Path) -> tuple[str, list[int]]:
    """Read, answer the first tokens and move on; gives the session's id, and what staying would have answered."""
    async with open_runtime(model, budget="1GiB", store=here) as rt:
        session = await rt.session(label="traveller")
        await session.append(PROMPT)
        await session.generate(sampled(FIRST)).collect()
        point = await session.pause()
        session, twin = await rt.resume(point), await rt.resume(point)
        expected = await twin.generate(sampled(REST)).collect()

        moved = await session.migrate(there)
        print(f"moved {moved.position} tokens and their state to another store")
        try:
            await rt.resume(session.id)
        except NotOwner as error:
            print("here it can't be used any more:", error)
        return session.id, list(expected.tokens)


async def go_on(model: str, store: Path, session_id: str) -> list[int]:
    """In another process, over the store it was moved to."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.resume(session_id)
        done = await session.generate(sampled(REST)).collect()
        return list(done.tokens)


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        here, there = Path(name) / "here", Path(name) / "there"
        session_id, expected = asyncio.run(leave(model, here, there))
        command = [sys.executable, __file__, "--go-on", model, str(there), session_id]
        second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        tokens = json.loads(second.stdout)
        print(f"another process went on with {len(tokens)} tokens")
        print("equal to staying:", tokens == expected)
        if tokens != expected:
            sys.exit("the session went on differently elsewhere")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--go-on"]:
        print(json.dumps(asyncio.run(go_on(sys.argv[2], Path(sys.argv[3]), sys.argv[4]))))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "nano")
