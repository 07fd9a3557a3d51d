"""A session moves from one process and store to another in the middle of a sampled answer, through one file.

python examples/migrate_between_processes.py [MODEL]
"""

import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from serai.checkpoints import Store
from serai.checkpoints.receiving import import_bundle
from serai.checkpoints.transfer import export
from serai.runtime import SamplingParams, open_runtime

PROMPT = "The code of the red box is 4172. The home of Mira is Oslo."
FIRST, REST = 10, 30


def sampled(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=7, max_tokens=count, ignore_eos=True)


async def begin(model: str, store: Path) -> tuple[str, list[int]]:
    """Read, answer the first tokens, pause; then show what staying here would have given."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.session(label="traveller")
        await session.append(PROMPT)
        await session.generate(sampled(FIRST)).collect()
        point = await session.pause()
        stayed = await rt.resume(point)
        expected = await stayed.generate(sampled(REST)).collect()
        return point.id, list(expected.tokens)


async def go_on(model: str, store: Path, node_id: str) -> list[int]:
    """In another process, over a store that has never seen the session before this bundle."""
    async with open_runtime(model, budget="1GiB", store=store) as rt:
        session = await rt.resume(node_id)
        done = await session.generate(sampled(REST)).collect()
        return list(done.tokens)


def arrive(model: str, folder: Path) -> None:
    """The second process: import the file, resume, and answer with the tokens."""
    store = folder / "there"
    with Store.open(str(store)) as opened, (folder / "session.bundle").open("rb") as source:
        moved = import_bundle(opened, source)
    print(json.dumps(asyncio.run(go_on(model, store, moved.node_id))))


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        node_id, expected = asyncio.run(begin(model, folder / "here"))
        with Store.open(str(folder / "here")) as opened, (folder / "session.bundle").open("wb") as sink:
            moved = export(opened, node_id, sink)
        print(f"exported {moved.nodes} nodes and {moved.parts} parts: {moved.bytes:,} bytes in one file")
        command = [sys.executable, __file__, "--arrive", model, str(folder)]
        second = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        tokens = json.loads(second.stdout)
        print(f"another process went on with {len(tokens)} tokens")
        print("equal to staying:", tokens == expected)
        if tokens != expected:
            sys.exit("the session went on differently elsewhere")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--arrive"]:
        arrive(sys.argv[2], Path(sys.argv[3]))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "nano")
