"""The latents that MLA keeps of each token, in pages of float32, bfloat16 or 8-bit codes.

A page is `[n_mla layers, page_tokens, row]`, a row of width = kv_lora + rope numbers: the normed latent, then the dims
that all heads share (unrotated in these models). Token t of segment s is in page `page_addr[page_start[s] + t //
page_tokens]`, row t % page_tokens of its layer. How many tokens a page holds decides no bits, and how many bytes lie
between two rows is the caller's to say (`StateLayout`), who makes the pages.

Rows of 8-bit codes (`naive.q8_latents`) are int8 `[width]`, then the float32 scales of the normed latent and of the
shared dims. These have one of their own because they are not normed: in the nano model they are eight times as large,
and one scale for both would put the normed latent off by 4.8 % instead of 0.7 %.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import load_lanes, store_lanes, sum_of_squares
from serai.kernels.memory import (
    addr,
    i8_at,
    i8_at_n,
    scalar_f32_at,
    store_at,
    store_at_n,
    store_scalar_f32_at,
    u16_at,
    u16_at_n,
)
from serai.kernels.naive import Q8_LARGEST, Q8_LEAST_PEAK
from serai.kernels.norms import SPREAD_FLOATS, inverse_rms
from serai.kernels.simd import any_of, bf16_to_f32, f32_to_bf16, hmax, round_i32, splat_f32, to_f32, to_i8, vabs, vmax
from serai.kernels.threads import parallel_for

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

BF16_BYTES, Q8_BYTES = 2, 1

_NAN = float("nan")


class Pages(NamedTuple):
    """Where a layer's latents are; see the file's docstring."""

    page_addr: Any
    page_start: Any
    page_tokens: Any
    layer: Any
    row_bytes: Any
    latent_bytes: Any
    kv_lora: Any
    width: Any


@inline
def latent_address(pages: Pages, segment: int, token: int) -> Any:
    """Byte address of a token's latent."""
    page = pages.page_addr[pages.page_start[segment] + token // pages.page_tokens]
    return page + (pages.layer * pages.page_tokens + token % pages.page_tokens) * pages.row_bytes


@inline
def decoded(source: int, scale: Any, n: int) -> Any:
    """The numbers that the next sixteen codes stand for, or the `n` that are left and zeros."""
    codes = i8_at(source) if n >= 16 else i8_at_n(source, n)
    return to_f32(codes) * splat_f32(scale)


@inline
def scales_of(source: int, width: int) -> Any:
    """The scales of a row of codes: that of the normed latent and that of the shared dims."""
    return scalar_f32_at(source + width), scalar_f32_at(source + width + 4)


@inline
def load_latent(source: int, pages: Pages, target: int) -> None:
    """One latent widened to float32 at `target`: exactly, or the product of a code and its scale."""
    width, kv_lora = pages.width, pages.kv_lora
    if pages.latent_bytes == Q8_BYTES:
        normed, shared = scales_of(source, width)
        for c in range(0, kv_lora, 16):
            store_lanes(target + 4 * c, decoded(source + c, normed, kv_lora - c), kv_lora - c)
        for c in range(kv_lora, width, 16):
            store_lanes(target + 4 * c, decoded(source + c, shared, width - c), width - c)
        return
    for c in range(0, width, 16):
        n = width - c
        if pages.latent_bytes != BF16_BYTES:
            store_lanes(target + 4 * c, load_lanes(source + 4 * c, n), n)
        elif n >= 16:
            store_at(target + 4 * c, bf16_to_f32(u16_at(source + BF16_BYTES * c)))
        else:
            store_at_n(target + 4 * c, bf16_to_f32(u16_at_n(source + BF16_BYTES * c, n)), n)


@inline
def _store_lanes_as(target: int, latent_bytes: int, c: int, v: Any, n: int) -> None:
    """Store up to 16 values as elements c.. of a latent, rounding to nearest even if it is bfloat16."""
    if latent_bytes != BF16_BYTES:
        store_lanes(target + 4 * c, v, n)
    elif n >= 16:
        store_at(target + BF16_BYTES * c, f32_to_bf16(v))
    else:
        store_at_n(target + BF16_BYTES * c, f32_to_bf16(v), n)


@inline
def segment_of(row: int, seg_start: Any) -> Any:
    """The segment that a row of the batch belongs to."""
    segment = 0
    while seg_start[segment + 1] <= row:
        segment += 1
    return segment


@inline
def _latent_lanes(source: int, norm_w: Any, scale: Any, c: int, n: int) -> Any:
    """Elements c.. of a latent, up to sixteen and of one part: a projected number normed, or as it is."""
    values = load_lanes(source + 4 * c, n)
    if c < norm_w.size:
        return values * splat_f32(scale) * load_lanes(addr(norm_w, c), n)
    return values


@inline
def _store_codes(source: int, norm_w: Any, scale: Any, first: int, last: int, codes: int, at: int) -> None:
    """Elements first..last of a latent, which are one part of it, as `codes`, and their scale at an address."""
    largest, odd = splat_f32(0.0), splat_f32(0.0)
    for c in range(first, last, 16):
        values = _latent_lanes(source, norm_w, scale, c, last - c)
        largest = vmax(vabs(values), largest)
        odd = odd + (values - values)  # stays 0 but for infinities and NaN
    peak = hmax(largest)
    inverse, unit = np.float32(0.0), np.float32(0.0)
    is_spoilt = any_of(odd != 0.0)
    if is_spoilt:
        unit = np.float32(_NAN)
    elif peak > Q8_LEAST_PEAK:
        inverse, unit = Q8_LARGEST / peak, peak / Q8_LARGEST
    for c in range(first, last, 16):
        n = last - c
        values = splat_f32(0.0) if is_spoilt else _latent_lanes(source, norm_w, scale, c, n)
        if n >= 16:
            store_at(codes + c, to_i8(round_i32(values * splat_f32(inverse))))
        else:
            store_at_n(codes + c, to_i8(round_i32(values * splat_f32(inverse))), n)
    store_scalar_f32_at(at, unit)


@inline
def _store_row(
    row: int, proj: Any, col: int, norm_w: Any, eps: float, seg_start: Any, seg_pos: Any, pages: Pages
) -> None:
    segment = segment_of(row, seg_start)
    target = latent_address(pages, segment, seg_pos[segment] + row - seg_start[segment])
    source = addr(proj, row * proj.shape[1] + col)
    kv_lora, width = pages.kv_lora, pages.width
    scale = inverse_rms(sum_of_squares(source, kv_lora), kv_lora, eps)
    if pages.latent_bytes == Q8_BYTES:
        _store_codes(source, norm_w, scale, 0, kv_lora, target, target + width)
        _store_codes(source, norm_w, scale, kv_lora, width, target, target + width + 4)
        return
    for c in range(0, kv_lora, 16):
        n = kv_lora - c
        _store_lanes_as(target, pages.latent_bytes, c, _latent_lanes(source, norm_w, scale, c, n), n)
    for c in range(kv_lora, width, 16):
        n = width - c
        _store_lanes_as(target, pages.latent_bytes, c, _latent_lanes(source, norm_w, scale, c, n), n)


@inline
def check_latents(latent_bytes: int, width: int, row_bytes: int) -> None:
    """Raises ValueError for a size that no form of latents has, and where rows so far apart would overlap."""
    if latent_bytes != 4 and latent_bytes != BF16_BYTES and latent_bytes != Q8_BYTES:
        raise ValueError("latents are float32 (4 bytes), bfloat16 (2 bytes) or 8-bit codes (1 byte)")
    if row_bytes < width * latent_bytes + (8 if latent_bytes == Q8_BYTES else 0):
        raise ValueError(
            "a latent, with its two scales if it has some, takes more bytes than there are to the next one"
        )


@kernel(
    "void(f32[:, ::1], i64, f32[::1], f32, i64, i64[::1], i64[::1], i64[::1], i64[::1], i64, i64, i64, i64)",
    before=threads.start,
)
def store_latents(
    proj: F32,
    col: int,
    norm_w: F32,
    eps: float,
    rope: int,
    seg_start: I64,
    seg_pos: I64,
    page_addr: I64,
    page_start: I64,
    page_tokens: int,
    layer: int,
    row_bytes: int,
    latent_bytes: int,
) -> None:
    """Write the latents of R rows: `norm_w.size` columns of `proj` from `col` normed, the next `rope` as they are.

    Row r of segment s is token seg_pos[s] + r - seg_start[s]. `layer` is the layer's number in a page, `row_bytes` are
    from one token's latent to the next; `latent_bytes` is 4 (float32), 2 (bfloat16: rounded to nearest even, NaN kept)
    or 1 (8-bit codes; a part of a latent with an infinity or NaN has a NaN scale). Raises ValueError for another size.
    """
    kv_lora, width = norm_w.size, norm_w.size + rope
    check_latents(latent_bytes, width, row_bytes)
    pages = Pages(page_addr, page_start, page_tokens, layer, row_bytes, latent_bytes, kv_lora, width)
    spread = proj.shape[0] * pages.width > SPREAD_FLOATS
    arguments = (proj, col, norm_w, eps, seg_start, seg_pos, pages)
    parallel_for(proj.shape[0], spread, _store_row, arguments)
