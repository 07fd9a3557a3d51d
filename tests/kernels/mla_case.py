"""Sessions with random latents in pages, and the ways to run MLA over them."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.kernels import naive, threads
from serai.kernels.latents import store_latents
from serai.kernels.mla import attend
from serai.kernels.mla_line import mla_scratch_floats

F32 = NDArray[np.float32]
LAYERS, LAYER = 3, 1
"""Layers in a page, and the one under test; the others must stay NaN."""
BEHIND = 1024
"""Floats behind the scratch, which must stay NaN too."""


@dataclass
class Session:
    """A session: the kv_a projections and absorbed queries of its tokens, and pages that are NaN until stored."""

    heads: int
    kv_lora: int
    rope: int
    tokens: int
    page_tokens: int = 16
    latent_bytes: int = 4
    seed: int = 0
    score_scale: float = 0.1
    pairs: bool = False
    proj: F32 = field(init=False)
    queries: F32 = field(init=False)
    norm_w: F32 = field(init=False)
    pages: list[NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.proj = rng.standard_normal((self.tokens, self.width)).astype(np.float32)
        self.queries = rng.standard_normal((self.tokens, self.heads * self.width)).astype(np.float32)
        self.norm_w = (1 + 0.1 * np.random.default_rng(99).standard_normal(self.kv_lora)).astype(np.float32)
        self.forget()

    @property
    def width(self) -> int:
        return self.kv_lora + self.rope

    @property
    def row(self) -> int:
        """Elements of a page that a token takes in a layer: a number each, and two scales after 8-bit codes."""
        return self.width + (8 if self.latent_bytes == 1 else 0)

    @property
    def form(self) -> tuple[int, int, int, int]:
        """How the latents of the layer under test lie in a page, as the kernels want it told."""
        return self.page_tokens, LAYER, self.row * self.latent_bytes, self.latent_bytes

    def forget(self) -> None:
        """New pages, all NaN."""
        count = -(-self.tokens // self.page_tokens)
        unset = {4: np.float32(np.nan), 2: np.uint16(0x7FC0), 1: np.uint8(0xFF)}[self.latent_bytes]
        self.pages = [np.full((LAYERS, self.page_tokens, self.row), unset) for _ in range(count)]

    def latents(self) -> NDArray[Any]:
        """The layer's latents as stored, `[tokens, row]`."""
        return np.concatenate([page[LAYER] for page in self.pages])[: self.tokens]

    def widened(self) -> NDArray[np.float64]:
        return self.widen(self.latents()).astype(np.float64)

    def widen(self, rows: NDArray[Any]) -> F32:
        """The numbers that rows as stored `[n, row]` stand for, `[n, width]`."""
        if self.latent_bytes == 1:
            return naive.q8_widen(*self.coded(rows), self.kv_lora)
        return naive.bf16_widen(rows) if self.latent_bytes == 2 else rows

    def coded(self, rows: NDArray[np.uint8]) -> tuple[NDArray[np.int8], F32]:
        """The codes and the scales of rows of 8-bit latents."""
        scales = np.ascontiguousarray(rows[:, self.width :]).view(np.float32)
        return np.ascontiguousarray(rows[:, : self.width]).view(np.int8), scales

    def define(self, first: int, last: int) -> NDArray[np.float64]:
        """Outputs of tokens first..last by the definition in float64, over the latents as stored."""
        q = self.queries[first:last].reshape(-1, self.heads, self.width).astype(np.float64)
        mixed = naive.mla_absorbed(q, self.widened()[:last], self.score_scale, self.kv_lora)
        return mixed.reshape(last - first, -1)


Span = tuple[Session, int, int]
"""A session and which of its tokens, first..last."""


class Tables:
    """The address tables of a ragged batch of spans."""

    def __init__(self, spans: list[Span]) -> None:
        self.starts = np.cumsum([0, *(last - first for _, first, last in spans)])
        self.positions = np.array([first for _, first, _ in spans])
        self.pages = np.array([page.ctypes.data for session, _, _ in spans for page in session.pages])
        self.page_starts = np.cumsum([0, *(len(session.pages) for session, _, _ in spans)])


def store(spans: list[Span]) -> None:
    """Write the spans' latents, from projections with NaN columns around."""
    s, tables = spans[0][0], Tables(spans)
    parts = [session.proj[first:last] for session, first, last in spans]
    proj = np.pad(np.concatenate(parts), ((0, 0), (3, 2)), constant_values=np.nan)
    where = (tables.starts, tables.positions, tables.pages, tables.page_starts, *s.form)
    store_latents(proj, 3, s.norm_w, 1e-6, s.rope, *where)


def run(spans: list[Span], slots: int | None = None) -> list[F32]:
    """Outputs of the spans, whose latents are stored, by the kernel. `slots`: threads that scratch is given for."""
    s, tables = spans[0][0], Tables(spans)
    q = np.concatenate([session.queries[first:last] for session, first, last in spans])
    out = np.full((len(q), s.heads * s.kv_lora), np.nan, np.float32)
    floats = mla_scratch_floats(s.kv_lora, s.rope, slots or threads.threads())
    memory = np.full(floats + BEHIND, np.nan, np.float32)
    where = (tables.starts, tables.positions, tables.pages, tables.page_starts, *s.form)
    attend(q, s.score_scale, s.heads, s.kv_lora, s.rope, *where, s.pairs, out, memory[:floats])
    assert np.isnan(memory[floats:]).all()
    return [out[a:b].copy() for a, b in zip(tables.starts[:-1].tolist(), tables.starts[1:].tolist(), strict=True)]


def feed(session: Session, lengths: list[int]) -> F32:
    """A whole session from empty pages in calls of these lengths: store, attend, and on."""
    session.forget()
    outs, first = [], 0
    for length in lengths:
        span = (session, first, first + length)
        store([span])
        outs += run([span])
        first += length
    return np.concatenate(outs)
