"""What threads ask of Linux: those that compute to rank five steps behind, for good; those that react for turns of
0.1 ms while they are in such a block, which threads they start don't have. What timers gain by it, benches measure."""

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable

import pytest

from serai.kernels import ranks

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SCHED_GETATTR,
    reason="only Linux has turns of a thread's own, and only these machines' call numbers are known",
)


def turn_ns() -> int:
    """How long a turn the calling thread asked for, in nanoseconds; what all have if it didn't."""
    found = ranks._Attributes()
    size = ctypes.c_uint32(ctypes.sizeof(found))
    number = ctypes.c_long(SCHED_GETATTR[platform.machine()])
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(found), size, 0) == 0
    return int(found.runtime_ns)


def in_a_thread(act: Callable[[], None]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def has_turns() -> bool:
    """Whether this system lets threads ask."""
    seen: list[int] = []

    def ask() -> None:
        usual = turn_ns()
        with ranks.let_in_at_once():
            seen.extend((usual, turn_ns()))

    in_a_thread(ask)
    return seen[0] != seen[1]


def test_who_reacts_has_short_turns_until_the_last_block_ends() -> None:
    if not has_turns():
        pytest.skip("this kernel has no turns of a thread's own; Linux 6.12 has")
    seen: list[int] = []

    def react() -> None:
        usual = turn_ns()
        with ranks.let_in_at_once():
            with ranks.let_in_at_once():
                seen.append(turn_ns())
            seen.append(turn_ns())
            in_a_thread(lambda: seen.append(turn_ns()))
        seen.extend((turn_ns(), usual))

    in_a_thread(react)
    inner, outer, child, after, usual = seen
    assert inner == outer == 100_000
    assert child == after == usual != 100_000, "threads that it starts have usual turns"


def test_who_computes_ranks_behind() -> None:
    seen: list[int] = []

    def compute() -> None:
        ranks.give_way()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    usual = os.getpriority(os.PRIO_PROCESS, os.getpid())
    in_a_thread(compute)
    assert seen == [min(usual + 5, 19)]
