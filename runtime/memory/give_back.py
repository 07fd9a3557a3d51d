"""Memory that was freed goes back to the operating system, so that what the process holds is what the budget says.

Moving a state out or in takes buffers of its size for a moment, on whichever thread does it. The C library keeps what
is freed for later, an arena for each thread: over a day of many sessions that came to as much as the budget again.
"""

import ctypes
from threading import Lock

EVERY_BYTES = 8 << 20
"""How much is moved between two times of giving back: each walks all arenas, a few milliseconds."""


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
