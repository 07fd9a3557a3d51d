"""Multi-head latent attention in its one form (absorbed), over paged latents, for one row or many.

In latent space all heads share keys and values, so sixteen heads are sixteen lanes: for a tile of latents as float32
rows,

    score[n, heads] = scale * sum over d of latent[n, d] * q[d, heads]
    out[d, heads]   = sum over n of latent[n, d] * p[n, heads]

are products of numbers (latents, read as they lie) and vectors (the transposed queries; the weights p), with no
transpose of what is long. Softmax runs down the lanes.

What fixes a row's bits: the context is cut at multiples of `SPLIT` tokens. In a split a score is one chain of fused
multiply-adds over ascending d; m is the split's largest score, p = exp(score - m), their sum and each output run over
ascending n. Splits are merged in ascending order, the first taken as it is. A row runs to its own token and no
further, so later tokens touch nothing of it; rows, heads, pages and threads are grouped as is fastest.

Lanes are dealt out as lines (`kernels/mla_line.py`): the heads of a row, then those of the next, as many as registers
hold. So none stands empty where a row's heads fill no vector, and rows of a model of few heads stand abreast.

`pairs`: queries and weights are rounded to bfloat16, as the latents are (8-bit ones once they are read), and two terms
of a sum are added at once (`kernels/tiles.py`), those of dims 2j and 2j + 1 or of tokens 2j and 2j + 1: the same order,
by pairs. The weights are summed as rounded, so a row's weights still add up to 1.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.atomic import atomic_add, atomic_store
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import LINE_BYTES
from serai.kernels.latents import Pages, check_latents, latent_address, load_latent
from serai.kernels.memory import addr, store_at
from serai.kernels.mla_line import (
    LINES,
    Attention,
    Scratch,
    attend_split,
    finish,
    line_at,
    pitch_floats,
    scratch_at,
    slot_floats,
    transpose_queries,
)
from serai.kernels.mla_pairs import SPLIT, load_pairs
from serai.kernels.simd import splat_f32
from serai.kernels.threads import parallel_for
from serai.kernels.tiles import TILE_NUMBERS, TILE_VECTORS

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

# Multiply-adds below which waking other threads costs more than it saves.
SPREAD_WORK = 1 << 18


@inline
def _load_split(a: Attention, s: Scratch, segment: int, first: int, count: int) -> None:
    """Latents of `count` tokens from `first` as float32 rows, and zeros to the end of the last tile."""
    pitch_bytes = 4 * pitch_floats(a.pages.width)
    for n in range(count):
        source = latent_address(a.pages, segment, first + n)
        load_latent(source, a.pages, s.latents + n * pitch_bytes)
    for n in range(count, min((count + TILE_NUMBERS - 1) // TILE_NUMBERS * TILE_NUMBERS, SPLIT)):
        for c in range(0, pitch_bytes, 64):
            store_at(s.latents + n * pitch_bytes + c, splat_f32(0.0))


@inline
def _attend_lanes(a: Attention, s: Scratch, segment: int, lane: int, lanes: int) -> None:
    """`lanes` lanes of a segment from `lane` on: at most as many as a task takes."""
    lines = (lanes + a.vectors * 16 - 1) // (a.vectors * 16)
    for number in range(lines):
        transpose_queries(a, s, line_at(a, s, segment, lane, lanes, number))
    context = a.seg_pos[segment] + (lane + lanes - 1) // a.heads + 1
    for first in range(0, context, SPLIT):
        if a.pairs:
            load_pairs(a.pages, segment, first, min(SPLIT, context - first), a.kv_lora, s.latents)
        else:
            _load_split(a, s, segment, first, min(SPLIT, context - first))
        for number in range(lines):
            attend_split(a, s, line_at(a, s, segment, lane, lanes, number), first)
    for number in range(lines):
        finish(a, s, line_at(a, s, segment, lane, lanes, number))


@inline
def _lanes_of(heads: int, seg_start: Any, segment: int) -> Any:
    return (seg_start[segment + 1] - seg_start[segment]) * heads


@inline
def _attend_task(a: Attention, s: Scratch, task: int) -> None:
    """A run of lanes of one segment."""
    most = a.lines * a.vectors * 16
    segment = 0
    here = (_lanes_of(a.heads, a.seg_start, segment) + most - 1) // most
    while task >= here:
        task -= here
        segment += 1
        here = (_lanes_of(a.heads, a.seg_start, segment) + most - 1) // most
    lane = task * most
    _attend_lanes(a, s, segment, lane, min(most, _lanes_of(a.heads, a.seg_start, segment) - lane))


@inline
def _worker(worker: int, a: Attention, tasks: int, counter: int, slots: int) -> None:
    """Take tasks until none is left, with the worker's own scratch: the last rows first, as these see the most."""
    scratch = scratch_at(a, slots + worker * 4 * slot_floats(a.pages.width, a.kv_lora, a.vectors))
    task = atomic_add(counter, 1)
    while task < tasks:
        _attend_task(a, scratch, tasks - 1 - task)
        task = atomic_add(counter, 1)


@inline
def _runs(heads: int, seg_start: Any, lanes: int) -> Any:
    """How many runs of so many lanes the segments make."""
    count = 0
    for segment in range(seg_start.size - 1):
        count += (_lanes_of(heads, seg_start, segment) + lanes - 1) // lanes
    return count


@kernel(
    "void(f32[:, ::1], f32, i64, i64, i64, i64[::1], i64[::1], i64[::1], i64[::1], i64, i64, i64, i64, boolean,"
    "f32[:, ::1], f32[::1])",
    before=threads.start,
)
def attend(
    q: F32,
    scale: float,
    heads: int,
    kv_lora: int,
    rope: int,
    seg_start: I64,
    seg_pos: I64,
    page_addr: I64,
    page_start: I64,
    page_tokens: int,
    layer: int,
    row_bytes: int,
    latent_bytes: int,
    pairs: bool,
    out: F32,
    scratch: F32,
) -> None:
    """Causal attention of R rows over their sessions' latents, their own included (already stored).

    `q [R, heads * (kv_lora + rope)]`: absorbed queries, a head's latent part and then its shared part; `scale`
    multiplies the scores; `out [R, heads * kv_lora]`: mixed latents, a head after the other. Segments, pages,
    `layer`, `row_bytes` and `latent_bytes` as in `store_latents`. `pairs` multiplies in bfloat16: a rounding of 0.2 %
    in each query and weight (and each 8-bit latent), at twice the speed where the CPU has it. `scratch`:
    `mla_scratch_floats(kv_lora, rope, threads)`; with less, fewer threads work. Raises ValueError if it is too small
    for one, for another size of latent, or for pairs of float32.
    """
    width = kv_lora + rope
    check_latents(latent_bytes, width, row_bytes)
    if pairs and latent_bytes == 4:
        raise ValueError("pairs are of bfloat16 latents or of 8-bit ones")
    slots = (scratch.size - 32) // slot_floats(width, kv_lora, TILE_VECTORS)
    if slots < 1:
        raise ValueError("attend needs mla_scratch_floats(kv_lora, rope, threads) floats of scratch")
    multiplications = 0
    for segment in range(seg_start.size - 1):
        rows = seg_start[segment + 1] - seg_start[segment]
        multiplications += rows * (seg_pos[segment] + rows) * heads * width
    # As many vectors a task as registers and scratch hold, but as much for each thread.
    vectors_in_all, most = max(1, _runs(heads, seg_start, 16)), slots * LINES * TILE_VECTORS
    turns = (vectors_in_all + most - 1) // most * slots
    vectors_a_task = (vectors_in_all + turns - 1) // turns
    lines = (vectors_a_task + TILE_VECTORS - 1) // TILE_VECTORS
    vectors = (vectors_a_task + lines - 1) // lines
    tasks = _runs(heads, seg_start, lines * vectors * 16)
    pages = Pages(page_addr, page_start, page_tokens, layer, row_bytes, latent_bytes, kv_lora, width)
    attention = Attention(q, scale, heads, kv_lora, seg_start, seg_pos, pages, out, vectors, lines, pairs)
    counter = (addr(scratch, 0) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    atomic_store(counter, 0)
    arguments = (attention, tasks, counter, counter + LINE_BYTES)
    parallel_for(min(slots, tasks), multiplications > SPREAD_WORK, _worker, arguments)
