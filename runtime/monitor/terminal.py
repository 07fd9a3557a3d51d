"""Whether a terminal can show the monitor, and what happens when it goes away."""

import os
import select
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TextIO

TERMINAL_GONE = 129
"""The exit code of a process that a hang-up ended, as shells count: 128 + SIGHUP."""


INSTEAD = "serai monitor --once prints the figures instead"


def why_not(
    environ: Mapping[str, str], *, stdin: TextIO, stdout: TextIO, stderr: TextIO, hint: str = INSTEAD
) -> str | None:
    """One sentence on why no screen can be drawn here; None when it can. `hint` says what to do instead."""
    if not stdin.isatty():
        return f"the monitor needs a keyboard, and stdin is no terminal; {hint}"
    if not (stdout.isatty() and stderr.isatty()):
        return f"the monitor draws on the terminal, and stdout or stderr is none; {hint}"
    kind = environ.get("TERM", "")
    if kind in ("", "dumb", "unknown"):
        return f"the monitor can't draw on a terminal of TERM={kind or '(not set)'}; {hint}"
    return None


def leave() -> None:
    """End the process at once: there is nobody left to tell, and no terminal to put in order."""
    os._exit(TERMINAL_GONE)


def watch_for_hangup(fd: int | None = None, on_gone: Callable[[], None] = leave) -> threading.Thread:
    """Call `on_gone` when the terminal behind `fd` (stdin) has gone, from a thread that sleeps until then.

    A signal is no substitute: SIGHUP may be ignored, and without it reading a dead terminal returns at once for ever,
    while writing to it stops the thread that writes and with it, soon, the event loop.
    """
    watched = sys.stdin.fileno() if fd is None else fd

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, 0)  # hang-ups and errors are always reported
        poll.poll()
        on_gone()

    thread = threading.Thread(target=wait, name="serai-hangup", daemon=True)
    thread.start()
    return thread
