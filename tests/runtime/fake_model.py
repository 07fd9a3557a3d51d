"""A model of a few lines that keeps the determinism contract, and ways to break it one promise at a time.

It reads and writes the states through the addresses of a `Batch` as the kernels do, so the checks built on it meet real
pools, pages, drafts and the store.
"""

import ctypes
from collections.abc import Callable, Generator
from dataclasses import replace
from enum import Enum, auto
from math import prod
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import Fingerprint, LatentType
from serai.kernels.threads import threads
from serai.runtime.bench.tiny import TINY_LINEAR
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.models.config import parse_config
from serai.runtime.models.kimi import KimiModel
from serai.runtime.models.layout import state_layout
from serai.runtime.models.open_model import LoadedModel

Floats = NDArray[np.float32]


class Flaw(Enum):
    """What a broken model lets a row's bits depend on."""

    NEIGHBOURS = auto()
    THREADS = auto()
    CALL_LENGTH = auto()
    OLD_BUFFERS = auto()
    SHARED_WRITES = auto()
    MEMORY_OUTSIDE_THE_STATE = auto()
    ROW_IN_CALL = auto()
    WIDE_STEPS = auto()


class FakeModel:
    """Mixes each token into a matrix, keeps the last token ids and a latent of each token, and answers from those."""

    def __init__(
        self,
        flaw: Flaw | None = None,
        latents: LatentType = LatentType.FLOAT32,
        kda_head_dim: int = TINY_LINEAR.kda_head_dim,
    ) -> None:
        self.config = parse_config(replace(TINY_LINEAR, kda_head_dim=kda_head_dim).config())
        self.layout = state_layout(self.config, latents)
        self.max_rows = 256
        self.wide_rows = 400
        self._flaw = flaw
        self._outside = 0.0

    def forward(self, batch: Batch) -> Generator[None, None, Outputs]:
        yield
        wanted = set(batch.logit_rows.tolist())
        logits = []
        for segment in range(len(batch.seg_pos)):
            first, end = int(batch.seg_start[segment]), int(batch.seg_start[segment + 1])
            fixed = self._begin(batch, segment)
            pages = [
                self._page(int(address))
                for address in batch.page_addr[batch.page_start[segment] : batch.page_start[segment + 1]]
            ]
            disturbance = self._disturbance(batch, end - first)
            for row in range(first, end):
                position = int(batch.seg_pos[segment]) + row - first
                answer = self._one_token(fixed, pages, int(batch.tokens[row]), position, disturbance)
                if self._flaw is Flaw.ROW_IN_CALL and row != end - 1:
                    answer = answer + np.float32(1e-3)
                if row in wanted:
                    logits.append(answer)
        return Outputs(np.array(logits, dtype=np.float32).reshape(len(logits), self.config.vocab_size))

    def _begin(self, batch: Batch, segment: int) -> Floats:
        """The fixed block after the step, holding what it was before."""
        before, after = int(batch.state_in[segment]), int(batch.state_out[segment])
        size = prod(self.layout.kda_shape) + prod(self.layout.conv_shape)
        out = _floats(after, size)
        is_poisoned = bool(np.isnan(out[0]))
        out[:] = _floats(before, size) if before else 0
        if self._flaw is Flaw.OLD_BUFFERS and is_poisoned:
            out[0] += np.float32(0.5)
        if self._flaw is Flaw.SHARED_WRITES and before:
            _floats(before, size)[0] += 1
        return out

    def _disturbance(self, batch: Batch, rows: int) -> float:
        sources: dict[Flaw, Callable[[], float]] = {
            Flaw.NEIGHBOURS: lambda: len(batch.seg_pos),
            Flaw.THREADS: threads,
            Flaw.CALL_LENGTH: lambda: rows,
            Flaw.WIDE_STEPS: lambda: batch.rows > self.max_rows,
        }
        return 1e-3 * sources[self._flaw]() if self._flaw in sources else 0.0

    def _one_token(
        self, fixed: Floats, pages: list[NDArray[Any]], token: int, position: int, disturbance: float
    ) -> Floats:
        kda = fixed[: prod(self.layout.kda_shape)]
        tails = fixed[prod(self.layout.kda_shape) :].reshape(self.layout.conv_shape)
        tails[:, :, :-1] = tails[:, :, 1:].copy()
        tails[:, :, -1] = token
        kda *= np.float32(0.75)
        kda[token % len(kda)] += np.float32(1 + disturbance)
        if self._flaw is Flaw.MEMORY_OUTSIDE_THE_STATE:
            self._outside += 1e-3
            kda[1] += np.float32(self._outside)
        page = pages[position // self.layout.page_tokens]
        rows = page[:, : position % self.layout.page_tokens + 1]
        rows[:, -1] = token % 256 if self.layout.latent_type is LatentType.Q8 else token
        if self.layout.latent_type is LatentType.Q8:
            rows[:, -1, self.layout.latent_width :] = np.ones(2, np.float32).view(np.uint8)
        seen = np.float32(rows[..., 0].astype(np.float32).sum())
        answer = np.arange(self.config.vocab_size, dtype=np.float32) * np.float32(0.01)
        waves: Floats = np.sin(answer * (1 + kda[:64].sum()) + seen + tails[0, 0, 0, 0]) * np.float32(3)
        return waves

    def _page(self, address: int) -> NDArray[Any]:
        layout = self.layout
        shape = layout.mla_layers, layout.page_tokens, layout.row_items
        held = (ctypes.c_uint8 * (prod(shape) * layout.latent_type.dtype.itemsize)).from_address(address)
        page: NDArray[Any] = np.ctypeslib.as_array(held).view(layout.latent_type.dtype).reshape(shape)
        return page


def _floats(address: int, count: int) -> Floats:
    floats: Floats = np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
    return floats


def loaded_fake(
    flaw: Flaw | None = None,
    latents: LatentType = LatentType.FLOAT32,
    kda_head_dim: int = TINY_LINEAR.kda_head_dim,
) -> LoadedModel:
    """The fake as the engine's checks take it."""
    model = FakeModel(flaw, latents, kda_head_dim)
    names = ("config", "tokenizer", "chat_format", "precision", "trunk", "latents")
    fingerprint = Fingerprint(
        **dict.fromkeys(names, "fake"),
        experts_per_token=0,
        state_layout=model.layout.describe(),
        weights="fake",
        build="fake",
        simd="fake",
    )
    return LoadedModel(cast(KimiModel, model), model.layout, fingerprint)
