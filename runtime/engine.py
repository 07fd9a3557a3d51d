"""The engine: one step of a ragged batch, from token ids to next-token logits and drawn tokens.

It runs on the engine thread and owns the model's arrays while it does. It knows nothing of sessions, budgets or time.
"""

from collections.abc import Generator, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import StateLayout
from serai.kernels.threads import parallel_region
from serai.runtime.errors import LogitsInvalid, SeraiError
from serai.runtime.models.batch import Batch, batch_of
from serai.runtime.sampling import Sampled, TokenCounts, sample
from serai.runtime.state import page_view
from serai.runtime.step import AbortFlag, Draw, Segment, SegmentResult, StepPlan, StepResult


class Model(Protocol):
    """A forward pass that pauses between layers and ends with the logits of `batch.logit_rows`."""

    def forward(self, batch: Batch) -> Generator[None, None, NDArray[np.float32]]: ...


class Engine:
    """Executes step plans on a model."""

    def __init__(self, model: Model, layout: StateLayout) -> None:
        self._model = model
        self._layout = layout

    def step(self, plan: StepPlan) -> StepResult:
        """Feed all segments together, then draw for those that ask.

        A session whose logits are no numbers gets an error and its draft is not to be committed; the others go on.
        """
        feeding = [segment for segment in plan.segments if segment.draft is not None]
        rows: Iterator[NDArray[np.float32]] = iter(())
        if feeding:
            logits = self._feed(feeding, plan.abort)
            if logits is None:
                return StepResult((), aborted=True)
            rows = iter(logits)
        return StepResult(tuple(_finish(segment, rows) for segment in plan.segments))

    def _feed(self, segments: list[Segment], abort: AbortFlag) -> NDArray[np.float32] | None:
        """Run the forward pass; the wanted logits, segment by segment, or None when it was aborted."""
        for segment in segments:
            if segment.draft is not None:
                for source, target, rows in segment.draft.copies:
                    page_view(self._layout, target)[:, :rows] = page_view(self._layout, source)[:, :rows]
        with parallel_region():
            return self._run(batch_of(segments), abort)

    def _run(self, batch: Batch, abort: AbortFlag) -> NDArray[np.float32] | None:
        layers = self._model.forward(batch)
        while not abort.is_set:
            try:
                next(layers)
            except StopIteration as end:
                logits: NDArray[np.float32] = end.value
                return logits
        layers.close()
        return None


def _finish(segment: Segment, rows: Iterator[NDArray[np.float32]]) -> SegmentResult:
    """Take the segment's logits from `rows`, keep the last in its draft, check them and draw."""
    draft = segment.draft
    if draft is None:
        kept = segment.state.logits
        wanted = [] if kept is None else [kept.array]
    elif draft.logits is None:
        return SegmentResult()  # a slice of a longer append
    else:
        wanted = [next(rows) for _ in range(segment.guesses + 1)]
        draft.logits.array[:] = wanted[-1]
    for logits in wanted:
        if not np.isfinite(logits).all():
            return SegmentResult(error=_not_finite(logits, segment))
    try:
        return SegmentResult(drawn=_draw_while_right(wanted, segment))
    except SeraiError as error:
        return SegmentResult(error=error)


def _not_finite(logits: NDArray[np.float32], segment: Segment) -> LogitsInvalid:
    bad = int(np.count_nonzero(~np.isfinite(logits)))
    position = segment.state.position + len(segment.tokens)
    return LogitsInvalid(
        f"the model gave {bad} of {len(logits)} logits that are no finite numbers at position {position}, so "
        f"the session stays at position {segment.state.position}"
    )


def _draw_while_right(wanted: list[NDArray[np.float32]], segment: Segment) -> tuple[Sampled, ...]:
    """One token for each row of logits, as long as each is what the next token was guessed to be."""
    drawn: list[Sampled] = []
    guesses = segment.tokens[len(segment.tokens) - segment.guesses :].tolist()
    counts = segment.draws[0].counts.fork() if guesses else None
    for index, draw in enumerate(segment.draws):
        drawn.append(_draw(wanted[index], draw, counts or draw.counts))
        if index == len(guesses) or drawn[-1].token != guesses[index]:
            break
        if counts is not None:
            counts.push(guesses[index])
    return tuple(drawn)


def _draw(logits: NDArray[np.float32], draw: Draw, counts: TokenCounts) -> Sampled:
    return sample(
        logits,
        draw.params,
        counts,
        seed=draw.seed,
        branch=draw.branch,
        position=draw.position,
        banned=draw.banned,
    )
