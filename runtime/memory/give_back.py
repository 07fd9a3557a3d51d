"""Memory that was freed goes back to the operating system, so that what the process holds is what the budget says.

Moving a state out or in takes buffers of its size for a moment, on whichever thread does it. The C library keeps what
is freed for later, an arena for each thread: over a day of many sessions that came to as much as the budget again.
"""

import ctypes
import sys
from threading import Lock

EVERY_BYTES = 8 << 20
"""How much is moved between two times of giving back: each walks all arenas, a few milliseconds."""

LARGE_BYTES = 128 << 10
"""Buffers from that size on are taken from the system by themselves, and go back to it when they are freed. So the C
library does at first; once such a buffer was freed it takes all up to that size, of 32 MB at most, from its arenas."""

ARENAS = 4
"""Of as many as eight a core, each of which keeps some of what its threads have freed."""

KEPT_BYTES = 512 << 10
"""What an arena keeps at its end. To set one of these limits ends the library's adapting both: with its first 128 KiB,
an array that comes and goes with each step could ask the system for memory each time."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # from glibc's malloc.h


def keep_little() -> None:
    """Have the allocator keep little of what is freed, for the rest of the process. Does nothing where the C library
    can't be asked."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, LARGE_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)
        set_option(_M_ARENA_MAX, ARENAS)


def give_back_freed() -> None:
    """Have the allocator return what is free. Does nothing where the C library can't be asked."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GiveBack:
    """Counts what is moved; call `moved` on the thread that did it, which never is the event loop's."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._moved_bytes = 0

    def moved(self, size: int) -> None:
        """So many bytes were moved just now."""
        with self._lock:
            self._moved_bytes += size
            due = self._moved_bytes >= EVERY_BYTES
            if due:
                self._moved_bytes = 0
        if due:
            give_back_freed()
