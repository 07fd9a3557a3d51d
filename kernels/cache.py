"""Where compiled code is kept, and under which key.

The cache is ``$SERAI_CACHE``, ``$XDG_CACHE_HOME/serai`` or ``~/.cache/serai``, then ``kernels/<key>``. The key hashes
every file of this folder (numba would not notice an edit to a helper in another file), the numba, llvmlite and Python
versions, the CPU and its features, and the SIMD path. So a cache made by other code or another CPU type is never met.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from serai.kernels import cpu

log = logging.getLogger(__name__)


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


class KernelCache(FunctionCache):  # type: ignore[misc]
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
            with contextlib.suppress(OSError):  # a folder that refuses this will refuse the new code too, and say so
                self.flush()
        self.was_hit = loaded is not None
        return loaded

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("Compiled code of %s cannot be kept: %s.", self._name, error)
