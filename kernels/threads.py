"""One pool of threads for all kernels.

numba's own layers do not fit: ``workqueue`` takes 25 to 35 us a launch and aborts the process when two Python threads
launch at once; ``omp`` takes 2 us alone, but its spinning barrier takes milliseconds as soon as another process wants a
core. Here workers spin for a short while, then sleep. A thread has a run of neighbouring tasks, so that what it reads
and fetches ahead goes on from task to task; when its own is done it takes from the far end of the others'. So a worker
that the system has taken off its core costs only the task it holds. A launch takes 1 to 2 us when workers are awake.

Inside a kernel::

    @inline
    def _rows(task, x, out): ...                      # writes the task's own outputs; must not raise

    @kernel("void(f32[:, ::1], f32[:, ::1])", before=threads.start)
    def scale(x, out):
        parallel_for(x.shape[0], x.size > 4096, _rows, (x, out))

Which thread runs which task decides no bits: tasks write disjoint outputs and none reduces across tasks.

Two Python threads may launch at once: the second one finds the pool taken and runs its tasks itself. The engine holds
:func:`parallel_region` during a step, so that steps follow each other instead.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from serai.kernels.atomic import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_task,
    condition_broadcast,
    condition_signal,
    condition_wait,
    default_float_mode,
    mutex_lock,
    mutex_unlock,
    pause,
    task_function_type,
)
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.ranks import give_way
from serai.kernels.runs import deal, take
from serai.kernels.vec import define

log = logging.getLogger(__name__)

# The pool's shared block: byte offsets of its words, those that several threads write on lines of their own.
_LAUNCHES = 0  # how many there have been
_DONE = 64  # tasks finished in this launch
_SLEEPERS = 128
_WAITING = 192  # the launcher sleeps until _DONE is complete
_BUSY = 256
_FUNCTION, _CONTEXT, _TASKS, _WORKERS, _STOP = 320, 328, 336, 344, 352
_MUTEX, _WORK, _FINISHED = 384, 448, 512  # pthread objects, at most 64 bytes each
_RUNS = 576  # one a thread, see `kernels/runs.py`
_MOST_RUNS = 64  # more threads than that share them
_BLOCK_BYTES = _RUNS + 64 * _MOST_RUNS

_MOST_TASKS = 1 << 31
# About 0.1 ms of pauses: longer than the gap between two launches of a step, shorter than a scheduler's slice.
_SPINS = 2500
_SYMBOL = "serai_pool"
_HAS_POSIX_THREADS = os.name in ("posix",)


# Compiled part ---------------------------------------------------------------------------------------------------


@inline
def _run_count(pool: int) -> Any:
    return min(atomic_load(pool + _WORKERS) + 1, _MOST_RUNS)


@inline
def _take_tasks(pool: int, number: int) -> None:
    """Run tasks until none is left, those of the ``number``-th thread's run first.

    A late thread may take a task of the next launch: function, context and counts are there before the runs are.
    """
    runs = _run_count(pool)
    for turn in range(runs):
        run = pool + _RUNS + 64 * ((number + turn) % runs)
        task = take(run, turn == 0)
        while task >= 0:
            call_task(atomic_load(pool + _FUNCTION), atomic_load(pool + _CONTEXT), task)
            # Before the task is counted: after the last one the launcher may go on.
            tasks = atomic_load(pool + _TASKS)
            if atomic_add(pool + _DONE, 1) + 1 == tasks and atomic_load(pool + _WAITING) != 0:
                mutex_lock(pool + _MUTEX)
                condition_signal(pool + _FINISHED)
                mutex_unlock(pool + _MUTEX)
            task = take(run, turn == 0)


@kernel("void(i64, i64)")
def _work(pool: int, number: int) -> None:
    """The life of the ``number``-th thread: wait for a launch, take its tasks, until told to stop."""
    default_float_mode()
    seen = atomic_load(pool + _LAUNCHES)
    while atomic_load(pool + _STOP) == 0:
        spins = 0
        while atomic_load(pool + _LAUNCHES) == seen and spins < _SPINS:
            pause()
            spins += 1
        if spins == _SPINS:
            mutex_lock(pool + _MUTEX)
            atomic_add(pool + _SLEEPERS, 1)
            while atomic_load(pool + _LAUNCHES) == seen:
                condition_wait(pool + _WORK, pool + _MUTEX)
            atomic_add(pool + _SLEEPERS, -1)
            mutex_unlock(pool + _MUTEX)
        # Before looking for tasks: one of a later launch is then looked for again.
        seen = atomic_load(pool + _LAUNCHES)
        _take_tasks(pool, number)


@inline
def _publish(pool: int, tasks: int) -> None:
    """Deal ``tasks`` tasks out as runs, say that there is a launch, and wake who sleeps."""
    runs = _run_count(pool)
    for run in range(runs):
        deal(pool + _RUNS + 64 * run, run * tasks // runs, (run + 1) * tasks // runs)
    atomic_add(pool + _LAUNCHES, 1)
    if atomic_load(pool + _SLEEPERS) != 0:
        mutex_lock(pool + _MUTEX)
        condition_broadcast(pool + _WORK)
        mutex_unlock(pool + _MUTEX)


@inline
def _run(pool: int, function: int, context: int, tasks: int, spread: bool) -> None:
    """Run ``tasks`` tasks, on the pool if ``spread`` and it is free, else here."""
    if (
        not spread
        or tasks < 2
        or tasks >= _MOST_TASKS
        or atomic_load(pool + _WORKERS) == 0
        or atomic_exchange(pool + _BUSY, 1) != 0
    ):
        for task in range(tasks):
            call_task(function, context, task)
        return
    atomic_store(pool + _FUNCTION, function)
    atomic_store(pool + _CONTEXT, context)
    atomic_store(pool + _TASKS, tasks)
    atomic_store(pool + _DONE, 0)
    _publish(pool, tasks)
    _take_tasks(pool, 0)
    spins = 0
    while atomic_load(pool + _DONE) != tasks and spins < _SPINS:
        pause()
        spins += 1
    if spins == _SPINS:
        mutex_lock(pool + _MUTEX)
        atomic_store(pool + _WAITING, 1)
        while atomic_load(pool + _DONE) != tasks:
            condition_wait(pool + _FINISHED, pool + _MUTEX)
        atomic_store(pool + _WAITING, 0)
        mutex_unlock(pool + _MUTEX)
    atomic_store(pool + _BUSY, 0)


@kernel("void(i64)")
def _stop_workers(pool: int) -> None:
    """Tell every worker to leave."""
    atomic_store(pool + _STOP, 1)
    _publish(pool, 0)


@kernel("void()")
def _use_default_float_mode() -> None:
    """Give this thread the float mode that every compute thread has."""
    default_float_mode()


@define
def _pool_address(typingctx: Any) -> Any:
    """The address of the pool's block, known by name so that compiled code can be kept on disk."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        module = builder.module
        block = module.globals.get(_SYMBOL) or ir.GlobalVariable(module, ir.IntType(64), _SYMBOL)
        return builder.ptrtoint(block, ir.IntType(64))

    return types.int64(), codegen


@define
def _task_function(typingctx: Any, body: Any, args: Any) -> Any:
    """The address of a function that unpacks a context block and calls ``body(task, *args)``."""
    body_sig = body.get_call_type(typingctx, (types.int64, *args), {})

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        module = builder.module
        name = module.get_unique_name("serai_task")
        function = ir.Function(module, task_function_type(context), name)
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        block_address, task = context.call_conv.get_arguments(function)
        packed = inner.load(inner.inttoptr(block_address, context.get_value_type(args).as_pointer()))
        unpacked = cgutils.unpack_tuple(inner, packed)
        implementation = context.get_function(body, body_sig)
        implementation(inner, [task, *unpacked])
        context.call_conv.return_value(inner, context.get_dummy_value())
        return builder.ptrtoint(function, ir.IntType(64))

    return types.int64(body, args), codegen


@define
def _spill(typingctx: Any, args: Any) -> Any:
    """The address of a stack copy of a tuple."""

    def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), ir.IntType(64))

    return types.int64(args), codegen


@inline
def team() -> Any:
    """How many threads share a launch, the calling one included."""
    return atomic_load(_pool_address() + _WORKERS) + 1


@thin
def parallel_for(tasks: int, spread: bool, body: Any, args: tuple[Any, ...]) -> None:
    """``body(task, *args)`` for every task in 0..tasks-1: on all threads if ``spread`` (costs 1 to 2 us), else here."""
    _run(_pool_address(), _task_function(body, args), _spill(args), tasks, spread)


# The pool -------------------------------------------------------------------------------------------------------


def _usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut by a cgroup CPU quota, siblings of one core counted once."""
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in affinity:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota_cores()))


def _quota_cores() -> int:
    """The cgroup's CPU quota in whole cores (at least 1), or a large number without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return 1 << 16 if quota == "max" else max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return 1 << 16


def _live(pool: int, number: int) -> None:
    give_way()
    _work(pool, number)


class _Pool:
    """The workers and the block they share with compiled code. One instance a process."""

    def __init__(self) -> None:
        raw = np.zeros(_BLOCK_BYTES + 64, np.uint8)
        offset = -raw.ctypes.data % 64
        self._block = raw[offset : offset + _BLOCK_BYTES]
        self.address = int(self._block.ctypes.data)
        self._words = self._block.view(np.int64)
        self._workers: list[threading.Thread] = []
        self._lock = threading.RLock()
        self.region = threading.RLock()
        self._wanted = _usable_cores()
        self._is_started = False
        llvm.add_symbol(_SYMBOL, self.address)
        if _HAS_POSIX_THREADS:
            self._initialise_locks()
            os.register_at_fork(after_in_child=self._forget_workers)
        else:
            log.warning("Kernels run on one thread: the pool needs POSIX threads, and this is %s.", os.name)
            self._wanted = 1
        atexit.register(self.stop)

    @property
    def threads(self) -> int:
        return self._wanted

    def is_started(self) -> bool:
        return self._is_started

    def resize(self, threads: int) -> None:
        with self.region, self._lock:
            was_started = self._is_started
            self.stop()
            self._wanted = threads if _HAS_POSIX_THREADS else 1
        if was_started:
            self.start()

    def start(self) -> None:
        """Start the missing workers. Cheap when they run."""
        if self.is_started():
            return
        # Before taking our lock: preparing takes the compiler's, and a kernel being prepared starts the pool.
        _work.prepare()
        _stop_workers.prepare()
        with self._lock:
            if self.is_started():
                return
            self._words[_STOP // 8] = 0
            for number in range(1, self._wanted):
                worker = threading.Thread(
                    target=_live, args=(self.address, number), name=f"serai-kernel-{number}", daemon=True
                )
                worker.start()
                self._workers.append(worker)
            self._words[_WORKERS // 8] = len(self._workers)
            self._is_started = True
            log.info("Kernels run on %d threads (%s).", self._wanted, layer())

    def stop(self) -> None:
        """End the workers and wait for them."""
        with self._lock:
            if self._workers:
                self._words[_WORKERS // 8] = 0
                _stop_workers(self.address)
                for worker in self._workers:
                    worker.join()
            self._workers.clear()
            self._is_started = False

    def _initialise_locks(self) -> None:
        process = ctypes.CDLL(None)
        process.pthread_mutex_init(ctypes.c_void_p(self.address + _MUTEX), None)
        process.pthread_cond_init(ctypes.c_void_p(self.address + _WORK), None)
        process.pthread_cond_init(ctypes.c_void_p(self.address + _FINISHED), None)

    def _forget_workers(self) -> None:
        """After a fork: the child has none of the threads."""
        self._block[:] = 0
        self._initialise_locks()
        self._workers.clear()
        self._is_started = False
        self._lock = threading.RLock()
        self.region = threading.RLock()


_pool = _Pool()


def start() -> None:
    """Start the pool's workers if they do not run."""
    _pool.start()


def set_threads(n: int) -> None:
    """Use ``n`` threads from now on, the calling one included. Raises ValueError below 1. Bits do not change."""
    if n < 1:
        raise ValueError(f"threads must be at least 1, not {n}.")
    _pool.resize(n)


def threads() -> int:
    """How many threads kernels use, the calling one included."""
    return _pool.threads


def layer() -> str:
    """What runs parallel kernels, for status and logs."""
    return "serai pool: spin, then sleep" if _pool.threads > 1 else "serial"


@contextlib.contextmanager
def parallel_region() -> Iterator[None]:
    """Own the pool for a while. A second Python thread waits; the same thread may enter again."""
    with _pool.region:
        _pool.start()
        _use_default_float_mode()
        yield
