"""The engine: one step of a ragged batch, from token ids to next-token logits and drawn tokens.

It runs on the engine thread and owns the model's arrays while it does. It knows nothing of sessions, budgets or time.
"""

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import StateLayout
from serai.kernels.threads import parallel_region
from serai.runtime.errors import LogitsNotFinite, SeraiError
from serai.runtime.experts.access import Wait
from serai.runtime.models.batch import Batch, Outputs, batch_of
from serai.runtime.sampling.grammar import Written
from serai.runtime.sampling.sample import Sampled, TokenCounts, sample
from serai.runtime.state import page_view
from serai.runtime.step import AbortFlag, Draw, Segment, SegmentResult, Slice, StepPlan, StepResult

ABORT_CHECK_S = 0.02
"""How long the engine waits for a read before it looks again whether anybody still wants the step."""


Passing = Generator[Wait | None, None, Outputs]
"""A pass under way."""


class Model(Protocol):
    """A forward pass that pauses between layers, or until something has been read, and ends with the logits."""

    def forward(self, batch: Batch) -> Passing: ...


class Engine:
    """Executes step plans on a model."""

    def __init__(self, model: Model, layout: StateLayout) -> None:
        self._model = model
        self._layout = layout
        self._wide: Passing | None = None

    def step(self, plan: StepPlan) -> StepResult:
        """Feed all segments together, then draw for those that ask.

        A session whose logits are no numbers gets an error and its draft is not to be committed; the others go on.
        """
        outputs = None
        if any(segment.draft is not None for segment in plan.segments):
            outputs = self._run(self._begin(plan), plan.abort, None)
            if outputs is None:
                return StepResult((), aborted=True)
        return _results(plan, outputs)

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        """As `StepEngine.go_on`; there is one wide step at a time."""
        if self._wide is None:
            self._wide = self._begin(plan)
        outputs = self._run(self._wide, plan.abort, turn)
        if outputs is None and not plan.abort.is_set:
            return None
        self._wide = None
        return StepResult((), aborted=True) if outputs is None else _results(plan, outputs)

    def _begin(self, plan: StepPlan) -> Passing:
        """Everything the plan feeds, on its way through the layers."""
        for segment in plan.segments:
            if segment.draft is not None:
                for source, target, rows in segment.draft.copies:
                    page_view(self._layout, target)[:, :rows] = page_view(self._layout, source)[:, :rows]
        return self._model.forward(batch_of([segment for segment in plan.segments if segment.draft is not None]))

    def _run(self, layers: Passing, abort: AbortFlag, turn: Slice | None) -> Outputs | None:
        """Take the pass further: its outputs, or None when it was aborted (and is over) or its turn has ended."""
        with parallel_region():
            while not abort.is_set:
                try:
                    wait = next(layers)
                except StopIteration as end:
                    outputs: Outputs = end.value
                    return outputs
                if wait is not None:
                    if turn is not None and math.isfinite(turn.until_s):
                        return None  # others are ready now: they don't wait for this one's reads
                    wait(ABORT_CHECK_S)
                if turn is not None and turn.has_ended():
                    return None
            layers.close()
            return None


def _results(plan: StepPlan, outputs: Outputs | None) -> StepResult:
    """One result a segment, out of what the pass gave (None if nothing was fed)."""
    rows: Iterator[NDArray[np.float32]] = iter(())
    failed: dict[int, SeraiError] = {}
    if outputs is not None:
        feeding = [segment for segment in plan.segments if segment.draft is not None]
        rows, failed = iter(outputs.logits), _failed_segments(feeding, outputs.failures)
    results = (_finish(segment, rows) for segment in plan.segments)
    return StepResult(
        tuple(
            SegmentResult(error=failed[id(segment)]) if id(segment) in failed else result
            for segment, result in zip(plan.segments, results, strict=True)
        )
    )


def _failed_segments(segments: list[Segment], failures: Mapping[int, SeraiError]) -> dict[int, SeraiError]:
    """The segments (by identity) of which a row failed, each with the error of its first such row."""
    failed: dict[int, SeraiError] = {}
    start = 0
    for segment in segments:
        rows = range(start, start + len(segment.tokens))
        first = min((row for row in failures if row in rows), default=None)
        if first is not None:
            failed[id(segment)] = failures[first]
        start = rows.stop
    return failed


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


def _not_finite(logits: NDArray[np.float32], segment: Segment) -> LogitsNotFinite:
    stays_at = segment.state.position
    return LogitsNotFinite(
        bad=int(np.count_nonzero(~np.isfinite(logits))),
        of=len(logits),
        position=stays_at + len(segment.tokens),
        stays_at=stays_at,
    )


def _draw_while_right(wanted: list[NDArray[np.float32]], segment: Segment) -> tuple[Sampled, ...]:
    """One token for each row of logits, as long as each is what the next token was guessed to be."""
    drawn: list[Sampled] = []
    guesses = segment.tokens[len(segment.tokens) - segment.guesses :].tolist()
    counts = segment.draws[0].counts.fork() if guesses else None
    written = segment.draws[0].written if segment.draws else None
    for index, draw in enumerate(segment.draws):
        drawn.append(_draw(wanted[index], draw, counts or draw.counts, written))
        written = drawn[-1].written
        if index == len(guesses) or drawn[-1].token != guesses[index]:
            break
        if counts is not None:
            counts.push(guesses[index])
    return tuple(drawn)


def _draw(logits: NDArray[np.float32], draw: Draw, counts: TokenCounts, written: Written | None) -> Sampled:
    return sample(
        logits,
        draw.params,
        counts,
        seed=draw.seed,
        branch=draw.branch,
        position=draw.position,
        banned=draw.banned,
        written=written,
    )
