"""A model that is arithmetic: its state is a running hash of the token ids, its logits a function of that hash.

It goes through the real engine and writes through the same addresses as the kernels do, so sessions, scheduling and
storage can be tested by the thousand without a matrix being multiplied.
"""

import ctypes
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.runtime.models.batch import Batch, Outputs
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.state import Part, part_bytes

MODULUS = 65_521
VOCAB = 16

LAYOUT = StateLayout(
    kda_shape=(1, 1, 2, 2),
    conv_shape=(1, 3, 3, 2),
    mla_layers=1,
    latent_width=1,
    latent_type=LatentType.FLOAT32,
    page_tokens=4,
    vocab=VOCAB,
)


FIXED, LOGITS, PAGE = (part_bytes(LAYOUT, part) for part in (Part.FIXED, Part.LOGITS, Part.PAGE))
"""Bytes of one buffer of each kind."""

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SAMPLED = SamplingParams(temperature=0.8, seed=7, repetition_penalty=1.1, presence_penalty=0.3, max_tokens=20)


def floats_at(address: int, count: int) -> NDArray[np.float32]:
    """The float32 numbers that lie at an address."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def hash_of(tokens: Sequence[int], start: int = 0) -> int:
    value = start
    for token in tokens:
        value = (value * 31 + token + 1) % MODULUS
    return value


def logits_of(value: int) -> NDArray[np.float32]:
    """Next-token logits after a prefix of that hash; no two equal, so that greedy has one answer."""
    ids = np.arange(1, VOCAB + 1, dtype=np.int64)
    return ((value + 7) * ids * 7919 % 1009 / 200.0 + ids / 1e4).astype(np.float32)


def greedy_by_hand(prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(np.argmax(logits_of(hash_of(ids)))))
    return ids[len(prompt) :]


def count_on(token: int) -> NDArray[np.float32]:
    """Logits that prefer the number after `token`, from 3 to VOCAB - 1 and round again, but not by much."""
    logits = logits_of(token) / 10
    logits[token + 1 if token + 1 < VOCAB else 3] += 4
    return logits.astype(np.float32)


class ScriptedModel:
    """`before_layer(batch, layer)` is a hook between layers: to block, to count, to raise. `spoil(value)` says after
    which prefix hash the logits are NaN. One that is `counting` remembers the last token only and wants the next
    number, so that what it says repeats."""

    def __init__(
        self,
        *,
        layers: int = 2,
        before_layer: Callable[[Batch, int], None] | None = None,
        spoil: Callable[[int], bool] | None = None,
        counting: bool = False,
        page_tokens: int = LAYOUT.page_tokens,
        kda_shape: tuple[int, int, int, int] = LAYOUT.kda_shape,
    ) -> None:
        self.counting = counting
        self.layout = replace(LAYOUT, page_tokens=page_tokens, kda_shape=kda_shape)
        self.layers = layers
        self.before_layer = before_layer
        self.spoil = spoil
        self.steps: list[int] = []
        self.threads: set[int] = set()

    def forward(self, batch: Batch) -> Generator[None, None, Outputs]:
        self.steps.append(batch.rows)
        self.threads.add(threading.get_ident())
        for layer in range(self.layers):
            if self.before_layer is not None:
                self.before_layer(batch, layer)
            yield
        page_tokens = self.layout.page_tokens
        size = sum(int(np.prod(shape)) for shape in (self.layout.kda_shape, self.layout.conv_shape))
        ends: dict[int, int] = {}
        for segment in range(len(batch.seg_pos)):
            start, end = int(batch.seg_start[segment]), int(batch.seg_start[segment + 1])
            address = int(batch.state_in[segment])
            value = int(floats_at(address, 1)[0]) if address else 0
            for row in range(start, end):
                token = int(batch.tokens[row])
                value = token if self.counting else hash_of([token], value)
                page, offset = divmod(int(batch.seg_pos[segment]) + row - start, page_tokens)
                floats_at(int(batch.page_addr[batch.page_start[segment] + page]), page_tokens)[offset] = token
                ends[row] = value
            floats_at(int(batch.state_out[segment]), size)[:] = value
        give = count_on if self.counting else logits_of
        logits = np.stack([give(ends[int(row)]) for row in batch.logit_rows] or [np.zeros(VOCAB, np.float32)])
        for index, row in enumerate(batch.logit_rows):
            if self.spoil is not None and self.spoil(ends[int(row)]):
                logits[index] = np.nan
        return Outputs(logits[: len(batch.logit_rows)])
