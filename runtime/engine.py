"""The engine: one step of a ragged batch, from token ids to next-token logits and drawn tokens.

It runs on the engine thread and owns the model's arrays while it does. It knows nothing of sessions, budgets or time.
"""

from collections.abc import Generator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.checkpoints.snapshot import StateLayout
from serai.kernels.threads import parallel_region
from serai.runtime.errors import LogitsInvalid, SeraiError
from serai.runtime.models.batch import Batch, batch_of
from serai.runtime.sampling import Sampled, sample
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
        if feeding and not self._feed(feeding, plan.abort):
            return StepResult((), aborted=True)
        return StepResult(tuple(_finish(segment) for segment in plan.segments))

    def _feed(self, segments: list[Segment], abort: AbortFlag) -> bool:
        """Run the forward pass and leave the logits in the drafts; False when it was aborted."""
        for segment in segments:
            if segment.draft is not None:
                for source, target, rows in segment.draft.copies:
                    page_view(self._layout, target)[:, :rows] = page_view(self._layout, source)[:, :rows]
        with parallel_region():
            logits = self._run(batch_of(segments), abort)
        if logits is None:
            return False
        wanted = [segment.draft.logits for segment in segments if segment.draft and segment.draft.logits]
        for row, buffer in zip(logits, wanted, strict=True):
            buffer.array[:] = row
        return True

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


def _finish(segment: Segment) -> SegmentResult:
    """Check the segment's logits and draw its token."""
    buffer = segment.state.logits if segment.draft is None else segment.draft.logits
    if buffer is None:
        return SegmentResult()  # a slice of a longer append
    logits: NDArray[np.float32] = buffer.array
    if not np.isfinite(logits).all():
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        position = segment.state.position + len(segment.tokens)
        return SegmentResult(
            error=LogitsInvalid(
                f"the model gave {bad} of {len(logits)} logits that are no finite numbers at position {position}, so "
                f"the session stays at position {segment.state.position}"
            )
        )
    if segment.draw is None:
        return SegmentResult()
    try:
        return SegmentResult(drawn=_draw(logits, segment.draw))
    except SeraiError as error:
        return SegmentResult(error=error)


def _draw(logits: NDArray[np.float32], draw: Draw) -> Sampled:
    return sample(
        logits,
        draw.params,
        draw.counts,
        seed=draw.seed,
        branch=draw.branch,
        position=draw.position,
        banned=draw.banned,
    )
