"""Which threads get a core first: those that only react, such as an event loop's, before those that compute.

Threads that compute never sleep during a step, so whoever is due meanwhile waits for their turn on the core to end.
Linux shares cores out by rank (niceness) and, since 6.12, lets a thread ask for turns of its own length: one with short
turns is let in at once, and has as large a share of the core as before. Of timers that were due beside two computing
threads on two cores, one in a hundred ran more than 4.1 ms late with ranks alone, and 2.9 ms with short turns.
Elsewhere, and where a sandbox refuses, nothing happens, and timers run a little later.
"""

import contextlib
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Iterator
from typing import ClassVar

_RANKS_BEHIND = 5  # in steps of niceness; the system takes 19 for anything above
_SHORT_S = 0.0001  # the system allows 0.1 to 100 ms
_USUAL_S = 0.0  # whatever the system has for everybody
_NOT_INHERITED = 1  # threads that the caller starts have usual turns; who has said so once can't take it back
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of Linux's system call by machine; the C library has no function for it."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` as its first version has it; see sched_setattr(2)."""

    _fields_: ClassVar = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    ]


def give_way() -> None:
    """Rank the calling thread, which computes, behind the others of its process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            usual = os.getpriority(os.PRIO_PROCESS, os.getpid())  # the first thread's: others inherit their maker's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual + _RANKS_BEHIND)


@contextlib.contextmanager
def let_in_at_once() -> Iterator[None]:
    """Within the block the calling thread, which only reacts, needn't wait for the turns of others to end."""
    _within.blocks += 1
    _ask_for_turns(_SHORT_S)
    try:
        yield
    finally:
        _within.blocks -= 1
        if not _within.blocks:
            _ask_for_turns(_USUAL_S)


class _Within(threading.local):
    """How many such blocks the thread is in."""

    blocks = 0


_within = _Within()


def _ask_for_turns(seconds: float) -> None:
    """Of the calling thread; its rank stays, and so does a policy that somebody else has chosen for it."""
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    asked = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, _NOT_INHERITED, nice, 0, round(1e9 * seconds), 0, 0)
    # Whether it was allowed is nothing that anybody could act on.
    ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(asked), 0)
