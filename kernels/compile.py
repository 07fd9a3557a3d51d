"""Compiled functions: declared by signature, compiled or loaded on demand, cached under a key that knows all of it.

``@kernel("void(f32[:, ::1], i64)")`` declares an entry point callable from Python; nothing is compiled at import.
:func:`warm` compiles or loads everything; a kernel called before that compiles itself. ``@inline`` declares a function
that is folded into the kernels that call it.

The cache is ``$SERAI_CACHE``, ``$XDG_CACHE_HOME/serai`` or ``~/.cache/serai``, then ``kernels/<key>``. The key hashes
every file of this folder (numba would not notice an edit to a helper in another file), the numba, llvmlite and Python
versions, the CPU and its features, and the SIMD path. So a cache made by other code or another CPU type is never met.
"""

import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import llvmlite
import numba
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from serai.kernels import cpu

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# No fastmath: a reduction's order is promised and a NaN guard must stay. numpy's error model: a division by zero gives
# inf or NaN instead of raising. No reference counting: kernels allocate nothing and keep nothing.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, "_nrt": False}

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
    jitted: Callable[P, R] = numba.njit(forceinline=True, **_OPTIONS)(function)
    return jitted


class Kernel(Generic[P, R]):
    """An entry point with one signature. Arrays of another dtype or layout are refused with TypeError."""

    def __init__(self, function: Callable[P, R], declaration: str) -> None:
        self.name = function.__name__
        self.function = function
        self.__doc__ = function.__doc__
        self._declaration = declaration
        self._dispatcher: Any = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._dispatcher is None:
            self.prepare()
        result: R = self._dispatcher(*args, **kwargs)
        return result

    def __repr__(self) -> str:
        return f"<kernel {self.name} {'ready' if self.is_ready else 'not compiled'}>"

    @property
    def is_ready(self) -> bool:
        return self._dispatcher is not None

    def prepare(self) -> bool:
        """Compile, or load from the cache. True if it was compiled."""
        with _lock:
            if self._dispatcher is not None:
                return False
            _restrict_once()
            dispatcher = numba.njit(**_OPTIONS)(self.function)
            cache = _cache_for(self.function)
            if cache is not None:
                dispatcher._cache = cache
            dispatcher.compile(_parse(self._declaration))
            dispatcher.disable_compile()
            compiled = cache is None or not cache.was_hit
            _counters[compiled] += 1
            self._dispatcher = dispatcher
            return compiled


_registry: list[Kernel[Any, Any]] = []
_counters = {True: 0, False: 0}
_lock = threading.RLock()


def kernel(declaration: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Declare an entry point by its signature in numba's language with short names: ``"void(f32[:, ::1], i64)"``."""

    def register(function: Callable[P, R]) -> Kernel[P, R]:
        entry = Kernel(function, declaration)
        _registry.append(entry)
        return entry

    return register


def kernels() -> tuple[Kernel[Any, Any], ...]:
    """Every kernel declared so far, in order of declaration."""
    return tuple(_registry)


def compilations() -> int:
    """How many kernels this process has compiled (not loaded). Does not move after :func:`warm`."""
    return _counters[True]


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


# Key and cache -----------------------------------------------------------------------------


@functools.cache
def _build_key() -> str:
    """Hash of everything that decides the bits: the code of this folder, the compilers' versions and the SIMD path."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = (numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine())
    digest.update(repr((versions, cpu.chosen_path().value)).encode())
    return digest.hexdigest()


def build_id() -> str:
    """Short name of what decides a row's bits besides model and tokens: kernel code, compilers and SIMD path."""
    return f"{_build_key()[:12]}-{cpu.chosen_path().value}"


@functools.cache
def cache_key() -> str:
    """Name of this process's folder of compiled code: the build plus the CPU's name and features."""
    text = repr((_build_key(), cpu.cpu_name(), cpu.compiled_features()))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _cache_root() -> Path:
    if named := os.environ.get("SERAI_CACHE"):
        return Path(named)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "serai"
    return Path.home() / ".cache" / "serai"


@functools.cache
def cache_folder() -> Path:
    """Where compiled code is kept. A folder that cannot be written is replaced by a temporary one, with a warning."""
    try:
        folder = _cache_root() / "kernels" / cache_key()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:
        temporary = Path(tempfile.mkdtemp(prefix="serai-kernels-"))
        log.warning("Compiled kernels cannot be kept (%s); this process uses %s.", error, temporary)
        return temporary


class _Locator(_CacheLocator):  # type: ignore[misc]
    """Tells numba's cache where to write and that the folder's name already says how fresh the code is."""

    def __init__(self, function: Any) -> None:
        self._py_file = function.__code__.co_filename
        self._lineno = function.__code__.co_firstlineno

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return cache_key()

    def get_disambiguator(self) -> str:
        return str(self._lineno)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator":
        return cls(py_func)


class _CacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's function cache in our folder. A damaged or unreadable file counts as absent."""

    _impl_class = _CacheImpl

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.was_hit = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            loaded = super().load_overload(sig, target_context)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            log.warning("Cached code of %s is unreadable (%s); compiling it again.", self._name, error)
            loaded = None
        self.was_hit = loaded is not None
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("Compiled code of %s cannot be kept: %s.", self._name, error)


def _cache_for(function: Any) -> _Cache:
    return _Cache(function)


@functools.cache
def _restrict_once() -> None:
    cpu.restrict_code_generator()
    log.info("SIMD path %s, compiled kernels in %s", cpu.chosen_path().value, cache_folder())


def _parse(declaration: str) -> Any:
    names = {name: getattr(types, name) for name in types.__all__} | _SHORT_NAMES
    return eval(declaration, {"__builtins__": {}}, names)
