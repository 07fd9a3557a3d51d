"""What a figure was measured on: the machine, the interpreter and the code that decides speed."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

from serai.kernels import cpu
from serai.kernels.cache import build_id
from serai.kernels.threads import threads


def machine() -> dict[str, object]:
    """Plain values for JSON; memory in bytes, None where the system doesn't tell."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": threads(),
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "simd": cpu.chosen_path().value,
        "simd_available": [path.value for path in cpu.available_paths()],
        "build": build_id(),
        "serai": version("serai"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or cpu.cpu_name()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
