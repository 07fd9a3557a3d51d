"""Latents, queries and weights of attention as pairs of bfloat16, two terms of a sum in each 32-bit lane.

Scores sum over the dims of a latent: its row as stored is a row of pairs (8-bit codes become one, their products with
the scale rounded to bfloat16), and queries are rounded and paired to match. Dots of 8 bits could halve the work of
scores, a quarter of the whole, but want queries in 8 bits: these cost an output as much again as 8-bit latents do.

Outputs sum over tokens: the latents of two tokens are laid side by side once for all heads and rows of a task, and two
weights are rounded and paired. What is under 2^-50 becomes 0 (`kernels/tiles.py` says why); a weight has at most 1.
"""

from typing import Any

from serai.kernels.compile import inline
from serai.kernels.lanes import LINE_BYTES, load_lanes
from serai.kernels.latents import Q8_BYTES, Pages, decoded, latent_address, scales_of
from serai.kernels.mathfn import exp16
from serai.kernels.memory import f32_at, store_at, store_at_n, u16_at, u16_at_n
from serai.kernels.simd import bf16_to_f32, f32_to_bf16, first_n, select, splat_f32, to_u32
from serai.kernels.tiles import TILE_NUMBERS, operand_bf16, transpose_16

SPLIT = 128
"""Tokens between two merges: part of the definition of every bit. As float32, a split's latents (0.3 MB) fit an L2."""

PAIR_ROOM = 48
"""Floats a token that the two forms of a split's latents take at most beyond one float a dim."""

_SIZE_BITS = 0x7FFF
_LEAST_BITS = (127 - 50) << 7
"""2^-50 as bfloat16: `tiles.LEAST_HALF`."""


@inline
def raw_pitch_bytes(width: int) -> int:
    """From one latent to the next in scratch: an odd number of lines, so that a column of them uses all cache sets."""
    return (((width + 15) // 16 * 32 + LINE_BYTES - 1) // LINE_BYTES | 1) * LINE_BYTES


@inline
def pair_row_bytes(kv_lora: int) -> int:
    """From the side-by-side latents of two tokens to those of the next two."""
    return (kv_lora + 15) // 16 * LINE_BYTES


@inline
def _without_least(halves: Any) -> Any:
    return select((halves & _SIZE_BITS) < _LEAST_BITS, halves & 0, halves)


@inline
def pair_up(lower: Any, upper: Any) -> Any:
    """Two vectors of sixteen bfloat16 as sixteen pairs (u32)."""
    return to_u32(lower) | (to_u32(upper) << 16)


@inline
def round_half(v: Any) -> Any:
    """Sixteen floats as bfloat16, nearest even, and 0 for what is too small."""
    return _without_least(operand_bf16(v))


@inline
def pair_rows(latents: int, width: int) -> int:
    """Where in a split's scratch the rows of pairs of tokens start: after the rows in bfloat16."""
    return latents + SPLIT * raw_pitch_bytes(width)


@inline
def _load_raw(source: int, width: int, target: int) -> None:
    """A bfloat16 latent as it is but for what is too small, and zeros up to a multiple of 16."""
    for c in range(0, width, 16):
        n = width - c
        halves = u16_at(source + 2 * c) if n >= 16 else u16_at_n(source + 2 * c, n)
        store_at(target + 2 * c, _without_least(halves))


@inline
def _load_decoded(source: int, scale: Any, n: int, target: int) -> None:
    """`n` codes of one scale as bfloat16."""
    for c in range(0, n, 16):
        halves = round_half(decoded(source + c, scale, n - c))
        if n - c >= 16:
            store_at(target + 2 * c, halves)
        else:
            store_at_n(target + 2 * c, halves, n - c)


@inline
def _load_codes(source: int, kv_lora: int, width: int, target: int) -> None:
    """A latent of 8-bit codes as bfloat16, and zeros up to a multiple of 16."""
    normed, shared = scales_of(source, width)
    _load_decoded(source, normed, kv_lora, target)
    _load_decoded(source + kv_lora, shared, width - kv_lora, target + 2 * kv_lora)
    if width % 16:
        store_at_n(target + 2 * width, f32_to_bf16(splat_f32(0.0)), 16 - width % 16)


@inline
def _lay_pair(latents: int, pair: int, has_second: bool, kv_lora: int, width: int) -> None:
    """The row of pairs of tokens 2 * pair and 2 * pair + 1, or with 0 for one that is not there."""
    first = latents + 2 * pair * raw_pitch_bytes(width)
    second = first + raw_pitch_bytes(width)
    target = pair_rows(latents, width) + pair * pair_row_bytes(kv_lora)
    for c in range(0, kv_lora, 16):
        lower = u16_at(first + 2 * c)
        upper = u16_at(second + 2 * c) if has_second else lower & 0
        store_at(target + 4 * c, pair_up(lower, upper))


@inline
def load_pairs(pages: Pages, segment: int, first: int, count: int, kv_lora: int, latents: int) -> None:
    """Latents of `count` tokens from `first`, zeros to the end of the last tile, and their rows of pairs."""
    width, pitch = pages.width, raw_pitch_bytes(pages.width)
    for n in range(count):
        source = latent_address(pages, segment, first + n)
        if pages.latent_bytes == Q8_BYTES:
            _load_codes(source, kv_lora, width, latents + n * pitch)
        else:
            _load_raw(source, width, latents + n * pitch)
    for n in range(count, min((count + TILE_NUMBERS - 1) // TILE_NUMBERS * TILE_NUMBERS, SPLIT)):
        for c in range(0, pitch, LINE_BYTES):
            store_at(latents + n * pitch + c, splat_f32(0.0))
    for pair in range((count + 1) // 2):
        _lay_pair(latents, pair, 2 * pair + 1 < count, kv_lora, width)


@inline
def pair_queries(source: int, width: int, lanes: int, rows: int, target: int, lane_bytes: int) -> None:
    """Queries `[lanes, width]` of up to sixteen lanes, rounded, as steps of pairs `lane_bytes` apart.

    `rows`: memory for sixteen latents as `raw_pitch_bytes` has them. Other lanes of the vector are zero.
    """
    pitch = raw_pitch_bytes(width)
    for lane in range(min(lanes, 16)):
        for d in range(0, width, 16):
            halves = round_half(load_lanes(source + 4 * (lane * width + d), width - d))
            store_at(rows + lane * pitch + 2 * d, halves)
    pairs = (width + 1) // 2
    for j in range(0, pairs, 16):
        transpose_16(rows + 4 * j, pitch, lanes, pairs - j, target + j * lane_bytes, lane_bytes)


@inline
def weight_at(scores: int, lane_bytes: int, n: int, seen: Any, scale: Any, peak: Any) -> Any:
    """p = exp(score * scale - peak) of token n for a vector of lanes, and 0 for those that don't see it."""
    p = exp16(f32_at(scores + n * lane_bytes) * scale - peak)
    if n < seen.by_all:
        return p
    return select(first_n(seen.left + n * seen.heads), splat_f32(0.0), p)


@inline
def paired_weights(scores: int, lane_bytes: int, seen: Any, scale: Any, peak: Any) -> Any:
    """In place: scores of a vector of lanes to pairs of rounded p; gives the sum of p."""
    total = splat_f32(0.0)
    for n in range(0, seen.by_some, 2):
        lower = round_half(weight_at(scores, lane_bytes, n, seen, scale, peak))
        total = total + bf16_to_f32(lower)
        upper = lower & 0
        if n + 1 < seen.by_some:
            upper = round_half(weight_at(scores, lane_bytes, n + 1, seen, scale, peak))
            total = total + bf16_to_f32(upper)
        store_at(scores + n // 2 * lane_bytes, pair_up(lower, upper))
    return total
