"""One line of lanes of latent attention: its memory, its share of a split of latents, and its outputs.

A row's lanes are its heads; a line is any run of lanes of a segment, those of the next row after those of the one
before, as `q` and `out` have them. So lines are full whatever the number of heads, and rows stand abreast in them.

Each row of a line sees one token more than the one before. Of a split, all lanes see the tokens up to the first row's
own; each later one is seen by the lanes from some lane on. There sums are taken by those lanes only, in the same order:
a lane's bits are what they are alone, and what a token that it does not see holds can not reach it. (Its scores of such
tokens are computed, with those of the other lanes, and dropped.)
"""

from typing import Any, NamedTuple

from serai.kernels.compile import inline
from serai.kernels.lanes import LINE_BYTES, store_lanes
from serai.kernels.latents import Pages
from serai.kernels.mathfn import exp16
from serai.kernels.memory import addr, f32_at, store_at
from serai.kernels.mla_pairs import (
    PAIR_ROOM,
    SPLIT,
    pair_queries,
    pair_row_bytes,
    pair_rows,
    paired_weights,
    raw_pitch_bytes,
    weight_at,
)
from serai.kernels.simd import first_n, fma, select, splat_f32, vmax
from serai.kernels.tiles import TILE_NUMBERS, TILE_VECTORS, scaled_transpose_16, tile_product, transpose_16

LINES = 4
"""Lines that share a loaded split of latents, at most. Decides no bits."""

_LOWEST = float("-inf")


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
    """Vectors of a line."""
    lines: Any
    """Lines that one task takes."""
    pairs: Any
    """Whether products are of pairs of bfloat16."""


class Scratch(NamedTuple):
    """One worker's memory; byte addresses, all on lines of cache."""

    latents: Any
    """`[SPLIT, pitch]` float32; as pairs, the rows in bfloat16 and then the tokens side by side."""
    weights: Any
    """`[SPLIT, vectors, 16]`: scores, then p."""
    factors: Any
    """`[2, vectors, 16]` of a merge."""
    lines: Any
    """For each line: queries `[width, vectors, 16]`, sums `[kv_lora, vectors, 16]`, m, sum of p."""


class Line(NamedTuple):
    """A run of lanes, and the addresses of its memory: see `Scratch.lines`."""

    lane: Any
    """The first one: row * heads + head."""
    lanes: Any
    vectors: Any
    """That these lanes take; the last one may have lanes left, whose queries are zero."""
    head: Any
    """Of the first lane."""
    position: Any
    """Of the first lane's row in its session."""
    queries: Any
    sums: Any
    largest: Any
    total: Any


class Seen(NamedTuple):
    """What a line's lanes see of a split."""

    by_all: Any
    """Tokens that all lanes see."""
    by_some: Any
    """Tokens that at least the last lane sees."""
    left: Any
    """The first `left + n * heads` lanes don't see token n; all do if that is not above 0."""
    heads: Any


@inline
def pitch_floats(width: int) -> int:
    """Floats from one latent to the next: an odd number of lines, so that a column of them uses all cache sets."""
    return ((width + 15) // 16 | 1) * 16


@inline
def _line_floats(width: int, kv_lora: int, vectors: int) -> int:
    return ((width + 15) // 16 * 16 + (kv_lora + 15) // 16 * 16 + 2) * vectors * 16


@inline
def slot_floats(width: int, kv_lora: int, vectors: int) -> int:
    """Floats of one worker's memory."""
    shared = SPLIT * (pitch_floats(width) + PAIR_ROOM) + (SPLIT + TILE_NUMBERS + 2) * vectors * 16
    return shared + LINES * _line_floats(width, kv_lora, vectors)


def mla_scratch_floats(kv_lora: int, rope: int, thread_count: int) -> int:
    """Length of the float32 `scratch` of `attend`. Nothing needs to be in it, and nothing of use is left in it."""
    width, lanes = kv_lora + rope, TILE_VECTORS * 16
    pitch = (-(-width // 16) | 1) * 16
    line = (-(-width // 16) * 16 + -(-kv_lora // 16) * 16 + 2) * lanes
    return 32 + thread_count * (SPLIT * (pitch + PAIR_ROOM) + (SPLIT + TILE_NUMBERS + 2) * lanes + LINES * line)


@inline
def scratch_at(a: Attention, start: int) -> Any:
    """A worker's memory, from an address on."""
    lane_bytes = a.vectors * LINE_BYTES
    weights = start + SPLIT * 4 * (pitch_floats(a.pages.width) + PAIR_ROOM)
    factors = weights + (SPLIT + TILE_NUMBERS) * lane_bytes
    return Scratch(start, weights, factors, factors + 2 * lane_bytes)


@inline
def line_at(a: Attention, s: Scratch, segment: int, first: int, lanes: int, number: int) -> Any:
    """The `number`-th line of a task whose lanes are `lanes` from `first` on, counted from the segment's first row."""
    before = number * a.vectors * 16
    here = min(lanes - before, a.vectors * 16)
    row, head = (first + before) // a.heads, (first + before) % a.heads
    vectors = (here + 15) // 16
    lane = (a.seg_start[segment] + row) * a.heads + head
    lane_bytes = vectors * LINE_BYTES
    queries = s.lines + number * 4 * _line_floats(a.pages.width, a.kv_lora, a.vectors)
    sums = queries + (a.pages.width + 15) // 16 * 16 * lane_bytes
    largest = sums + (a.kv_lora + 15) // 16 * 16 * lane_bytes
    return Line(lane, here, vectors, head, a.seg_pos[segment] + row, queries, sums, largest, largest + lane_bytes)


@inline
def transpose_queries(a: Attention, s: Scratch, line: Line) -> None:
    """The lanes' queries as `[width, vectors, 16]`, or as pairs; those of lanes that don't exist are zero."""
    width, lane_bytes = a.pages.width, line.vectors * LINE_BYTES
    for v in range(line.vectors):
        source, target = addr(a.q, (line.lane + 16 * v) * width), line.queries + v * LINE_BYTES
        lanes = line.lanes - 16 * v
        if a.pairs:
            pair_queries(source, width, lanes, s.latents, target, lane_bytes)
        else:
            for d in range(0, width, 16):
                transpose_16(source + 4 * d, 4 * width, lanes, width - d, target + d * lane_bytes, lane_bytes)


@inline
def attend_split(a: Attention, s: Scratch, line: Line, first: int) -> None:
    """Take what the line sees of the loaded split, from token `first` on, into its sums, m and sum of p."""
    last = line.position + (line.head + line.lanes - 1) // a.heads
    by_all = min(max(line.position + 1 - first, 0), SPLIT)
    by_some = min(last + 1 - first, SPLIT)
    if by_some > 0:
        seen = Seen(by_all, by_some, (first - line.position) * a.heads - line.head, a.heads)
        _scores(a, s, line, by_some)
        _softmax(a, s, line, seen, first == 0)
        _values(a, s, line, seen, first == 0)


@inline
def _scores(a: Attention, s: Scratch, line: Line, count: int) -> None:
    """Unscaled scores of the first `count` latents (and of the rest of the last tile) to the weights."""
    lane_bytes, pitch_bytes, steps = line.vectors * LINE_BYTES, 4 * pitch_floats(a.pages.width), a.pages.width
    if a.pairs:
        pitch_bytes, steps = raw_pitch_bytes(steps), (steps + 1) // 2
    for n in range(0, count, TILE_NUMBERS):
        latent, target = s.latents + n * pitch_bytes, s.weights + n * lane_bytes
        numbers = (latent, pitch_bytes, 4)
        tile_product(a.pairs, line.vectors, numbers, line.queries, lane_bytes, steps, (0, 0, 0), target, 0)


@inline
def _softmax(a: Attention, s: Scratch, line: Line, seen: Seen, is_first: bool) -> None:
    """Scores to p, and the factors that merge this split with those before; updates the line's m and sum of p."""
    lane_bytes = line.vectors * LINE_BYTES
    scale = splat_f32(a.scale)
    for v in range(line.vectors):
        scores, place = s.weights + v * LINE_BYTES, v * LINE_BYTES
        here = Seen(seen.by_all, seen.by_some, seen.left - 16 * v, seen.heads)
        peak = splat_f32(_LOWEST)
        for n in range(here.by_all):
            peak = vmax(f32_at(scores + n * lane_bytes), peak)
        for n in range(here.by_all, here.by_some):
            larger = vmax(f32_at(scores + n * lane_bytes), peak)
            peak = select(first_n(here.left + n * here.heads), peak, larger)
        peak = peak * scale
        if a.pairs:
            split_sum = paired_weights(scores, lane_bytes, here, scale, peak)
        else:
            split_sum = splat_f32(0.0)
            for n in range(here.by_some):
                p = weight_at(scores, lane_bytes, n, here, scale, peak)
                store_at(scores + n * lane_bytes, p)
                split_sum = split_sum + p
        if is_first:
            store_at(line.largest + place, peak)
            store_at(line.total + place, split_sum)
        else:
            # A lane that sees nothing of the split adds 0 * -0 to its sums as they are: so not even a zero's sign goes.
            none = first_n(here.left)
            before = f32_at(line.largest + place)
            now = select(none, before, vmax(before, peak))
            old, new = exp16(before - now), select(none, splat_f32(-0.0), exp16(peak - now))
            store_at(line.largest + place, now)
            store_at(line.total + place, fma(split_sum, new, f32_at(line.total + place) * old))
            store_at(s.factors + place, old)
            store_at(s.factors + lane_bytes + place, new)


@inline
def _values(a: Attention, s: Scratch, line: Line, seen: Seen, is_first: bool) -> None:
    """Sum of p * latent over the latents that a lane sees, merged into the line's sums."""
    lane_bytes, pitch_bytes, latents = line.vectors * LINE_BYTES, 4 * pitch_floats(a.pages.width), s.latents
    factors = 0 if is_first else s.factors
    steps, more = seen.by_all, seen.by_some - seen.by_all
    parted = (more, seen.left + steps * seen.heads, seen.heads)
    if a.pairs:
        latents, pitch_bytes = pair_rows(s.latents, a.pages.width), pair_row_bytes(a.kv_lora)
        steps, more = seen.by_all // 2, (seen.by_some + 1) // 2 - seen.by_all // 2
        parted = (more, seen.left + 2 * steps * seen.heads, seen.heads)
    for d in range(0, a.kv_lora, TILE_NUMBERS):
        numbers, target = (latents + 4 * d, 4, pitch_bytes), line.sums + d * lane_bytes
        tile_product(a.pairs, line.vectors, numbers, s.weights, lane_bytes, steps, parted, target, factors)


@inline
def finish(a: Attention, s: Scratch, line: Line) -> None:
    """Divide by the sum of p and write the lanes' rows of `out`."""
    lane_bytes = line.vectors * LINE_BYTES
    square, row_bytes = s.weights, 4 * a.kv_lora
    for v in range(line.vectors):
        inverse = splat_f32(1.0) / f32_at(line.total + v * LINE_BYTES)
        lanes = min(16, line.lanes - 16 * v)
        for d in range(0, a.kv_lora, 16):
            column = line.sums + d * lane_bytes + v * LINE_BYTES
            place, dims = addr(a.out, (line.lane + 16 * v) * a.kv_lora + d), min(16, a.kv_lora - d)
            if lanes == 16 and dims == 16:
                scaled_transpose_16(column, lane_bytes, 16, 16, place, row_bytes, inverse)
            else:
                scaled_transpose_16(column, lane_bytes, dims, 16, square, LINE_BYTES, inverse)
                for lane in range(lanes):
                    store_lanes(place + lane * row_bytes, f32_at(square + lane * LINE_BYTES), dims)
