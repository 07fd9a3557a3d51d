"""How long a thread that computes in Python keeps the interpreter's lock from one that wants it.

Python lets it keep the lock for 5 ms, whatever waits. An event loop that is due then runs as late as that, once for
each such thread: what the engine, and whoever packs a snapshot, does between two calls that release the lock.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

SWITCH_S = 0.0005
"""Short beside the 3 ms that a loop may be late. A switch costs some microseconds."""

_guard = Lock()
_usual_s: list[float] = []
"""Python's own setting, once for each block that is entered."""


@contextmanager
def shared_fairly() -> Iterator[None]:
    """Within, and for the whole process, the lock changes hands after `SWITCH_S` at the latest."""
    with _guard:
        _usual_s.append(_usual_s[0] if _usual_s else sys.getswitchinterval())
        sys.setswitchinterval(min(SWITCH_S, _usual_s[0]))
    try:
        yield
    finally:
        with _guard:
            usual_s = _usual_s.pop()
            if not _usual_s:
                sys.setswitchinterval(usual_s)
