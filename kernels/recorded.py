"""Kernel calls taken down once and made again from compiled code: no Python between them.

A step of one token calls some hundred kernels, each of which takes microseconds from Python, tens of them once the
weights that pass through the caches have driven Python's own data out. A step of as many rows makes the same calls on
the same memory, so they are made through Python once:

    calls, given = record(work, inputs)       # runs work(), and notes every kernel that it calls
    calls.again(places(others))               # the same calls, on other inputs

A call is noted as a row of words, what its arguments are made of (an array's are its address, sizes and strides), and
a launcher, a small function that hands them to the kernel's compiled code. Between recording and repeating an array
stays where it is; `inputs` are those that may lie elsewhere each time, and may be longer or shorter.

What is not a kernel isn't repeated, and checks outside of kernels aren't either: of shapes they hold as before, and
what depends on contents a kernel must check itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numpy.typing import NDArray

from serai.kernels.compile import Kernel, kernel, watching
from serai.kernels.vec import define, pointer_value

R = TypeVar("R")

_WORD = ir.IntType(64)
_WORD_BYTES = 8

Input = NDArray[np.int64]
"""A one-dimensional, contiguous array of whole numbers."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Kernel calls in their order; made by `record`."""

    names: tuple[str, ...]
    words: NDArray[np.int64]
    """What all calls are given, one after the other."""
    launches: NDArray[np.int64]
    """A launcher and the address of its words, for each call."""
    moving: NDArray[np.int64]
    """A word and the number of the place that belongs there, for whatever depends on inputs."""
    arrays: tuple[NDArray[Any], ...]
    """Held, since they are known by their addresses only."""

    @property
    def nbytes(self) -> int:
        """Of what was noted; the arrays are somebody else's."""
        return self.words.nbytes + self.launches.nbytes + self.moving.nbytes

    def again(self, places: Input) -> None:
        """Make all calls again, with inputs that are now at `places`.

        Raises RuntimeError when a kernel does; it has refused its arguments then, and those after it weren't called.
        """
        failed = _again(self.words, self.moving, places, self.launches)
        if failed >= 0:
            raise RuntimeError(f"{self.names[failed]} refuses what it took when it was recorded.")


def places(inputs: Sequence[Input]) -> Input:
    """Where inputs lie and how long they are, for `Calls.again`: in the order in which `record` had them."""
    return np.array([number for one in inputs for number in (one.ctypes.data, one.size)], np.int64)


def record(work: Callable[[], R], inputs: Sequence[Input] = ()) -> tuple[Calls, R]:
    """Run `work`, and note the kernels that it calls in this thread; see the module. Gives what `work` does, too."""
    notes = _Notes(inputs)
    with watching(notes.add):
        given = work()
    return notes.calls(), given


class _Notes:
    """Calls while they are being noted."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = tuple(inputs)
        self._spans = [(one.ctypes.data, one.nbytes) for one in inputs]
        self._called: list[Kernel[Any, Any]] = []
        self._starts: list[int] = []
        self._words: list[int] = []
        self._moving: list[int] = []
        self._arrays: list[NDArray[Any]] = []

    def add(self, called: Kernel[Any, Any], args: tuple[Any, ...]) -> None:
        """Note a call that has just been made."""
        self._called.append(called)
        self._starts.append(len(self._words))
        for kind, value in zip(called.compiled.signature.args, args, strict=True):
            self._add_argument(kind, value)

    def _add_argument(self, kind: Any, value: Any) -> None:
        if isinstance(kind, types.Array):
            self._add_array(value)
        elif isinstance(kind, types.BaseTuple):
            for part_kind, part in zip(kind, value, strict=True):
                self._add_argument(part_kind, part)
        elif isinstance(kind, types.Float):
            dtype, bits = (np.float32, np.uint32) if kind.bitwidth == 32 else (np.float64, np.int64)
            self._words.append(int(dtype(value).view(bits)))
        elif isinstance(kind, types.Boolean):
            self._words.append(bool(value))
        elif isinstance(kind, types.Integer):
            self._words.append(int(value))
        else:
            raise TypeError(f"calls with arguments of type {kind} can't be recorded")

    def _add_array(self, array: NDArray[Any]) -> None:
        """numba's parts of an array: two owners (none), size, bytes of an item, address, shape, strides.

        Raises ValueError for a part of an input, which would stay where that was.
        """
        at = len(self._words)
        self._words += [0, 0, array.size, array.itemsize, array.ctypes.data, *array.shape, *array.strides]
        number = next((number for number, one in enumerate(self._inputs) if one is array), None)
        if number is None:
            if any(start <= array.ctypes.data < start + nbytes for start, nbytes in self._spans):
                raise ValueError("an input goes into a kernel whole, or what is recorded would not follow it")
            self._arrays.append(array)
        else:
            address, size = 2 * number, 2 * number + 1
            self._moving += [at + 4, address, at + 2, size, at + 5, size]

    def calls(self) -> Calls:
        """What was noted."""
        words, starts, moving = (np.array(one, np.int64) for one in (self._words, self._starts, self._moving))
        addresses = words.ctypes.data + _WORD_BYTES * starts
        launches = np.stack([np.array(launchers(self._called), np.int64), addresses], axis=1).reshape(-1)
        return Calls(tuple(one.name for one in self._called), words, launches, moving, tuple(self._arrays))


_launchers: dict[Kernel[Any, Any], int] = {}
_engines: list[Any] = []
"""They own the launchers' code."""


def launchers(called: Sequence[Kernel[Any, Any]]) -> list[int]:
    """Of each kernel the address of a function that takes the address of a call's words, makes the call, and gives the
    status, 0 if well."""
    missing = {one: one.compiled for one in called if one not in _launchers}
    if missing:
        # Held after what compiles kernels, which holds a lock of its own before it takes this one.
        with global_compiler_lock:
            _build_launchers({one: compiled for one, compiled in missing.items() if one not in _launchers})
    return [_launchers[one] for one in called]


def _build_launchers(called: Mapping[Kernel[Any, Any], Any]) -> None:
    """Compile launchers, together since that takes less time; hardly optimised, since they do next to nothing."""
    module = ir.Module()
    module.triple = llvm.get_process_triple()
    names = {one: f"serai_launch_{number}_{one.name}" for number, one in enumerate(called, len(_launchers))}
    for one, name in names.items():
        _add_launcher(module, name, called[one])
    target = llvm.Target.from_triple(module.triple).create_target_machine(opt=0)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), target)
    engine.finalize_object()
    _engines.append(engine)
    for one, name in names.items():
        _launchers[one] = engine.get_function_address(name)


def _add_launcher(module: Any, name: str, compiled: Any) -> None:
    described = compiled.fndesc
    # numba's own convention: room for the result and for a reason to fail, then the parts of all arguments.
    kind = compiled.target_context.call_conv.get_function_type(described.restype, described.argtypes)
    function = ir.Function(module, ir.FunctionType(_WORD, [_WORD]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    room = [builder.alloca(one.pointee) for one in kind.args[:2]]
    parts = [_part(builder, function.args[0], number, one) for number, one in enumerate(kind.args[2:])]
    address = ir.Constant(_WORD, compiled.library.get_pointer_to_function(described.llvm_func_name))
    status = builder.call(builder.inttoptr(address, kind.as_pointer()), [*room, *parts])
    builder.ret(builder.zext(status, _WORD))


def _part(builder: Any, words: Any, number: int, kind: Any) -> Any:
    """The word of that number as a part of an argument."""
    at = builder.add(words, ir.Constant(_WORD, _WORD_BYTES * number))
    if not isinstance(kind, ir.IntType | ir.PointerType):
        return builder.load(pointer_value(builder, at, kind), typ=kind)
    word = builder.load(pointer_value(builder, at, _WORD), typ=_WORD)
    if isinstance(kind, ir.PointerType):
        return builder.inttoptr(word, kind)
    return word if kind.width == _WORD.width else builder.trunc(word, kind)


@define
def _launch(typingctx: Any, function: Any, words: Any) -> Any:
    """Call a launcher by its address."""
    if not isinstance(function, types.Integer) or not isinstance(words, types.Integer):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.int64(types.int64, types.int64), codegen


@kernel("i64(i64[::1], i64[::1], i64[::1], i64[::1])")
def _again(words: Input, moving: Input, places: Input, launches: Input) -> int:
    """`Calls.again`; gives the number of the call that failed, -1 if none did."""
    for i in range(0, moving.size, 2):
        words[moving[i]] = places[moving[i + 1]]
    for i in range(0, launches.size, 2):
        if _launch(launches[i], launches[i + 1]) != 0:
            return i // 2
    return -1
