"""What the thread pool needs from below numba: atomic words, a pause, calls by address, POSIX locks, the float mode.

Addresses are int64 byte addresses of naturally aligned int64 words. All atomics are sequentially consistent.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from serai.kernels.vec import define, pointer_value

_WORD = ir.IntType(64)
_ORDER = "seq_cst"
# Non-signalling defaults: round to nearest even, subnormals kept (x86 MXCSR, all exceptions masked; AArch64 FPCR).
_MXCSR = 0x1F80
_FPCR = 0


def _integers(*args: Any) -> bool:
    return all(isinstance(arg, types.Integer) for arg in args)


@define
def atomic_load(typingctx: Any, address: Any) -> Any:
    """The word at ``address``."""
    if not _integers(address):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(pointer_value(builder, args[0], _WORD), _ORDER, 8, typ=_WORD)

    return types.int64(types.int64), codegen


@define
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write ``value`` to the word at ``address``."""
    if not _integers(address, value):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer_value(builder, args[0], _WORD), _ORDER, 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@define
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Add ``value`` to the word at ``address``; gives what was there before."""
    if not _integers(address, value):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer_value(builder, args[0], _WORD), args[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@define
def atomic_exchange(typingctx: Any, address: Any, value: Any) -> Any:
    """Write ``value`` to the word at ``address``; gives what was there before."""
    if not _integers(address, value):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", pointer_value(builder, args[0], _WORD), args[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@define
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a spin loop (tens of nanoseconds on x86)."""
    machine = platform.machine().lower()

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if machine in ("x86_64", "amd64"):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            _call(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), codegen


@define
def default_float_mode(typingctx: Any) -> Any:
    """Round to nearest even and keep subnormals on this thread, whatever a library has set."""
    machine = platform.machine().lower()

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if machine in ("x86_64", "amd64"):
            slot = cgutils.alloca_once_value(builder, ir.Constant(ir.IntType(32), _MXCSR))
            _call(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [slot])
        elif machine in ("aarch64", "arm64"):
            _call(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [ir.Constant(_WORD, _FPCR)])
        return context.get_dummy_value()

    return types.void(), codegen


def _call(builder: Any, name: str, result: ir.Type, args: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _posix(name: str, doc: str, arity: int) -> Any:
    def one(typingctx: Any, a: Any) -> Any:
        return (types.int32(types.int64), call) if _integers(a) else None

    def two(typingctx: Any, a: Any, b: Any) -> Any:
        return (types.int32(types.int64, types.int64), call) if _integers(a, b) else None

    def call(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointers = [pointer_value(builder, arg, ir.IntType(8)) for arg in args]
        return _call(builder, name, ir.IntType(32), pointers)

    typed = one if arity == 1 else two
    typed.__doc__ = doc
    return define(typed)


mutex_lock = _posix("pthread_mutex_lock", "Lock the mutex at an address.", 1)
mutex_unlock = _posix("pthread_mutex_unlock", "Unlock the mutex at an address.", 1)
condition_wait = _posix("pthread_cond_wait", "Wait on the condition at an address, releasing the mutex at another.", 2)
condition_signal = _posix("pthread_cond_signal", "Wake one waiter of the condition at an address.", 1)
condition_broadcast = _posix("pthread_cond_broadcast", "Wake every waiter of the condition at an address.", 1)


def task_function_type(context: Any) -> ir.FunctionType:
    """The type of a task as the pool calls it: numba's convention for ``none(context_address, task)``."""
    function_type: ir.FunctionType = context.call_conv.get_function_type(types.none, (types.int64, types.int64))
    return function_type


@define
def call_task(typingctx: Any, function: Any, task_context: Any, task: Any) -> Any:
    """Call the task function at an address. Tasks do not raise; a status would be dropped."""
    if not _integers(function, task_context, task):
        return None

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        shape = task_function_type(context)
        pointer = builder.inttoptr(args[0], shape.as_pointer())
        result = cgutils.alloca_once(builder, shape.args[0].pointee)
        raised = cgutils.alloca_once(builder, shape.args[1].pointee)
        builder.call(pointer, [result, raised, args[1], args[2]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
