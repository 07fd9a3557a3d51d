"""Which instructions the kernels use. One place decides; ``SERAI_SIMD=`` forces a choice.

The choice is read once, before anything is compiled, and is part of the key of the compiled-code cache.
"""

import ctypes
import functools
import os
import platform
from enum import Enum

import llvmlite.binding as llvm
import numba


class SimdPath(Enum):
    """The instruction families a kernel is compiled for. All give the same bits; they differ in speed."""

    AVX512_AMX = "avx512-amx"
    AVX512_VNNI = "avx512-vnni"
    AVX2_VNNI = "avx2-vnni"
    AVX2 = "avx2"
    PLAIN = "plain"

    @property
    def is_avx512(self) -> bool:
        """Whether a register holds sixteen floats."""
        return self in (SimdPath.AVX512_AMX, SimdPath.AVX512_VNNI)


_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "avx2", "fma")
_NEEDS: dict[SimdPath, tuple[str, ...]] = {
    SimdPath.AVX512_AMX: (*_AVX512, "amx-tile", "amx-int8"),
    SimdPath.AVX512_VNNI: _AVX512,
    SimdPath.AVX2_VNNI: ("avx2", "fma", "avxvnni"),
    SimdPath.AVX2: ("avx2", "fma"),
    SimdPath.PLAIN: (),
}
# Features a path must not use, by the start of their LLVM names, so that forcing a path on a larger CPU compiles what
# the smaller CPU would run.
_HIDES: dict[SimdPath, tuple[str, ...]] = {
    SimdPath.AVX512_AMX: (),
    SimdPath.AVX512_VNNI: ("amx",),
    SimdPath.AVX2_VNNI: ("avx512", "avx10", "evex512", "amx"),
    SimdPath.AVX2: ("avx512", "avx10", "evex512", "avxvnni", "amx"),
    SimdPath.PLAIN: ("avx512", "avx10", "evex512", "avxvnni", "amx"),
}


class SimdPathUnavailable(RuntimeError):
    """``SERAI_SIMD`` names no path, or one this CPU cannot run."""


@functools.cache
def features() -> dict[str, bool]:
    """The CPU's features by LLVM name; empty where LLVM cannot tell."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


# Linux gives a process the tile registers when it asks for them: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def _may_use_tiles() -> bool:
    """Ask the system for the tile registers, once a process and for all its threads; False where it refuses."""
    if platform.system() != "Linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


@functools.cache
def cpu_name() -> str:
    """LLVM's name of this CPU."""
    return str(llvm.get_host_cpu_name())


def available_paths() -> list[SimdPath]:
    """The paths this CPU can run, best first."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    runs = [path for path, needs in _NEEDS.items() if not needs or (is_x86 and all(features().get(n) for n in needs))]
    if SimdPath.AVX512_AMX in runs and not _may_use_tiles():
        runs.remove(SimdPath.AVX512_AMX)
    return runs


def resolve(requested: str, available: list[SimdPath]) -> SimdPath:
    """The path for a value of ``SERAI_SIMD`` ("" for the best). Raises SimdPathUnavailable."""
    if not requested:
        return available[0]
    names = ", ".join(path.value for path in available)
    if requested not in {path.value for path in SimdPath}:
        raise SimdPathUnavailable(f"SERAI_SIMD={requested!r} names no SIMD path; this CPU has {names}.")
    path = SimdPath(requested)
    if path not in available:
        lacking = (need for need in _NEEDS[path] if not features().get(need))
        missing = ", ".join(lacking) or "the system's leave"
        raise SimdPathUnavailable(f"SERAI_SIMD={requested!r} needs {missing}, which this CPU lacks; it has {names}.")
    return path


@functools.cache
def chosen_path() -> SimdPath:
    """The path of this process: ``SERAI_SIMD`` if set, else the best the CPU has."""
    return resolve(os.environ.get("SERAI_SIMD", ""), available_paths())


def compiled_features() -> str:
    """LLVM's feature string for the chosen path, e.g. ``+avx2,-avx512f,...``."""
    hidden = _HIDES[chosen_path()]
    kept = {name for name, on in features().items() if on and not name.startswith(hidden)}
    return ",".join(("+" if name in kept else "-") + name for name in sorted(features()))


def restrict_code_generator() -> None:
    """Hide the features the chosen path must not use from numba. Does nothing for the best path."""
    if _HIDES[chosen_path()]:
        numba.config.CPU_NAME = cpu_name()
        numba.config.CPU_FEATURES = compiled_features()
