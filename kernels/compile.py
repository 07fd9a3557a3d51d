"""Compiled functions: declared by signature, compiled or loaded from the cache on demand.

``@kernel("void(f32[:, ::1], i64)")`` declares an entry point callable from Python; nothing is compiled at import.
:func:`warm` compiles or loads everything; a kernel called before that compiles itself. ``@inline`` declares a function
that is folded into the kernels that call it.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import numba
from numba import types

from serai.kernels import cpu
from serai.kernels.cache import KernelCache, cache_folder

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# No fastmath: a reduction's order is promised and a NaN guard must stay. numpy's error model: a division by zero gives
# inf or NaN instead of raising. No reference counting: kernels allocate nothing and keep nothing.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "no_cfunc_wrapper": True,
    "_nrt": False,
}

_SHORT_NAMES = {
    "f32": types.float32,
    "f64": types.float64,
    "i8": types.int8,
    "u8": types.uint8,
    "i16": types.int16,
    "u16": types.uint16,
    "i32": types.int32,
    "u32": types.uint32,
    "i64": types.int64,
    "u64": types.uint64,
    "b1": types.boolean,
    "void": types.void,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """One kernel became ready: ``done`` of ``total``, its ``name``, and whether it came from the cache."""

    done: int
    total: int
    name: str
    from_cache: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What :func:`warm` did: wall time, how many kernels were compiled and how many loaded from ``folder``."""

    seconds: float
    compiled: int
    from_cache: int
    folder: Path


def inline(function: Callable[P, R]) -> Callable[P, R]:
    """A function folded into its callers: usable inside kernels only."""
    jitted: Callable[P, R] = numba.njit(forceinline=True, no_cpython_wrapper=True, **_OPTIONS)(function)
    return jitted


def thin(function: Callable[P, R]) -> Callable[P, R]:
    """As :func:`inline`, for a few lines around a large body: folded before types are known.

    Every layer of :func:`inline` is compiled by itself and then again inside its caller, so layers around a large body
    multiply its compile time; these do not.
    """
    jitted: Callable[P, R] = numba.njit(inline="always", no_cpython_wrapper=True, **_OPTIONS)(function)
    return jitted


class Kernel(Generic[P, R]):
    """An entry point with one signature. Arrays of another dtype or layout are refused with TypeError."""

    def __init__(self, function: Callable[P, R], declaration: str, before: Callable[[], None] | None) -> None:
        self.name = function.__name__
        self.function = function
        self.__doc__ = function.__doc__
        self._declaration = declaration
        self._before = before
        self._dispatcher: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._dispatcher is None:
            self.prepare()
        watcher = _watchers.get(threading.get_ident()) if _watchers else None
        if watcher is not None and kwargs:
            raise TypeError(f"{self.name} is watched, and takes its arguments by position then")
        result: R = self._dispatcher(*args, **kwargs)
        if watcher is not None:
            watcher(self, args)
        return result

    def __repr__(self) -> str:
        return f"<kernel {self.name} {'ready' if self.is_ready else 'not compiled'}>"

    @property
    def is_ready(self) -> bool:
        return self._dispatcher is not None

    @property
    def compiled(self) -> Any:
        """numba's result of compiling."""
        self.prepare()
        (result,) = self._dispatcher.overloads.values()
        return result

    def prepare(self) -> bool:
        """Compile, or load from the cache. True if it was compiled."""
        if self._before is not None:
            self._before()
        with _lock:
            if self._dispatcher is not None:
                return False
            _restrict_once()
            dispatcher = numba.njit(**_OPTIONS)(self.function)
            dispatcher._cache = cache = KernelCache(self.function)
            dispatcher.compile(_parse(self._declaration))
            dispatcher.disable_compile()
            _counters[cache.was_hit] += 1
            self._dispatcher = dispatcher
            return not cache.was_hit


_registry: list[Kernel[Any, Any]] = []
_watchers: dict[int, Callable[[Kernel[Any, Any], tuple[Any, ...]], None]] = {}
"""By the thread that they watch."""
_counters = {True: 0, False: 0}
_lock = threading.RLock()


def kernel(declaration: str, before: Callable[[], None] | None = None) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Declare an entry point by its signature in numba's language with short names: ``"void(f32[:, ::1], i64)"``.

    ``before`` runs once, when the kernel is about to be compiled or loaded.
    """

    def register(function: Callable[P, R]) -> Kernel[P, R]:
        entry = Kernel(function, declaration, before)
        _registry.append(entry)
        return entry

    return register


@contextlib.contextmanager
def watching(watcher: Callable[[Kernel[Any, Any], tuple[Any, ...]], None]) -> Iterator[None]:
    """Tell `watcher` of every kernel that this thread calls, with its positional arguments, once it is done."""
    thread = threading.get_ident()
    before = _watchers.get(thread)
    _watchers[thread] = watcher
    try:
        yield
    finally:
        if before is None:
            del _watchers[thread]
        else:
            _watchers[thread] = before


def kernels() -> tuple[Kernel[Any, Any], ...]:
    """Every kernel declared so far, in order of declaration."""
    return tuple(_registry)


def compilations() -> int:
    """How many kernels this process has compiled (not loaded). Does not move after :func:`warm`."""
    return _counters[False]


def warm(progress: Callable[[Progress], None] | None = None) -> WarmReport:
    """Make every declared kernel ready, telling ``progress`` after each one."""
    start = time.perf_counter()
    entries = kernels()
    compiled = 0
    for number, entry in enumerate(entries, 1):
        began = time.perf_counter()
        was_compiled = entry.prepare()
        compiled += was_compiled
        if progress is not None:
            seconds = time.perf_counter() - began
            progress(Progress(number, len(entries), entry.name, not was_compiled, seconds))
    return WarmReport(time.perf_counter() - start, compiled, len(entries) - compiled, cache_folder())


@functools.cache
def _restrict_once() -> None:
    cpu.restrict_code_generator()
    log.info("SIMD path %s, compiled kernels in %s", cpu.chosen_path().value, cache_folder())


def _parse(declaration: str) -> Any:
    names = vars(types) | _SHORT_NAMES
    return eval(declaration, {"__builtins__": {}}, names)
