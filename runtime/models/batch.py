"""A step as the kernels see it: the rows of all sessions one under the other, and where their states lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import SeraiError
from serai.runtime.step import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """A ragged batch of S segments and R rows.

    `tokens` int32 `[R]`; `seg_start` int64 `[S+1]`, the first row of each segment; `seg_pos` int64 `[S]`, tokens its
    state holds already; `state_in`, `state_out` int64 `[S]`, addresses of the fixed block before (0: none, an empty
    session) and after; `page_addr` int64, the pages of all segments one after the other, `page_start` int64 `[S+1]`
    where each segment's begin; `logit_rows` int64 `[Q]`, rows whose next-token logits are wanted, ascending.
    """

    tokens: NDArray[np.int32]
    seg_start: NDArray[np.int64]
    seg_pos: NDArray[np.int64]
    state_in: NDArray[np.int64]
    state_out: NDArray[np.int64]
    page_addr: NDArray[np.int64]
    page_start: NDArray[np.int64]
    logit_rows: NDArray[np.int64]

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a forward pass gives: logits float32 `[len(logit_rows), vocab_size]`, and the rows that can't be trusted
    because something they needed could not be read, with why."""

    logits: NDArray[np.float32]
    failures: Mapping[int, SeraiError] = field(default_factory=dict)


def cut_rows(batch: Batch, first: int, end: int, between: int) -> tuple[Batch, bool]:
    """Rows `[first, end)` as a batch of their own, to be run after that of the rows before; none of its logits are
    wanted. Whether its first segment goes on from there: then that one's `state_in` is `between`, to which the caller
    copies what the rows before have left in its `state_out`."""
    head = int(np.searchsorted(batch.seg_start, first, side="right")) - 1
    tail = int(np.searchsorted(batch.seg_start, end, side="left"))
    starts = np.clip(batch.seg_start[head : tail + 1], first, end)
    state_in = batch.state_in[head:tail].copy()
    goes_on = bool(batch.seg_start[head] < first)
    if goes_on:
        state_in[0] = between
    pages = batch.page_start[head : tail + 1]
    return Batch(
        tokens=batch.tokens[first:end],
        seg_start=starts - first,
        seg_pos=batch.seg_pos[head:tail] + starts[:-1] - batch.seg_start[head:tail],
        state_in=state_in,
        state_out=batch.state_out[head:tail],
        page_addr=batch.page_addr[pages[0] : pages[-1]],
        page_start=pages - pages[0],
        logit_rows=np.zeros(0, np.int64),
    ), goes_on


def rows_with_logits(segment: Segment, end: int) -> NDArray[np.int64]:
    """The rows whose logits are wanted of a segment that ends before row `end`: its last, and those before guesses."""
    wanted = segment.draft is not None and segment.draft.logits is not None
    return np.arange(end - 1 - segment.guesses, end, dtype=np.int64) if wanted else np.zeros(0, np.int64)


def batch_of(segments: Sequence[Segment]) -> Batch:
    """The batch of those segments, each of which has tokens and a draft."""
    drafts = [segment.draft for segment in segments if segment.draft is not None]
    counts = [len(segment.tokens) for segment in segments]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    pages = [draft.table.addresses for draft in drafts]
    page_start = np.concatenate([[0], np.cumsum([len(one) for one in pages])]).astype(np.int64)
    return Batch(
        tokens=np.concatenate([segment.tokens for segment in segments]).astype(np.int32),
        seg_start=start,
        seg_pos=np.array([draft.before.position for draft in drafts], dtype=np.int64),
        state_in=np.array(
            [0 if draft.before.fixed is None else draft.before.fixed.address for draft in drafts], dtype=np.int64
        ),
        state_out=np.array([draft.fixed.address for draft in drafts], dtype=np.int64),
        page_addr=np.concatenate(pages),
        page_start=page_start,
        logit_rows=np.concatenate(
            [rows_with_logits(one, int(end)) for one, end in zip(segments, start[1:], strict=True)]
        ),
    )
