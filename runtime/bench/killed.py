"""A relay of processes, each of which is killed at a token boundary, and what the last of them is to end with.

Every process resumes what the one before it saved, goes on to its own boundary, saves, and dies of SIGKILL at the
moment at which `pause` has returned: it closes nothing and waits for no thread. Beforehand one session has gone the
whole way at once and another up to each boundary, without a store. Every process must have the tokens of the first and,
where it resumes and where it saves, the logits of the second, bit for bit, and must read no token anew.

As a module it is one of these processes.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serai.checkpoints.store import Store
from serai.checkpoints.upkeep.fsck import fsck
from serai.runtime.models.open_model import Precision
from serai.runtime.opening import open_runtime
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sessions.session import Session

Part = list[int] | SamplingParams

PROMPT: list[int] = np.random.default_rng(1).integers(0, 1000, 200).tolist()
MIXED: tuple[Part, ...] = (
    SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=100, ignore_eos=True
    ),
    np.random.default_rng(2).integers(0, 1000, 50).tolist(),
    SamplingParams(temperature=1.1, top_p=0.9, seed=8, presence_penalty=0.5, max_tokens=100, ignore_eos=True),
    np.random.default_rng(3).integers(0, 1000, 50).tolist(),
)
"""What is sampled and read in turns after the prompt."""
TOKENS = 300
EVERY_BOUNDARY = tuple(range(TOKENS + 1))
EVERY_KIND = (0, 1, 2, 57, 100, 101, 125, 150, 151, 250, 299, 300)
"""After the prompt; right after a sampled token, early, amid and at the end of a turn, under each penalty; within what
is read, at its first, a middle, its last token, and where a turn follows."""

BUDGET = "1GiB"
GIVE_UP_AFTER_S = 120.0
TELL_EVERY = 50


def parts_between(start: int, end: int) -> Iterator[Part]:
    """What lies between two boundaries of `MIXED`, in as few parts as that takes."""
    at = 0
    for part in MIXED:
        length = (part.max_tokens or 0) if isinstance(part, SamplingParams) else len(part)
        low, high = max(start - at, 0), min(end - at, length)
        if low < high:
            yield replace(part, max_tokens=high - low) if isinstance(part, SamplingParams) else part[low:high]
        at += length


async def go(session: Session, start: int, end: int) -> None:
    """From one boundary to another."""
    for part in parts_between(start, end):
        if isinstance(part, SamplingParams):
            await session.generate(part).collect()
        else:
            await session.append(part)


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a session is: its tokens and its next logits, as hashes of their bytes."""

    tokens: str
    logits: str


async def seen(session: Session) -> Seen:
    logits = await session.logits()
    return Seen(_hash(session.tokens().astype("<i4").tobytes()), _hash(logits.tobytes()))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def undisturbed(model: Path, precision: Precision, boundaries: Sequence[int]) -> list[Seen]:
    """What is to be seen at each boundary, of which the last is the end: by a session that nothing was saved of."""
    async with open_runtime(model, budget=BUDGET, precision=precision) as rt:
        whole = await rt.session(namespace="whole")
        await whole.append(PROMPT)
        await go(whole, 0, boundaries[-1])
        session = await rt.session(namespace="in steps")
        await session.append(PROMPT)
        found = []
        for start, end in zip((0, *boundaries), boundaries, strict=False):
            await go(session, start, end)
            found.append(await seen(session))
        if found[-1] != await seen(whole):
            raise AssertionError("the undisturbed session depends on how the way is divided")
    return found


@dataclass(frozen=True, slots=True)
class Relay:
    """Of how many `boundaries` how many were resumed after the kill there, and the first thing that went wrong."""

    boundaries: int
    survived: int
    problem: str | None


def relay(
    model: Path, folder: Path, precision: Precision, boundaries: Sequence[int], *, tell: Callable[[str], None]
) -> Relay:
    """Run it in a new store below `folder`; `boundaries` ascend, and a last process resumes the last of them.

    It ends with the first difference, since everything after it would differ too, or with an `fsck`.
    """
    store, point, before = folder / f"killed-{precision.value}", "", None
    ends = (*boundaries, boundaries[-1])
    expected = asyncio.run(undisturbed(model, precision, ends))
    for number, (start, end, after) in enumerate(zip((0, *ends), ends, expected, strict=False)):
        if number % TELL_EVERY == 0:
            tell(f"{precision.value}: {number} of {len(boundaries)} processes were killed")
        said = killed(model, store, precision, point, start, end)
        problem = said if isinstance(said, str) else difference(said, before, after)
        if isinstance(said, str) or problem is not None:
            where = f"{precision.value}, process {number + 1}, from boundary {start} to {end}"
            return Relay(len(boundaries), max(number - 1, 0), f"{where}: {problem}")
        point, before = str(said["point"]), after
    with Store.open(str(store)) as left:
        problems = fsck(left).problems
    return Relay(
        len(boundaries), len(boundaries), f"{precision.value}, fsck: {'; '.join(problems)}" if problems else None
    )


def difference(said: dict[str, Any], before: Seen | None, after: Seen) -> str | None:
    """How what a process said differs from what was to be seen `before` (None at the beginning) and `after`."""
    if before is not None and said["read_anew"]:
        return f"{said['read_anew']} tokens were read anew"
    for when, wanted in (("resumed", before), ("saved", after)):
        for what, value in ({} if wanted is None else asdict(wanted)).items():
            if said[when][what] != value:
                return f"other {what} where it {when}"
    return None


def killed(model: Path, store: Path, precision: Precision, point: str, start: int, end: int) -> dict[str, Any] | str:
    """What a process said before it was killed (without a point it begins), or a sentence on how it ended instead."""
    order = (str(model), str(store), precision.value, point, str(start), str(end))
    command = [sys.executable, "-m", __name__, *order]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIVE_UP_AFTER_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the process had not saved after {GIVE_UP_AFTER_S:g} s"
    if done.returncode != -signal.SIGKILL or not done.stdout:
        told = done.stderr.decode(errors="replace").strip().splitlines()
        return f"the process left with {done.returncode} and was not killed: {told[-1] if told else 'no word'}"
    said: dict[str, Any] = json.loads(done.stdout)
    return said


async def be_killed(model: str, store: str, precision: str, point: str, start: int, end: int) -> None:
    """Resume (or begin, without a point), go on, save, say what was seen, and die."""
    async with open_runtime(model, budget=BUDGET, store=store, precision=precision, threads=1) as rt:
        if point:
            session = await rt.resume(point)
        else:
            session = await rt.session()
            await session.append(PROMPT)
        resumed = asdict(await seen(session))
        read_anew = rt.counters.prefilled_tokens
        await go(session, start, end)
        saved = asdict(await seen(session))
        paused = await session.pause()
        said = {"resumed": resumed, "saved": saved, "read_anew": read_anew, "point": paused.id}
        os.write(sys.stdout.fileno(), json.dumps(said).encode())
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _, _model, _store, _precision, _point, _start, _end = sys.argv
    asyncio.run(be_killed(_model, _store, _precision, _point, int(_start), int(_end)))
