"""A process is killed in the middle of an answer. Another one goes on, with the same tokens the first would have given.

python examples/resume_after_crash.py [MODEL]
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from serai.runtime import SamplingParams, open_runtime

PROMPT = "The code of the red box is 4172. The home of Mira is Oslo."
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True)


async def doomed(model: str, store: str) -> None:
    """Read the prompt, begin to answer, and be killed after ten tokens."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.session(label="doomed")
        await session.append(PROMPT)
        print(session.id, flush=True)
        count = 0
        async for _ in session.generate(SAMPLED):
            count += 1
            if count == 10:
                os.kill(os.getpid(), signal.SIGKILL)


async def survivor(model: str, store: str, session_id: str) -> None:
    """Resume the killed session and hold what it says against an undisturbed run."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.resume(session_id)
        print(f"resumed {session.label!r} at position {session.position}: its prompt was durable, its answer had begun")
        after = await session.generate(SAMPLED).collect()
        undisturbed = await rt.session()
        await undisturbed.append(PROMPT)
        expected = await undisturbed.generate(SAMPLED).collect()
        print("the answer:", after.text)
        print("equal to an undisturbed run:", after.tokens == expected.tokens)
        if after.tokens != expected.tokens:
            sys.exit("the resumed answer differs")


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "sessions")
        first = subprocess.run([sys.executable, __file__, model, store], stdout=subprocess.PIPE, text=True, check=False)
        session_id = first.stdout.strip()
        print(f"the first process ended with signal {-first.returncode} while it was answering")
        asyncio.run(survivor(model, store, session_id))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        asyncio.run(doomed(sys.argv[1], sys.argv[2]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "nano")
