"""`serai bench faults`: what a store loses when a disk call kills or fails it, what wrong bytes do, and whether
sessions that are saved and killed at a token boundary go on with the same bits (`killed.py`).

The two harnesses (`checkpoints/harness/faults.py` and `fuzzing.py`) run as processes of their own: the first forks,
which a process with threads must not.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from serai.runtime.bench.killed import EVERY_BOUNDARY, EVERY_KIND, Relay, relay
from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.small_model import small_model
from serai.runtime.models.open_model import Precision

FAULTS_LEAST = 2_000
FILES_LEAST = 20_000
QUICK_EVERY = 40
"""A quick run takes every 40th fault: each kind of work and each kind of fault still occurs."""
QUICK_FILES = 400
GIVE_UP_AFTER_S = 7200.0


def bench_faults(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Run both harnesses and both relays in temporary folders below `folder`, which also keeps a tiny model if one is
    needed."""
    every = QUICK_EVERY if quick else 1
    files = QUICK_FILES if quick else FILES_LEAST
    tell("faults at every disk call" if every == 1 else f"faults at disk calls, every {every}th case")
    faults = harness("faults", "--every", str(every), "--dir", str(folder))
    tell(f"{files:,} files with wrong bytes")
    fuzzed = harness("fuzzing", "--files", str(files), "--dir", str(folder))

    problems = [{"harness": "faults", "problem": one} for one in faults["problems"]]
    problems += [{"harness": "fuzzing", "problem": one} for one in fuzzed["escapes"]]
    relays = _relays(folder, EVERY_KIND if quick else EVERY_BOUNDARY, tell)
    problems += [{"harness": "killed", "problem": one.problem} for one in relays if one.problem is not None]
    how = "killed before, after or within a write, power cut, no space, input/output error, short write"
    lost = "afterwards a committed snapshot missing or other, fsck not clean, an orphan left, or the same work failing"
    escaped = "anything but a refusal by name or the right content"
    return Report(
        "faults",
        (
            _count("faults_injected", faults["faults_injected"], "cases", FAULTS_LEAST, quick, how),
            Claim.at_most("faults_lost", faults["faults_lost"], "cases", 0, lost),
            _count(
                "files_fuzzed", fuzzed["files_fuzzed"], "files", FILES_LEAST, quick, "parts, manifests, nodes, bundles"
            ),
            Claim.at_most("fuzz_escapes", fuzzed["fuzz_escapes"], "files", 0, escaped),
            Claim.at_least(
                "kills_survived",
                sum(one.survived for one in relays),
                "kills",
                sum(one.boundaries for one in relays),
                "saved, killed at a token boundary of 300 mixed tokens and resumed by another process, exact and fast: "
                f"same tokens, same logits, none read anew{'; quick' if quick else ''}",
            ),
        ),
        tuple(problems),
    )


def _relays(folder: Path, boundaries: Sequence[int], tell: Callable[[str], None]) -> list[Relay]:
    model, name = small_model(folder)
    tell(f"{2 * len(boundaries)} processes killed on {name}")
    with tempfile.TemporaryDirectory(prefix="serai-killed-", dir=folder) as scratch:
        return [relay(model, Path(scratch), precision, boundaries, tell=tell) for precision in Precision]


def harness(module: str, *arguments: str) -> Mapping[str, Any]:
    """The object a harness prints. It leaves with 1 when it found something, which is a result and not a failure."""
    command = [sys.executable, "-m", f"serai.checkpoints.harness.{module}", *arguments]
    # BLAS threads would be alive in the process that forks.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=GIVE_UP_AFTER_S, check=False)
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"the harness {module} had not ended after {GIVE_UP_AFTER_S:,.0f} s") from None
    if done.returncode not in (0, 1) or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchFailed(
            f"the harness {module} left with exit code {done.returncode}: {said[-1] if said else 'no word'}"
        )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def _count(name: str, value: int, unit: str, least: int, quick: bool, detail: str) -> Claim:
    """How much was tried; a quick run promises no number."""
    if quick:
        return Claim.measured(name, value, unit, f"{detail}; quick")
    return Claim.at_least(name, value, unit, least, detail)
