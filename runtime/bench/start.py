"""`serai bench start`: from the start of a process to its first token, with and without compiled kernels at hand.

The process is `serai run` on the tiny model, as a person would start it. Its first token is forced (by a bias) to be
one that is visible at once, so that the first byte on its stdout is the first token.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from serai.runtime.bench.report import BenchFailed, Claim, Report
from serai.runtime.bench.tiny import cached_tiny_model
from serai.runtime.text.tokenizer import Tokenizer

WARM_LIMIT_S = 3.0
WARM_RUNS = 5
QUICK_WARM_RUNS = 3
PROMPT = "In the morning each caravan goes on exactly as it came."
VISIBLE = "a"
GIVE_UP_AFTER_S = 1800.0


def bench_start(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure; `folder` keeps the tiny model. `tell` is called with what is being done."""
    model = cached_tiny_model(folder)
    with tempfile.TemporaryDirectory(prefix="serai-bench-start-") as scratch:
        tell("cold start: every kernel is compiled")
        cold_s = first_token_s(model, Path(scratch))
        warm_s = []
        for number in range(QUICK_WARM_RUNS if quick else WARM_RUNS):
            tell(f"warm start {number + 1}")
            warm_s.append(first_token_s(model, Path(scratch)))
    rows = [{"start": "cold", "seconds": cold_s}, *({"start": "warm", "seconds": seconds} for seconds in warm_s)]
    how = f"serai run on {model.name} in a fresh process, fast precision, to the first byte on its stdout"
    return Report(
        "start",
        (
            Claim.measured("cold_start_s", cold_s, "s", f"{how}; kernel cache empty, so everything is compiled"),
            Claim.below(
                "warm_start_s",
                statistics.median(warm_s),
                "s",
                WARM_LIMIT_S,
                f"{how}; kernels compiled before; median of {len(warm_s)} ({min(warm_s):.2f} to {max(warm_s):.2f})",
            ),
        ),
        tuple(rows),
    )


def first_token_s(model: Path, scratch: Path) -> float:
    """Seconds from starting a process to its first token; compiled kernels and the session's store are in `scratch`."""
    token = Tokenizer.load(model).encode(VISIBLE)[0]
    command = [
        *(sys.executable, "-m", "serai.runtime", "run", str(model), PROMPT),
        *("--max-tokens", "1", "--temperature", "0", "--logit-bias", f"{token}=100", "--ignore-eos"),
        *("--store", str(scratch / "sessions")),
    ]
    environment = os.environ | {"SERAI_CACHE": str(scratch / "cache")}
    with tempfile.TemporaryFile() as complaints:
        began_s = time.monotonic()
        with subprocess.Popen(
            command,
            env=environment,
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
        ) as process:
            if process.stdout is None:
                raise AssertionError("stdout was asked for")
            with _ended_after(process, GIVE_UP_AFTER_S):
                first = process.stdout.read(1)
                seconds = time.monotonic() - began_s
                process.stdout.read()
                code = process.wait()
        if code != 0 or first != VISIBLE.encode():
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip().splitlines()
            raise BenchFailed(f"the measured process left with exit code {code}: {said[-1] if said else 'no word'}")
    return seconds


@contextmanager
def _ended_after(process: "subprocess.Popen[bytes]", seconds: float) -> Iterator[None]:
    """End a process that hangs, so that the bench can't."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
