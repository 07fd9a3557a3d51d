"""The process that is killed in `test_migration.py`: it migrates a session and dies before or after one step of it.

`python -m tests.runtime.sessions.migrate_and_die STORE TARGET STEP WHEN`; prints the session, its tokens, and what must
follow.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serai.checkpoints.moving import handover
from serai.checkpoints.moving.handover import PlacePeer, StorePeer
from tests.runtime.fake_runtime import fake_runtime
from tests.runtime.sessions.test_migration import SAMPLED


def deadly(work: Callable[..., Any], when: str) -> Callable[..., Any]:
    """The same, but the process ends before it or after it."""

    def act(*arguments: Any, **options: Any) -> None:
        if when == "after":
            work(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    return act


async def main(store: Path, target: str, step: str, when: str) -> None:
    async with fake_runtime(store=store) as rt:
        session = await rt.session()
        await session.append([1, 2, 3, 4, 5])
        await session.generate(SAMPLED).collect()
        point = await session.pause()
        session, other = await rt.resume(point), await rt.resume(point)  # which branch off alike
        expected = [int(token) for token in (await other.generate(SAMPLED).collect()).tokens]
        tokens = session.tokens().tolist()
        print(json.dumps({"session": session.id, "tokens": tokens, "expected": expected}), flush=True)
        if step in ("receive", "accept"):
            for kind in (PlacePeer, StorePeer):
                setattr(kind, step, deadly(getattr(kind, step), when))
        else:
            setattr(handover, step, deadly(getattr(handover, step), when))
        await session.migrate(target)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
