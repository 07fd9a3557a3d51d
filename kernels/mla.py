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

A model of few heads leaves lanes empty, so as many rows as fit stand *abreast* in one *line* of lanes: a row's heads,
then those of the next row, as `q` and `out` have them.

`pairs`: queries and weights are rounded to bfloat16, as the latents are (8-bit ones once they are read), and two terms
of a sum are added at once (`kernels/tiles.py`), those of dims 2j and 2j + 1 or of tokens 2j and 2j + 1: the same order,
by pairs. The weights are summed as rounded, so a row's weights still add up to 1.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.atomic import atomic_add, atomic_store
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import LINE_BYTES, load_lanes, store_lanes
from serai.kernels.latents import Pages, check_latent_bytes, latent_address, load_latent, row_bytes_of
from serai.kernels.mathfn import exp16
from serai.kernels.memory import addr, f32_at, store_at
from serai.kernels.mla_pairs import (
    PAIR_ROOM,
    SPLIT,
    lay_pair,
    load_pairs,
    pair_queries,
    pair_row_bytes,
    pair_rows,
    paired_weights,
    raw_pitch_bytes,
)
from serai.kernels.simd import fma, splat_f32, vmax
from serai.kernels.threads import parallel_for
from serai.kernels.tiles import TILE_NUMBERS, TILE_VECTORS, tile_product, transpose_16

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

LINES = 4
"""Lines of a segment's rows that share a loaded split of latents. Decides no bits."""

# Multiply-adds below which waking other threads costs more than it saves.
SPREAD_WORK = 1 << 18


class Attention(NamedTuple):
    """The arguments of `attend`."""

    q: Any
    scale: Any
    heads: Any
    kv_lora: Any
    seg_start: Any
    seg_pos: Any
    pages: Pages
    out: Any
    vectors: Any
    """Vectors of heads that one task takes."""
    abreast: Any
    """Rows in a line."""
    pairs: Any
    """Whether products are of pairs of bfloat16."""


class Scratch(NamedTuple):
    """One worker's memory; byte addresses, all on lines."""

    latents: Any
    """`[SPLIT, pitch]` float32; as pairs, the rows in bfloat16 and then the tokens side by side."""
    weights: Any
    """`[SPLIT, vectors, 16]`: scores, then p."""
    factors: Any
    """`[2, vectors, 16]` of a merge."""
    lines: Any
    """For each line, and one aside: queries `[width, vectors, 16]`, sums `[kv_lora, vectors, 16]`, m, sum of p."""


class Line(NamedTuple):
    """Addresses of one line's memory: see `Scratch.lines`."""

    queries: Any
    sums: Any
    largest: Any
    total: Any


@inline
def _pitch_floats(width: int) -> int:
    """Floats from one latent to the next: an odd number of lines, so that a column of them uses all cache sets."""
    return ((width + 15) // 16 | 1) * 16


@inline
def _line_floats(width: int, kv_lora: int, vectors: int) -> int:
    return ((width + 15) // 16 * 16 + (kv_lora + 15) // 16 * 16 + 2) * vectors * 16


@inline
def _slot_floats(width: int, kv_lora: int, vectors: int) -> int:
    shared = SPLIT * (_pitch_floats(width) + PAIR_ROOM) + (SPLIT + TILE_NUMBERS + 2) * vectors * 16
    return shared + (LINES + 1) * _line_floats(width, kv_lora, vectors)


def mla_scratch_floats(kv_lora: int, rope: int, thread_count: int) -> int:
    """Length of the float32 `scratch` of `attend`. Nothing needs to be in it, and nothing of use is left in it."""
    width, lanes = kv_lora + rope, TILE_VECTORS * 16
    pitch = (-(-width // 16) | 1) * 16
    line = (-(-width // 16) * 16 + -(-kv_lora // 16) * 16 + 2) * lanes
    return 32 + thread_count * (SPLIT * (pitch + PAIR_ROOM) + (SPLIT + TILE_NUMBERS + 2) * lanes + (LINES + 1) * line)


@inline
def _line_at(a: Attention, s: Scratch, line: int) -> Any:
    lane_bytes = a.vectors * LINE_BYTES
    queries = s.lines + line * 4 * _line_floats(a.pages.width, a.kv_lora, a.vectors)
    sums = queries + (a.pages.width + 15) // 16 * 16 * lane_bytes
    largest = sums + (a.kv_lora + 15) // 16 * 16 * lane_bytes
    return Line(queries, sums, largest, largest + lane_bytes)


@inline
def _transpose_queries(a: Attention, row: int, rows: int, first_head: int, target: int) -> None:
    """The task's heads' queries of a line's rows as `[width, vectors, 16]`; heads that don't exist are zero."""
    width, lane_bytes = a.pages.width, a.vectors * LINE_BYTES
    for v in range(a.vectors):
        head = first_head + 16 * v
        source = addr(a.q, row * a.q.shape[1] + head * width)
        for d in range(0, width, 16):
            place = target + d * lane_bytes + v * LINE_BYTES
            transpose_16(source + 4 * d, 4 * width, rows * a.heads - head, width - d, place, lane_bytes)
    if a.pairs:
        pair_queries((width + 1) // 2 * 2, lane_bytes, target)


@inline
def _load_split(a: Attention, s: Scratch, segment: int, first: int, count: int) -> None:
    """Latents of `count` tokens from `first` as float32 rows, and zeros to the end of the last tile."""
    pitch_bytes = 4 * _pitch_floats(a.pages.width)
    for n in range(count):
        source = latent_address(a.pages, segment, first + n)
        load_latent(source, a.pages, s.latents + n * pitch_bytes)
    for n in range(count, min((count + TILE_NUMBERS - 1) // TILE_NUMBERS * TILE_NUMBERS, SPLIT)):
        for c in range(0, pitch_bytes, 64):
            store_at(s.latents + n * pitch_bytes + c, splat_f32(0.0))


@inline
def _scores(a: Attention, s: Scratch, queries: int, count: int) -> None:
    """Unscaled scores of the first `count` latents (and of the rest of the last tile) to the weights."""
    lane_bytes, pitch_bytes, steps = a.vectors * LINE_BYTES, 4 * _pitch_floats(a.pages.width), a.pages.width
    if a.pairs:
        pitch_bytes, steps = raw_pitch_bytes(steps), (steps + 1) // 2
    for n in range(0, count, TILE_NUMBERS):
        latent, target = s.latents + n * pitch_bytes, s.weights + n * lane_bytes
        tile_product(a.pairs, a.vectors, latent, pitch_bytes, 4, queries, lane_bytes, steps, target, 0)


@inline
def _softmax(a: Attention, s: Scratch, count: int, is_first: bool, largest: int, total: int) -> None:
    """Scores to p, and the factors that merge this split with those before; updates the line's m and sum of p."""
    lane_bytes = a.vectors * LINE_BYTES
    scale = splat_f32(a.scale)
    for v in range(0, lane_bytes, LINE_BYTES):
        peak = f32_at(s.weights + v)
        for n in range(1, count):
            peak = vmax(f32_at(s.weights + n * lane_bytes + v), peak)
        peak = peak * scale
        if a.pairs:
            split_sum = paired_weights(s.weights + v, lane_bytes, count, scale, peak)
        else:
            split_sum = splat_f32(0.0)
            for n in range(count):
                place = s.weights + n * lane_bytes + v
                p = exp16(f32_at(place) * scale - peak)
                store_at(place, p)
                split_sum = split_sum + p
        if is_first:
            store_at(largest + v, peak)
            store_at(total + v, split_sum)
        else:
            before = f32_at(largest + v)
            now = vmax(before, peak)
            old, new = exp16(before - now), exp16(peak - now)
            store_at(largest + v, now)
            store_at(total + v, fma(split_sum, new, f32_at(total + v) * old))
            store_at(s.factors + v, old)
            store_at(s.factors + lane_bytes + v, new)


@inline
def _values(a: Attention, s: Scratch, sums: int, count: int, is_first: bool) -> None:
    """Sum of p * latent over the first `count` latents, merged into the line's sums."""
    lane_bytes, pitch_bytes = a.vectors * LINE_BYTES, 4 * _pitch_floats(a.pages.width)
    factors = 0 if is_first else s.factors
    latents, steps = s.latents, count
    if a.pairs:
        latents, pitch_bytes, steps = pair_rows(s.latents, a.pages.width), pair_row_bytes(a.kv_lora), (count + 1) // 2
        if count % 2:
            lay_pair(s.latents, count // 2, False, a.kv_lora, a.pages.width)
    for d in range(0, a.kv_lora, TILE_NUMBERS):
        latent, target = latents + 4 * d, sums + d * lane_bytes
        tile_product(a.pairs, a.vectors, latent, 4, pitch_bytes, s.weights, lane_bytes, steps, target, factors)
    if a.pairs and count % 2:
        # For the rows that see one token more; none will, where that one has not been loaded.
        lay_pair(s.latents, count // 2, True, a.kv_lora, a.pages.width)


@inline
def _attend_split(a: Attention, s: Scratch, queries: int, to: Line, count: int, is_first: bool) -> None:
    """Take the first `count` tokens of the loaded split into the sums, m and sum of p of `to`."""
    _scores(a, s, queries, count)
    _softmax(a, s, count, is_first, to.largest, to.total)
    _values(a, s, to.sums, count, is_first)


@inline
def _take_lanes(source: Line, target: Line, first: int, count: int) -> None:
    """Copy those lanes of one line's sums, m and sum of p to another; the lines are of one vector."""
    for place in range(4 * first, target.total + LINE_BYTES - target.sums, LINE_BYTES):
        store_lanes(target.sums + place, load_lanes(source.sums + place, count), count)


@inline
def _finish(a: Attention, s: Scratch, row: int, rows: int, first_head: int, sums: int, total: int) -> None:
    """Divide by the sum of p and write the heads' rows of `out`."""
    lane_bytes = a.vectors * LINE_BYTES
    square = s.weights
    for v in range(a.vectors):
        inverse = splat_f32(1.0) / f32_at(total + v * LINE_BYTES)
        head = first_head + 16 * v
        for d in range(0, a.kv_lora, 16):
            column = sums + d * lane_bytes + v * LINE_BYTES
            for j in range(16):
                store_at(column + j * lane_bytes, f32_at(column + j * lane_bytes) * inverse)
            transpose_16(column, lane_bytes, a.kv_lora - d, 16, square, LINE_BYTES)
            for h in range(min(16, rows * a.heads - head)):
                place = addr(a.out, row * a.out.shape[1] + (head + h) * a.kv_lora + d)
                store_lanes(place, load_lanes(square + h * LINE_BYTES, 16), a.kv_lora - d)


@inline
def _attend_tile(a: Attention, s: Scratch, segment: int, first_row: int, rows: int, first_head: int) -> None:
    """Rows first_row.. of a segment, for the task's heads."""
    position = a.seg_pos[segment] + first_row - a.seg_start[segment]
    for row in range(0, rows, a.abreast):
        queries = _line_at(a, s, row // a.abreast).queries
        _transpose_queries(a, first_row + row, min(a.abreast, rows - row), first_head, queries)
    context = position + rows
    for first in range(0, context, SPLIT):
        if a.pairs:
            load_pairs(a.pages, segment, first, min(SPLIT, context - first), a.kv_lora, s.latents)
        else:
            _load_split(a, s, segment, first, min(SPLIT, context - first))
        for row in range(0, rows, a.abreast):
            _attend_line(a, s, row // a.abreast, min(a.abreast, rows - row), position + row, first)
    for row in range(0, rows, a.abreast):
        line = _line_at(a, s, row // a.abreast)
        _finish(a, s, first_row + row, min(a.abreast, rows - row), first_head, line.sums, line.total)


@inline
def _attend_line(a: Attention, s: Scratch, line: int, rows: int, position: int, first: int) -> None:
    """The loaded split, from token `first` on, for a line of rows whose first is at `position`."""
    here = _line_at(a, s, line)
    most = min(SPLIT, position + rows - first)
    if most <= 0:
        return
    if min(SPLIT, position + 1 - first) == most:
        _attend_split(a, s, here.queries, here, most, first == 0)
        return
    # Row i sees the tokens up to its own, so here the rows part: each is computed aside and its lanes are taken over.
    aside = _line_at(a, s, LINES)
    for i in range(rows):
        count = min(SPLIT, position + i + 1 - first)
        if count > 0:
            if first > 0:
                _take_lanes(here, aside, i * a.heads, a.heads)
            _attend_split(a, s, here.queries, aside, count, first == 0)
            _take_lanes(aside, here, i * a.heads, a.heads)


@inline
def _row_tiles(seg_start: Any, segment: int, abreast: int) -> Any:
    rows = LINES * abreast
    return (seg_start[segment + 1] - seg_start[segment] + rows - 1) // rows


@inline
def _attend_task(a: Attention, s: Scratch, task: int, groups: int) -> None:
    """Task = row tile * groups + group of heads."""
    tile, group = task // groups, task % groups
    segment = 0
    while tile >= _row_tiles(a.seg_start, segment, a.abreast):
        tile -= _row_tiles(a.seg_start, segment, a.abreast)
        segment += 1
    first_row = a.seg_start[segment] + tile * LINES * a.abreast
    rows = min(LINES * a.abreast, a.seg_start[segment + 1] - first_row)
    first_head = group * a.vectors * 16
    _attend_tile(a, s, segment, first_row, rows, first_head)


@inline
def _worker(worker: int, a: Attention, tasks: int, groups: int, counter: int, slots: int) -> None:
    """Take tasks until none is left, with the worker's own scratch."""
    lane_bytes = a.vectors * LINE_BYTES
    latents = slots + worker * 4 * _slot_floats(a.pages.width, a.kv_lora, a.vectors)
    weights = latents + SPLIT * 4 * (_pitch_floats(a.pages.width) + PAIR_ROOM)
    factors = weights + (SPLIT + TILE_NUMBERS) * lane_bytes
    scratch = Scratch(latents, weights, factors, factors + 2 * lane_bytes)
    task = atomic_add(counter, 1)
    while task < tasks:
        _attend_task(a, scratch, task, groups)
        task = atomic_add(counter, 1)


@inline
def _tiles(seg_start: Any, abreast: int) -> Any:
    tiles = 0
    for segment in range(seg_start.size - 1):
        tiles += _row_tiles(seg_start, segment, abreast)
    return tiles


@kernel(
    "void(f32[:, ::1], f32, i64, i64, i64, i64[::1], i64[::1], i64[::1], i64[::1], i64, i64, i64, boolean,"
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
    layer_offset: int,
    latent_bytes: int,
    pairs: bool,
    out: F32,
    scratch: F32,
) -> None:
    """Causal attention of R rows over their sessions' latents, their own included (already stored).

    `q [R, heads * (kv_lora + rope)]`: absorbed queries, a head's latent part and then its shared part; `scale`
    multiplies the scores; `out [R, heads * kv_lora]`: mixed latents, a head after the other. Segments, pages,
    `layer_offset` and `latent_bytes` as in `store_latents`. `pairs` multiplies in bfloat16: a rounding of 0.2 % in each
    query and weight (and each 8-bit latent), at twice the speed where the CPU has it. `scratch`:
    `mla_scratch_floats(kv_lora, rope, threads)`; with less, fewer threads work. Raises ValueError if it is too small
    for one, for another size of latent, or for pairs of float32.
    """
    check_latent_bytes(latent_bytes)
    if pairs and latent_bytes == 4:
        raise ValueError("pairs are of bfloat16 latents or of 8-bit ones")
    width = kv_lora + rope
    slots = (scratch.size - 32) // _slot_floats(width, kv_lora, TILE_VECTORS)
    if slots < 1:
        raise ValueError("attend needs mla_scratch_floats(kv_lora, rope, threads) floats of scratch")
    # As many rows abreast as a vector holds, unless that leaves threads without a task.
    abreast = max(1, 16 // heads)
    while abreast > 1 and _tiles(seg_start, abreast) < slots:
        abreast //= 2
    tiles = _tiles(seg_start, abreast)
    multiplications = 0
    for segment in range(seg_start.size - 1):
        rows = seg_start[segment + 1] - seg_start[segment]
        multiplications += rows * (seg_pos[segment] + rows) * heads * width
    # As many heads together as registers hold, unless that leaves threads without a task.
    head_vectors = (heads + 15) // 16
    vectors = min(TILE_VECTORS, (head_vectors * tiles + slots - 1) // slots, head_vectors)
    groups = (head_vectors + vectors - 1) // vectors
    row_bytes = row_bytes_of(width, latent_bytes)
    pages = Pages(page_addr, page_start, page_tokens, layer_offset, kv_lora, width, latent_bytes, row_bytes)
    attention = Attention(q, scale, heads, kv_lora, seg_start, seg_pos, pages, out, vectors, abreast, pairs)
    counter = (addr(scratch, 0) + LINE_BYTES - 1) // LINE_BYTES * LINE_BYTES
    atomic_store(counter, 0)
    arguments = (attention, tiles * groups, groups, counter, counter + LINE_BYTES)
    parallel_for(min(slots, tiles * groups), multiplications > SPREAD_WORK, _worker, arguments)
