"""Threads that compress and hash rank behind those that only react, such as the event loop of whoever saves."""

import os
import sys
import threading
from contextlib import suppress

_BEHIND = 5  # in steps of niceness; the system takes 19 for anything above


def give_way() -> None:
    """Rank the calling thread behind the first thread of its process, where threads have ranks of their own (Linux)."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may refuse; then others run a little later
            usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual + _BEHIND)
