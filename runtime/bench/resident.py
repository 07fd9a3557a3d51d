"""What this process holds in memory, by the kernel's own count."""

from pathlib import Path

_PAGE_KIB = 1 << 10


def resident_bytes() -> int:
    """Bytes of memory that are in RAM now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was in RAM since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Begin to measure the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * _PAGE_KIB
    raise AssertionError(f"the kernel's status of a process has a field {field}")
