"""A run of neighbouring tasks that a thread owns and others may take from, so that all end together.

A run is one word, the number after its last task above that of its next one; taking is one atomic add. Its owner takes
from the front, everyone else from the far end.
"""

from typing import Any

from serai.kernels.atomic import atomic_add, atomic_load, atomic_store
from serai.kernels.compile import inline

_NEXT = 0xFFFFFFFF
_ONE_OFF_THE_END = -(1 << 32)


@inline
def deal(run: int, begin: int, end: int) -> None:
    """Make the tasks from ``begin`` to before ``end`` a run, which `take` takes from; ``run`` is the address of a word
    that no other thread's word shares a line with."""
    atomic_store(run, (end << 32) | begin)


@inline
def take(run: int, is_own: bool) -> Any:
    """A task of a run, the next of one's own or the last of another's; -1 if there is none."""
    word = atomic_load(run)
    if (word & _NEXT) >= (word >> 32):
        return -1
    # Who comes too late for the last one moves an empty run's ends further past each other: another thread by one,
    # once, the owner by as many as it asked for.
    if is_own:
        word = atomic_add(run, 1)
        task = word & _NEXT
        return task if task < (word >> 32) else -1
    word = atomic_add(run, _ONE_OFF_THE_END)
    task = (word >> 32) - 1
    return task if task >= (word & _NEXT) else -1


@inline
def take_some(run: int, most: int) -> Any:
    """The next tasks of one's own run, ``most`` at most: from and to before; none if they are equal. A run has one
    owner, who asks again once at most after the last, or its begin could grow past half a word."""
    word = atomic_load(run)
    if (word & _NEXT) >= (word >> 32):
        return 0, 0
    word = atomic_add(run, most)
    first = word & _NEXT
    return first, max(first, min(first + most, word >> 32))
