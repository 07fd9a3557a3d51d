"""The default budget, from fake files of the kernel."""

from pathlib import Path

import pytest

from serai.runtime.errors import BadParameter
from serai.runtime.memory.limits import LEAST_RESERVE_BYTES, default_budget, over_room

GIB = 2**30


def machine(root: Path, *, available: int = 56 * GIB, groups: str | None = "0::/\n") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {available // 1024} kB\n"
    )
    if groups is not None:
        (root / "proc/self/cgroup").write_text(groups)
    return root


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_limits_what_is_available_counts_not_what_is_installed(tmp_path: Path) -> None:
    found = default_budget(machine(tmp_path, available=10 * GIB))
    assert found.bound.name == "MemAvailable in /proc/meminfo"
    assert found.bound.free_bytes == 10 * GIB
    assert found.reserve_bytes == 10 * GIB // 8
    assert found.budget_bytes == 10 * GIB - found.reserve_bytes


def test_an_ancestors_limit_counts_with_what_is_used_under_it(tmp_path: Path) -> None:
    """B115."""
    root = machine(tmp_path, available=10 * GIB, groups="0::/pod/leaf\n")
    group(root, "pod/leaf", memory__max="max", memory__current=GIB)
    group(root, "pod", memory__max=8 * GIB, memory__current=5 * GIB)
    found = default_budget(root)
    assert found.bound.name == "memory.max of the control group /pod"
    assert found.bound.free_bytes == 3 * GIB
    assert found.budget_bytes == 3 * GIB - found.reserve_bytes < 3 * GIB
    assert [room.free_bytes for room in found.rooms] == [10 * GIB, 3 * GIB]
    assert over_room(3 * GIB, found) is None
    assert over_room(4 * GIB, found) == (
        "a budget of 4,294,967,296 bytes is more than the 3,221,225,472 that memory.max of the control group /pod "
        "leaves free; the kernel may stop the process"
    )


@pytest.mark.parametrize(
    ("groups", "path", "name"),
    [
        ("0::/\n", "", "/"),
        ("0::/a/b/c\n", "a", "/a"),
        ("0::/a/b/c\n", "a/b/c", "/a/b/c"),
        ("0::/../outside\n", "", "/"),
        ("5:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n", "memory/docker/1", "/docker/1"),
        ("4:hugetlb,memory:/host/path/1\n", "memory", "/"),
    ],
    ids=["v2 container", "v2 nested", "v2 leaf", "v2 outside", "v1", "v1 container"],
)
def test_a_containers_limit_wins_over_the_hosts_memory(tmp_path: Path, groups: str, path: str, name: str) -> None:
    """B116."""
    root = machine(tmp_path, groups=groups)
    if path.startswith("memory"):
        group(root, path, memory__limit_in_bytes=GIB // 2, memory__usage_in_bytes=GIB // 16)
    else:
        group(root, path, memory__max=GIB // 2, memory__current=GIB // 16)
    found = default_budget(root)
    assert found.bound.free_bytes == GIB // 2 - GIB // 16
    assert found.bound.name.endswith(f"of the control group {name}")


def test_no_limit_and_unreadable_files_set_no_bound(tmp_path: Path) -> None:
    """B116: unlimited (both versions' spellings), and a file that can't be read."""
    root = machine(tmp_path, groups="0::/a/b\n3:memory:/c\n")
    group(root, "a/b", memory__max="max")
    group(root, "memory/c", memory__limit_in_bytes=9_223_372_036_854_771_712)
    (root / "sys/fs/cgroup/a/memory.max").mkdir()
    group(root, "", memory__max=GIB)
    found = default_budget(root)
    assert [room.name for room in found.rooms] == [
        "MemAvailable in /proc/meminfo",
        "memory.max of the control group /",
    ]
    assert found.bound.free_bytes == GIB, "usage that can't be read counts as none"


def test_cached_file_pages_are_room(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group(
        root,
        "",
        memory__max=8 * GIB,
        memory__current=7 * GIB,
        memory__stat=f"anon {2 * GIB}\ninactive_file {4 * GIB}\nactive_file 1",
    )
    assert default_budget(root).bound.free_bytes == 5 * GIB


def test_a_group_already_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path)
    group(root, "", memory__max=GIB, memory__current=2 * GIB)
    found = default_budget(root)
    assert (found.budget_bytes, found.reserve_bytes, found.bound.free_bytes) == (0, 0, 0)


def test_little_room_keeps_the_least_reserve(tmp_path: Path) -> None:
    found = default_budget(machine(tmp_path, available=512 << 20))
    assert found.reserve_bytes == LEAST_RESERVE_BYTES
    assert found.budget_bytes == (512 << 20) - LEAST_RESERVE_BYTES


def test_when_nothing_can_be_read_a_budget_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="budget must be given"):
        default_budget(tmp_path)


def test_this_machine_has_a_budget() -> None:
    assert default_budget().budget_bytes > 0
