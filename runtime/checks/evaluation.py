"""The engine's answers as plain arrays, so that anyone can hold them against another implementation.

The same tokens go through three ways: all at once, a prompt and then one at a time, and one at a time from the start.
By contract the three are equal bit for bit. Works on the model directly: no session, no sampler, no tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.kernels.kda_panels import to_matrices
from serai.kernels.naive import q8_widen
from serai.kernels.threads import parallel_region
from serai.runtime.errors import BadParameter
from serai.runtime.models.batch import Batch, Outputs, batch_of
from serai.runtime.models.config import LayerKind, ModelConfig
from serai.runtime.models.dtypes import widen_bf16
from serai.runtime.models.kimi import KimiModel
from serai.runtime.models.open_model import LoadedModel
from serai.runtime.state import State, StatePool, kda_view, page_view, tails_view
from serai.runtime.step import Segment

GREEDY_TOKENS = 24

WAYS = ("prefill_logits", "decode_logits", "step_logits")
"""The three arrays that must be equal."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two of the three logits first differ: the row (token position), how many of its values, by how much."""

    way: str
    position: int
    values: int
    largest: float

    def __str__(self) -> str:
        return (
            f"{self.way} first differ from {WAYS[0]} at position {self.position}, in {self.values:,} values by up to "
            f"{self.largest:.3g}"
        )


def evaluate(
    loaded: LoadedModel, tokens: NDArray[np.integer], split: int, greedy: int = GREEDY_TOKENS
) -> dict[str, NDArray[np.generic]]:
    """Everything `serai eval` writes, for int tokens `[T]`, T ≥ 1, and a prompt of `split` tokens, 1 to T.

    `prefill_logits`, `decode_logits`, `step_logits` float32 `[T, V]`; `greedy` int32 `[greedy]`, the tokens after T;
    the state after T: `state_{layer}_kda` `[H, K, V]`, `state_{layer}_conv` `[3 (q, k, v), taps, H·D]` oldest tap first
    and `state_{layer}_latents` `[T, latent width]`, float32, layers counted from 0. Raises `BadParameter` for tokens
    or a split that can't be.
    """
    ids = checked_tokens(tokens, loaded.model.config.vocab_size)
    if not 1 <= split <= len(ids):
        raise BadParameter(f"split is {split}, but must be from 1 to the number of tokens, which is {len(ids)}")
    pool = StatePool(loaded.layout)
    after, prefill = _advance(loaded.model, pool, pool.empty(), ids, [len(ids)])
    arrays: dict[str, NDArray[np.generic]] = {"tokens": ids, "split": np.array(split), "prefill_logits": prefill}
    for name, first in (("decode_logits", split), ("step_logits", 1)):
        state, arrays[name] = _advance(
            loaded.model, pool, pool.empty(), ids, [first, *(1 for _ in range(len(ids) - first))]
        )
        state.release()
    arrays |= _state_arrays(loaded.model.config, loaded.layout, after)
    arrays["greedy"] = _greedy(loaded.model, pool, after, prefill[-1], greedy)
    return arrays


def every_logits(loaded: LoadedModel, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The next-token logits after each of int32 `tokens` `[T]` of an empty session, float32 `[T, V]`."""
    pool = StatePool(loaded.layout)
    state, logits = _advance(loaded.model, pool, pool.empty(), tokens, [len(tokens)])
    state.release()
    return logits


def checked_tokens(tokens: NDArray[np.integer], vocab_size: int) -> NDArray[np.int32]:
    """The tokens as int32 `[T]`, T ≥ 1. Raises `BadParameter` when they are something else."""
    if tokens.ndim != 1 or len(tokens) == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise BadParameter(
            f"tokens must be one row of at least 1 integer, not an array of {tokens.dtype} with shape {tokens.shape}"
        )
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if len(outside):
        raise BadParameter(f"tokens hold {outside[0]}, but this model's vocabulary runs from 0 to {vocab_size - 1:,}")
    return tokens.astype(np.int32)


def first_difference(arrays: Mapping[str, NDArray[np.generic]]) -> Difference | None:
    """Where the three logits differ in any bit, or None. A NaN equals the same NaN."""
    reference = np.ascontiguousarray(arrays[WAYS[0]], dtype=np.float32)
    for way in WAYS[1:]:
        other = np.ascontiguousarray(arrays[way], dtype=np.float32)
        rows, columns = np.nonzero(reference.view(np.uint32) != other.view(np.uint32))
        if len(rows):
            position = int(rows[0])
            here = columns[rows == position]
            gap = np.abs(reference[position, here].astype(np.float64) - other[position, here])
            return Difference(way, position, len(here), float(gap.max()))
    return None


def _advance(
    model: KimiModel, pool: StatePool, state: State, tokens: NDArray[np.int32], calls: list[int]
) -> tuple[State, NDArray[np.float32]]:
    """Feed the tokens in calls of those sizes; gives the state after them and the logits of every token, `[T, V]`.

    Takes over the caller's reference to `state`. A call larger than the model's scratch goes in pieces.
    """
    logits = np.empty((len(tokens), model.config.vocab_size), dtype=np.float32)
    most = model.max_rows
    pieces = [min(most, size - start) for size in calls for start in range(0, size, most)]
    for end, rows in zip(accumulate(pieces), pieces, strict=True):
        draft = pool.draft(state, rows, with_logits=True)
        batch = batch_of([Segment(state, tokens[end - rows : end], draft)])
        for source, target, copied in draft.copies:
            page_view(pool.layout, target)[:, :copied] = page_view(pool.layout, source)[:, :copied]
        logits[end - rows : end] = _forward(model, replace(batch, logit_rows=np.arange(rows)))
        if draft.logits is not None:
            draft.logits.array[:] = logits[end - 1]
        before, state = state, draft.commit()
        before.release()
    return state, logits


def _forward(model: KimiModel, batch: Batch) -> NDArray[np.float32]:
    with parallel_region():
        layers = model.forward(batch)
        while True:
            try:
                wait = next(layers)
            except StopIteration as end:
                return _trusted(end.value)
            if wait is not None:
                wait(1.0)


def _trusted(outputs: Outputs) -> NDArray[np.float32]:
    """The logits, if every row had all it needed; raises the first row's error otherwise."""
    for _, error in sorted(outputs.failures.items(), key=lambda one: one[0]):
        raise error
    return outputs.logits


def _greedy(
    model: KimiModel, pool: StatePool, state: State, logits: NDArray[np.float32], count: int
) -> NDArray[np.int32]:
    """The `count` likeliest tokens in a row after `state`, whose next-token logits are `logits`; the lowest id on ties.

    Takes over the caller's reference to `state`.
    """
    chosen = np.empty(count, dtype=np.int32)
    for number in range(count):
        chosen[number] = np.argmax(logits)
        if number + 1 < count:
            state, rows = _advance(model, pool, state, chosen[number : number + 1], [1])
            logits = rows[-1]
    state.release()
    return chosen


def _state_arrays(config: ModelConfig, layout: StateLayout, state: State) -> dict[str, NDArray[np.generic]]:
    """Copies of a state's parts by the layer they belong to, float32."""
    if state.fixed is None:
        raise ValueError("an empty state has no arrays")
    kda, tails = kda_view(layout, state.fixed), tails_view(layout, state.fixed)
    arrays: dict[str, NDArray[np.generic]] = {}
    kda_index = mla_index = 0
    for layer, kind in enumerate(config.layer_kinds):
        if kind is LayerKind.KDA:
            arrays[f"state_{layer}_kda"] = to_matrices(kda[kda_index], config.kda.heads, config.kda.head_dim)
            arrays[f"state_{layer}_conv"] = tails[kda_index].copy()
            kda_index += 1
        else:
            arrays[f"state_{layer}_latents"] = _latents(layout, state, mla_index, config.mla.kv_lora_rank)
            mla_index += 1
    return arrays


def _latents(layout: StateLayout, state: State, mla_index: int, rank: int) -> NDArray[np.float32]:
    """The latents of one layer, `[position, width]`; `rank` of the numbers of each are the normed part."""
    pages = [
        page_view(layout, page)[mla_index, :rows]
        for page, rows in zip(state.table.pages, layout.page_rows(state.position), strict=True)
    ]
    rows = np.concatenate(pages)
    if layout.latent_type is LatentType.Q8:
        codes, scales = np.split(rows, [layout.latent_width], axis=1)
        return q8_widen(codes.view(np.int8), np.ascontiguousarray(scales).view(np.float32), rank)
    return widen_bf16(rows) if layout.latent_type is LatentType.BFLOAT16 else rows
