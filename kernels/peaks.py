"""What this machine gives at most: streams through memory, and dots that never leave the registers.

Benches hold the other kernels against these. They run on the same pool and cut their work into tasks as the kernels
do, so a thread that loses its core costs both alike. Nothing but a bench imports this file.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel, thin
from serai.kernels.exact import prefetch_ahead
from serai.kernels.lanes import stream_fence, stream_store_at
from serai.kernels.memory import addr, f32_at, i8x64_at, i32_at, store_at, u8x64_at
from serai.kernels.simd import as_f32, as_u32, fma
from serai.kernels.simd_bytes import dot4
from serai.kernels.threads import parallel_for
from serai.kernels.tiles import pair_dot

LINE_FLOATS = 16
TASK_BYTES = 1 << 18
"""Bytes of each stream that a task takes; buffers are multiples of this times the streams."""

DOT_OPERATIONS = 12 * 64 * 2
PAIR_OPERATIONS = 12 * 32 * 2
FMA_OPERATIONS = 12 * 16 * 2
"""Operations in one turn of the loops below: twelve chains, which covers the latency of two units."""
_CHAIN_BYTES = 12 * 64


@inline
def _read_task(task: int, data: int, run: int, apart: int, streams: int, out: int) -> None:
    """Sum a run of each of `streams` streams that lie `apart` bytes from each other, four lines of each in turn."""
    base = data + task * run
    a, b, c, d = f32_at(base), f32_at(base + 64), f32_at(base + 128), f32_at(base + 192)
    for at in range(0, run, 256):
        for stream in range(streams):
            here = base + stream * apart + at
            a, b = a + f32_at(here), b + f32_at(here + 64)
            c, d = c + f32_at(here + 128), d + f32_at(here + 192)
            prefetch_ahead(here, 256)
    store_at(out + 64 * task, (a + b) + (c + d))


@kernel("void(f32[::1], i64, f32[::1])", before=threads.start)
def read_stream(data: NDArray[np.float32], streams: int, out: NDArray[np.float32]) -> None:
    """Read `data`, a multiple of `TASK_BYTES` times `streams`, as so many streams; `out` has 16 floats a task."""
    apart = data.size * 4 // streams
    parallel_for(apart // TASK_BYTES, True, _read_task, (addr(data, 0), TASK_BYTES, apart, streams, addr(out, 0)))


@inline
def _copy_task(task: int, source: int, target: int, run: int, apart: int, streams: int) -> None:
    for at in range(0, run, 256):
        for stream in range(streams):
            here = task * run + stream * apart + at
            for line in range(0, 256, 64):
                stream_store_at(target + here + line, f32_at(source + here + line))
            prefetch_ahead(source + here, 256)
    stream_fence()


@kernel("void(f32[::1], f32[::1], i64)", before=threads.start)
def copy_stream(source: NDArray[np.float32], target: NDArray[np.float32], streams: int) -> None:
    """Copy a multiple of `TASK_BYTES` times `streams` past the cache; both arrays start on a line."""
    apart = source.size * 4 // streams
    parallel_for(apart // TASK_BYTES, True, _copy_task, (addr(source, 0), addr(target, 0), TASK_BYTES, apart, streams))


@thin
def _twelve_chains(step: Any, start: Any, u: Any, s: Any, turns: int, out: int) -> None:
    """`turns` turns of ``chain = step(chain, u, s)`` in each of twelve registers, which are left at `out`."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = a8 = a9 = aa = ab = start
    for _ in range(turns):
        a0, a1, a2, a3 = step(a0, u, s), step(a1, u, s), step(a2, u, s), step(a3, u, s)
        a4, a5, a6, a7 = step(a4, u, s), step(a5, u, s), step(a6, u, s), step(a7, u, s)
        a8, a9, aa, ab = step(a8, u, s), step(a9, u, s), step(aa, u, s), step(ab, u, s)
    chains: Any = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab)
    for i in range(12):
        store_at(out + 64 * i, as_f32(chains[i]))


@inline
def _dot_task(task: int, numbers: int, turns: int, out: int) -> None:
    u, s = u8x64_at(numbers), i8x64_at(numbers + 64)
    _twelve_chains(dot4, i32_at(numbers), u, s, turns, out + task * _CHAIN_BYTES)


@kernel("void(f32[::1], i64, i64, f32[::1])", before=threads.start)
def dot_peak(numbers: NDArray[np.float32], tasks: int, turns: int, out: NDArray[np.float32]) -> None:
    """`tasks` times `turns` turns of twelve 8-bit dots of 64; `out` has 192 floats a task."""
    parallel_for(tasks, True, _dot_task, (addr(numbers, 0), turns, addr(out, 0)))


@inline
def _fma_task(task: int, numbers: int, turns: int, out: int) -> None:
    u, s = f32_at(numbers), f32_at(numbers + 64)
    _twelve_chains(fma, f32_at(numbers), u, s, turns, out + task * _CHAIN_BYTES)


@kernel("void(f32[::1], i64, i64, f32[::1])", before=threads.start)
def fma_peak(numbers: NDArray[np.float32], tasks: int, turns: int, out: NDArray[np.float32]) -> None:
    """`tasks` times `turns` turns of twelve float32 multiply-adds of 16; `out` has 192 floats a task."""
    parallel_for(tasks, True, _fma_task, (addr(numbers, 0), turns, addr(out, 0)))


@inline
def _pair_task(task: int, numbers: int, turns: int, out: int) -> None:
    u, s = as_u32(f32_at(numbers)), as_u32(f32_at(numbers + 64))
    _twelve_chains(pair_dot, f32_at(numbers), u, s, turns, out + task * _CHAIN_BYTES)


@kernel("void(f32[::1], i64, i64, f32[::1])", before=threads.start)
def pair_peak(numbers: NDArray[np.float32], tasks: int, turns: int, out: NDArray[np.float32]) -> None:
    """`tasks` times `turns` turns of twelve dots of 16 pairs of bfloat16; `out` has 192 floats a task."""
    parallel_for(tasks, True, _pair_task, (addr(numbers, 0), turns, addr(out, 0)))
