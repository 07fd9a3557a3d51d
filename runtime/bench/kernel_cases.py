"""The kernels in Kimi K3's shapes, on random inputs, with what they move and compute: what `serai bench kernels` times.

Bytes are those that must cross the memory bus, as stored: weights, states and latents once, and what is written.
Operations are multiplications and additions of the products.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType
from serai.kernels.arrays import aligned, weight_array
from serai.kernels.kda import kda, kda_scratch_floats
from serai.kernels.kda_inputs import DECAY, DECAYED_KEY, DECAYED_QUERY, KEY, NUMBERS, VALUE
from serai.kernels.kda_pass import kda_step
from serai.kernels.lanes import LINE_BYTES
from serai.kernels.latents import store_latents
from serai.kernels.matmul import matmul
from serai.kernels.matmul_fast import matmul_fast
from serai.kernels.matrix import Format, Matrix
from serai.kernels.mla import attend
from serai.kernels.mla_line import mla_scratch_floats
from serai.kernels.moe import activate, combine, route
from serai.kernels.naive import q8_latents
from serai.kernels.norms import attn_res, rms_norm
from serai.kernels.quantize import Quantized, quantize_rows
from serai.kernels.threads import threads

HIDDEN, LATENT, INNER, HEADS, HEAD_DIM = 7168, 3584, 3072, 96, 128
KV_LORA, ROPE, PAGE_TOKENS = 512, 64, 64
EXPERTS, PICKS = 896, 16
WIDTH = HEADS * HEAD_DIM
LATENT_WIDTH = KV_LORA + ROPE
TOKEN_BYTES = LatentType.BFLOAT16.row_bytes(LATENT_WIDTH)
Q8_TOKEN_BYTES = LatentType.Q8.row_bytes(LATENT_WIDTH)
TOKEN_OPERATIONS = 2 * HEADS * (LATENT_WIDTH + KV_LORA)
"""What one cached token costs a decoded one, in one layer: its bfloat16 latent, and the products of all heads."""

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one input. `dot` is what its products use: "int8", "bfloat16", "float32" or none."""

    name: str
    run: Callable[[], None]
    nbytes: int = 0
    operations: int = 0
    dot: str = ""


def some(rows: int, columns: int, seed: int = 0) -> F32:
    """Normal numbers `[rows, columns]` on a line, a few million different ones at most."""
    count = rows * columns
    drawn = np.random.default_rng(seed).standard_normal(min(count, 1 << 22), dtype=np.float32)
    out = aligned(count, np.float32)
    out[:] = np.resize(drawn, count)
    return out.reshape(rows, columns)


def weights(weight_format: Format, nbytes: int, columns: int) -> Matrix:
    """Random weights of about so many bytes, laid out as they would be after loading."""
    column_bits = {Format.BF16: 16, Format.MXFP4: 4.25, Format.Q8: 8.5}[weight_format]
    rows = max(1, round(nbytes * 8 / (columns * column_bits) / 64)) * 64
    rng = np.random.default_rng(1)
    groups = rows // 16 * (columns // 32)
    if weight_format is Format.BF16:
        data = weight_array(rows * columns, np.uint16)
        data[:] = np.resize((some(1, 1 << 20).view(np.uint32)[0] >> 16).astype(np.uint16), data.size)
        return Matrix(weight_format, 1, rows, columns, data, np.empty(0, np.uint8))
    is_q8 = weight_format is Format.Q8
    data = weight_array(groups * (512 if is_q8 else 256), np.uint8)
    data[:] = np.resize(rng.integers(0, 256, 1 << 22, dtype=np.uint8), data.size)
    scales = weight_array(groups * 16 * (2 if is_q8 else 1), np.uint8)
    if is_q8:
        scales.view(np.uint16)[:] = 0x3C00
    else:
        scales[:] = 120
    return Matrix(weight_format, 1, rows, columns, data, scales)


def _prepared(heads: int) -> F32:
    """Prepared tokens of that many heads, as `kda_step` takes them: unit keys and queries, decays of 0.9 to 1."""
    tokens = aligned(heads * (NUMBERS * HEAD_DIM + LINE_BYTES // 4), np.float32).reshape(heads, -1)
    k, q, a, v = (some(heads, HEAD_DIM, seed) for seed in (5, 6, 7, 8))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    a = np.float32(1) - np.abs(a).clip(0, 1) * np.float32(0.1)
    for row, values in ((DECAY, a), (KEY, k), (DECAYED_KEY, a * k), (DECAYED_QUERY, a * q), (VALUE, v)):
        tokens[:, row * HEAD_DIM : (row + 1) * HEAD_DIM] = values
    tokens[:, NUMBERS * HEAD_DIM :] = 0
    tokens[:, NUMBERS * HEAD_DIM] = 0.5
    tokens[:, NUMBERS * HEAD_DIM + 1] = (q * k).sum(axis=1)
    return tokens


def fast_product(name: str, w: Matrix, rows: int) -> Case:
    """Products with activations quantised before."""
    x = Quantized.empty(rows, w.cols)
    quantize_rows(some(rows, w.cols), 0, x)
    out = some(rows, w.rows)
    return Case(name, lambda: matmul_fast(x, w, out, 0), w.nbytes + out.nbytes, 2 * rows * w.rows * w.cols, "int8")


def exact_product(name: str, w: Matrix, rows: int) -> Case:
    """Products with float32 activations."""
    x, out = some(rows, w.cols), some(rows, w.rows)
    return Case(name, lambda: matmul(x, 0, w, out, 0), w.nbytes + out.nbytes, 2 * rows * w.rows * w.cols, "float32")


class KdaLayers:
    """Layers of Kimi Delta Attention with a session's state before and after; `rows` tokens a call."""

    def __init__(self, layers: int, heads: int, rows: int) -> None:
        self.layers, self.heads, self.rows = layers, heads, rows
        self.width = heads * HEAD_DIM
        self.state_floats = self.width * HEAD_DIM
        self.tail_floats = 9 * self.width
        self._block_floats = layers * (self.state_floats + self.tail_floats)
        self.before, self.after = (self._block() for _ in range(2))
        self._from, self._to = (np.array([block.ctypes.data], np.int64) for block in (self.before, self.after))
        self._projected = some(rows, 5 * self.width + heads, seed=2)
        self._out = some(rows, self.width)
        self._conv = some(12, self.width, seed=3).reshape(3, 4, self.width) * np.float32(0.5)
        rng = np.random.default_rng(4)
        self._rate = rng.uniform(1, 16, heads).astype(np.float32)
        self._bias = np.full(self.width, -3, np.float32)
        self._norm = np.ones(HEAD_DIM, np.float32)
        self._scratch = aligned(kda_scratch_floats(HEAD_DIM, threads()), np.float32)
        self._starts = np.array([0, rows], np.int64)
        self._tokens = _prepared(heads)

    def _block(self) -> F32:
        block = aligned(self._block_floats, np.float32)
        block[:] = np.resize(some(1, 1 << 20)[0] * np.float32(0.05), block.size)
        return block

    def step(self, layer: int) -> None:
        """All rows through one layer, from `before` to `after`."""
        width, projected = self.width, self._projected
        kda(
            projected,
            0,
            width,
            2 * width,
            projected,
            3 * width,
            projected,
            5 * width,
            projected,
            4 * width,
            self._conv,
            self._rate,
            self._bias,
            self._norm,
            1e-5,
            -5.0,
            self.heads,
            HEAD_DIM,
            self._starts,
            self._from,
            self._to,
            layer * self.state_floats,
            self.layers * self.state_floats + layer * self.tail_floats,
            self._out,
            0,
            self._scratch,
        )

    def step_all(self) -> None:
        for layer in range(self.layers):
            self.step(layer)

    def recur_all(self) -> None:
        """A token that is prepared already through all layers' states: no convolutions, norms or gates."""
        for layer in range(self.layers):
            at = 4 * layer * self.state_floats
            kda_step(self._tokens, HEAD_DIM, int(self._from[0]) + at, int(self._to[0]) + at)

    def swap(self) -> None:
        self.before, self.after = self.after, self.before
        self._from, self._to = self._to, self._from

    @property
    def nbytes(self) -> int:
        """State and convolution tails of all layers, read and written."""
        return 2 * 4 * self._block_floats

    @property
    def state_bytes(self) -> int:
        """State of all layers without the tails, read and written."""
        return 2 * 4 * self.layers * self.state_floats

    @property
    def operations(self) -> int:
        """Two products with the state and the update (k u' after the decay), a token."""
        return self.rows * self.layers * self.state_floats * 8


class Attention:
    """One layer of latent attention as `fast` has it: `rows` new tokens over `context` latents, theirs too, which are
    bfloat16 or 8-bit codes."""

    def __init__(self, context: int, rows: int = 1, *, coded: bool = False) -> None:
        self.context, self.rows = context, rows
        self.token_bytes = Q8_TOKEN_BYTES if coded else TOKEN_BYTES
        pages = -(-context // PAGE_TOKENS)
        self._pages = aligned(pages * PAGE_TOKENS * self.token_bytes, np.uint8)
        tokens = self._pages.reshape(-1, self.token_bytes)
        tokens[:] = _coded_latents(len(tokens)) if coded else _bf16_latents(len(tokens))
        page_bytes = PAGE_TOKENS * self.token_bytes
        self._addresses = self._pages.ctypes.data + np.arange(pages, dtype=np.int64) * page_bytes
        self._queries = some(rows, HEADS * LATENT_WIDTH)
        self._projected = some(rows, LATENT_WIDTH)
        self._norm = np.ones(KV_LORA, np.float32)
        self._out = some(rows, HEADS * KV_LORA)
        self._scratch = aligned(mla_scratch_floats(KV_LORA, ROPE, threads()), np.float32)
        starts, position = np.array([0, rows], np.int64), np.array([context - rows], np.int64)
        page_start = np.array([0, pages], np.int64)
        form = (self.token_bytes, 1 if coded else 2)
        self._where = (starts, position, self._addresses, page_start, PAGE_TOKENS, 0, *form)

    def run(self) -> None:
        attend(self._queries, 192**-0.5, HEADS, KV_LORA, ROPE, *self._where, True, self._out, self._scratch)

    def store(self) -> None:
        store_latents(self._projected, 0, self._norm, 1e-5, ROPE, *self._where)

    @property
    def seen(self) -> int:
        """Tokens that the rows attend to, all together."""
        return self.rows * (self.context - self.rows) + self.rows * (self.rows + 1) // 2

    @property
    def expanded_operations(self) -> int:
        """What the form with a key and a value a head would take: fewer products, once all latents are expanded."""
        return 2 * HEADS * ((192 + 128) * self.seen + (128 + 128) * KV_LORA * self.context)

    def case(self, name: str) -> Case:
        return Case(name, self.run, self.context * self.token_bytes, self.seen * TOKEN_OPERATIONS, "bfloat16")


def _bf16_latents(tokens: int) -> NDArray[np.uint8]:
    """Normal numbers, a page of different ones."""
    drawn = (some(PAGE_TOKENS, LATENT_WIDTH).view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(drawn.view(np.uint8), (tokens, TOKEN_BYTES))


def _coded_latents(tokens: int) -> NDArray[np.uint8]:
    """The same as codes and scales."""
    codes, scales = q8_latents(some(PAGE_TOKENS, LATENT_WIDTH), KV_LORA)
    drawn = np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=1)
    return np.resize(drawn, (tokens, Q8_TOKEN_BYTES))


def other_cases(weight_bytes: int) -> Iterator[Case]:
    """What the claims do not speak of."""
    yield exact_product("bf16 x float32, 1 row", weights(Format.BF16, weight_bytes, HIDDEN), 1)
    small = weights(Format.BF16, 32 << 20, HIDDEN)
    yield exact_product("bf16 x float32, 64 rows", small, 64)
    w = weights(Format.MXFP4, 12 << 20, LATENT)
    for rows in (4, 16):
        yield fast_product(f"mxfp4 x 8-bit, {rows} rows", w, rows)
    layer = KdaLayers(1, HEADS, 64)
    yield Case("kda, 64 tokens, one layer", layer.step_all, layer.nbytes, layer.operations, "float32")
    attention = Attention(4096, 16)
    yield attention.case("mla, 16 rows at 4096 tokens")
    yield Case("mla, store 16 latents", attention.store, 16 * LATENT_WIDTH * 6)
    yield from _row_cases(64)


def _row_cases(rows: int) -> Iterator[Case]:
    x, out, norm = some(rows, HIDDEN), some(rows, HIDDEN, 1), np.ones(HIDDEN, np.float32)
    yield Case(f"rms norm, {rows} rows", lambda: rms_norm(x, 0, HIDDEN, norm, 1e-5, out, 0), x.nbytes + out.nbytes)
    blocks = some(9 * rows, HIDDEN).reshape(9, rows, HIDDEN)
    yield Case(
        f"attention residuals over 8 blocks, {rows} rows",
        lambda: attn_res(blocks, 8, blocks[8], True, norm, 1e-5, norm, 1e-5, out),
        blocks.nbytes + out.nbytes,
    )
    q = Quantized.empty(rows, HIDDEN)
    yield Case(f"quantise to 8 bits, {rows} rows", lambda: quantize_rows(x, 0, q), x.nbytes + q.nbytes)
    scores, bias = some(rows, EXPERTS), np.zeros(EXPERTS, np.float32)
    picks, shares = np.empty((rows, PICKS), np.int32), np.empty((rows, PICKS), np.float32)
    yield Case(
        f"route {rows} rows to {PICKS} of {EXPERTS}",
        lambda: route(scores, 0, bias, PICKS, 1, 1, True, 2.5, picks, shares),
        scores.nbytes,
    )
    each, mixed = some(rows * PICKS, LATENT), some(rows, LATENT, 1)
    yield Case(f"combine experts, {rows} rows", lambda: combine(each, shares, mixed), each.nbytes + mixed.nbytes)
    gate_up, inner = some(rows, 2 * INNER), some(rows, INNER, 1)
    situ: Any = SimpleNamespace(situ_beta=4.0, situ_linear_beta=25.0)
    yield Case(
        f"SiTU, {rows} rows",
        lambda: activate(gate_up, 0, INNER, INNER, situ, inner, 0),
        gate_up.nbytes + inner.nbytes,
    )
