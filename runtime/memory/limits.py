"""How much memory there is to take: what the kernel says is available, under every control group above us.

A process may be limited by its own control group or by any ancestor's, and an ancestor's limit is shared with
whoever else is in it. So each limit counts with what is already used under it, and the smallest room wins.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from serai.runtime.errors import BadParameter

RESERVE_FRACTION = 8
LEAST_RESERVE_BYTES = 128 << 20
"""Kept out of the default budget: the interpreter with its compiled kernels, the tokenizer, buffers of the kernel;
an eighth of what is there, and at least the 128 MiB that a process with numba in it takes before any model."""

_UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 write an absurdly large number for "no limit"."""


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """One bound: `free_bytes` may still be taken under it. `name` says which bound it is."""

    name: str
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DefaultBudget:
    """The budget chosen when none is given: the tightest `bound`, less the reserve."""

    budget_bytes: int
    reserve_bytes: int
    bound: MemoryRoom
    rooms: tuple[MemoryRoom, ...]


def default_budget(root: Path = Path("/")) -> DefaultBudget:
    """The byte budget this machine and its control groups leave room for.

    Reads `/proc` and `/sys/fs/cgroup` under `root`; what isn't there or can't be read sets no bound. Raises
    `BadParameter` when nothing can be read at all.
    """
    rooms = tuple(_rooms(root))
    if not rooms:
        raise BadParameter(
            "budget must be given: neither /proc/meminfo nor a control group tells how much memory is available"
        )
    bound = min(rooms, key=lambda room: room.free_bytes)
    reserve = min(bound.free_bytes, max(bound.free_bytes // RESERVE_FRACTION, LEAST_RESERVE_BYTES))
    return DefaultBudget(bound.free_bytes - reserve, reserve, bound, rooms)


def over_room(budget_bytes: int, found: DefaultBudget) -> str | None:
    """A warning for a budget that was asked for but exceeds what is free, or None when it fits."""
    if budget_bytes <= found.bound.free_bytes:
        return None
    return (
        f"a budget of {budget_bytes:,} bytes is more than the {found.bound.free_bytes:,} that "
        f"{found.bound.name} leaves free; the kernel may stop the process"
    )


def _rooms(root: Path) -> Iterator[MemoryRoom]:
    available = _meminfo_bytes(root, "MemAvailable")
    if available is not None:
        yield MemoryRoom("MemAvailable in /proc/meminfo", available)
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            yield from _group_rooms(root, "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _group_rooms(
                root,
                "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )


def _group_rooms(
    root: Path, mount: str, path: str, limit_file: str, usage_file: str, cache_key: str
) -> Iterator[MemoryRoom]:
    """The room under a group's limit and under each ancestor's, up to the mount (a container sees only that)."""
    group = PurePosixPath("/", path)
    if ".." in group.parts:  # the group lies outside this namespace; only the mount itself can be read
        group = PurePosixPath("/")
    for ancestor in (group, *group.parents):
        folder = root / mount / ancestor.relative_to("/")
        limit = _number(folder / limit_file)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        # Cached file pages count as used but are given back on demand, and reading a model leaves many.
        used = (_number(folder / usage_file) or 0) - _stat_bytes(folder / "memory.stat", cache_key)
        yield MemoryRoom(f"{limit_file} of the control group {ancestor}", max(0, limit - max(0, used)))


def _meminfo_bytes(root: Path, key: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        words = rest.split()
        if name == key and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


def _stat_bytes(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number a one-line file holds; None for "max", and for a file that is missing or unreadable."""
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
