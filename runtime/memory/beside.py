"""What is in memory beside the model and the states: of the process, and of each session, hot or cold."""

PROCESS_BYTES = 8 << 20
"""Threads' stacks, the store's index, buffers of the files that are read and written at the moment, and what the
allocator keeps: 7 MB beside a day of hundreds of small sessions, half of it while states are moved."""

SESSION_BYTES = 16 << 10
"""Its timeline, its record of some ten nodes and its locks, as Python objects: 15 KB by tracemalloc. Of hundreds of
sessions that wait it is a good part of what a small budget has."""


def ids_bytes(tokens: int) -> int:
    """What token ids take: int32, in blocks of 4 KiB as the system gives them, rounded to the nearest."""
    return (4 * tokens + 2_048) // 4_096 * 4_096


def beside_bytes(tokens: int) -> int:
    """What a session of so many tokens takes."""
    return SESSION_BYTES + ids_bytes(tokens)
