"""A server in a process of its own, started as a person would start it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.shared import ROOT

START_S = 400.0
"""Kernels that have changed are compiled at the first start, and on a busy machine that takes minutes."""


@contextmanager
def scripted(store: Path, *arguments: str) -> Iterator[str]:
    """The base URL of a server whose model says what the clients of `examples` expect."""
    command = [sys.executable, "-m", "tests.runtime.server.scripted_server", str(store), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(START_S, process.kill)
        patience.start()
        try:
            yield _address(process, [])
        finally:
            patience.cancel()
            process.terminate()
            process.wait(timeout=30)


@contextmanager
def started(*arguments: object, cwd: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Its base URL and the process, which is ended with the block if it still runs."""
    command = [sys.executable, "-m", "serai.runtime", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(START_S, process.kill)
        patience.start()
        said: list[str] = []
        try:
            yield _address(process, said), process
        finally:
            patience.cancel()
            if process.poll() is None:
                process.terminate()
                try:
                    process.communicate(timeout=20)
                except subprocess.TimeoutExpired:
                    process.kill()


def _address(process: "subprocess.Popen[str]", said: list[str]) -> str:
    if process.stderr is None:
        raise AssertionError("stderr was asked for")
    for line in process.stderr:
        said.append(line)
        if line.startswith("serving "):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
            return line.rsplit(" ", 1)[1].strip()
    raise AssertionError(f"the server did not start: {''.join(said)}")
