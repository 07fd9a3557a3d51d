"""The latents that MLA keeps of each token, in pages of float32 or bfloat16.

A page is `[n_mla layers, page_tokens, width]`, width = kv_lora + rope: the normed latent, then the dims that all
heads share (unrotated in these models). Token t of segment s is in page `page_addr[page_start[s] + t //
page_tokens]`, row t % page_tokens of its layer. How many tokens a page holds decides no bits.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from serai.kernels import threads
from serai.kernels.compile import inline, kernel
from serai.kernels.lanes import load_lanes, store_lanes, sum_of_squares
from serai.kernels.memory import addr, store_at, store_at_n, u16_at, u16_at_n
from serai.kernels.norms import SPREAD_FLOATS, inverse_rms
from serai.kernels.simd import bf16_to_f32, f32_to_bf16, splat_f32
from serai.kernels.threads import parallel_for

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

BF16_BYTES = 2


class Pages(NamedTuple):
    """Where a layer's latents are; see the file's docstring. `layer_offset` counts elements from a page's start."""

    page_addr: Any
    page_start: Any
    page_tokens: Any
    layer_offset: Any
    width: Any
    latent_bytes: Any


@inline
def latent_address(pages: Pages, segment: int, token: int) -> Any:
    """Byte address of a token's latent."""
    page = pages.page_addr[pages.page_start[segment] + token // pages.page_tokens]
    row = pages.layer_offset + token % pages.page_tokens * pages.width
    return page + row * pages.latent_bytes


@inline
def load_latent(source: int, latent_bytes: int, width: int, target: int) -> None:
    """One latent widened to float32 (exactly) at `target`."""
    for c in range(0, width, 16):
        n = width - c
        if latent_bytes != BF16_BYTES:
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
def _store_row(
    row: int, proj: Any, col: int, norm_w: Any, eps: float, seg_start: Any, seg_pos: Any, pages: Pages
) -> None:
    segment = segment_of(row, seg_start)
    target = latent_address(pages, segment, seg_pos[segment] + row - seg_start[segment])
    source = addr(proj, row * proj.shape[1] + col)
    kv_lora = norm_w.size
    scale = inverse_rms(sum_of_squares(source, kv_lora), kv_lora, eps)
    for c in range(0, kv_lora, 16):
        n = kv_lora - c
        normed = load_lanes(source + 4 * c, n) * splat_f32(scale) * load_lanes(addr(norm_w, c), n)
        _store_lanes_as(target, pages.latent_bytes, c, normed, n)
    for c in range(kv_lora, pages.width, 16):
        n = pages.width - c
        _store_lanes_as(target, pages.latent_bytes, c, load_lanes(source + 4 * c, n), n)


@kernel(
    "void(f32[:, ::1], i64, f32[::1], f32, i64, i64[::1], i64[::1], i64[::1], i64[::1], i64, i64, i64)",
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
    layer_offset: int,
    latent_bytes: int,
) -> None:
    """Write the latents of R rows: `norm_w.size` columns of `proj` from `col` normed, the next `rope` as they are.

    Row r of segment s is token seg_pos[s] + r - seg_start[s]. `layer_offset` is the layer's place in a page, in
    elements; `latent_bytes` is 4 (float32) or 2 (bfloat16: rounded to nearest even, NaN kept). Raises ValueError for
    another size.
    """
    if latent_bytes != 4 and latent_bytes != BF16_BYTES:
        raise ValueError("latents are float32 (4 bytes) or bfloat16 (2 bytes)")
    pages = Pages(page_addr, page_start, page_tokens, layer_offset, norm_w.size + rope, latent_bytes)
    spread = proj.shape[0] * pages.width > SPREAD_FLOATS
    arguments = (proj, col, norm_w, eps, seg_start, seg_pos, pages)
    parallel_for(proj.shape[0], spread, _store_row, arguments)
