"""The values that cross between the event loop and the engine thread: a frozen plan in, a frozen result out."""

import math
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import SeraiError
from serai.runtime.sampling.grammar import Written
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sampling.sample import Sampled, TokenCounts
from serai.runtime.state import Draft, State


@dataclass(frozen=True, slots=True)
class Draw:
    """Everything the choice of one token depends on beside the logits (contract, g).

    `position` is the one the token will take; `banned` are ids that can't be chosen yet (`min_tokens`); `written` is
    where the generation's grammar stands, if it has one. Draws after guesses don't say: those before them decide it.
    """

    params: SamplingParams
    counts: TokenCounts
    seed: int
    branch: int
    position: int
    banned: tuple[int, ...] = ()
    written: Written | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's part of a step: feed `tokens` after `state` into `draft`, then perhaps draw.

    `tokens` is int32 `[n]`. With no tokens there is no draft, and the draw uses the logits kept in `state`. The last
    `len(draws) - 1` tokens are guesses: the first draw says what should stand in place of the first guess, and so on,
    for as long as the guesses are right.
    """

    state: State
    tokens: NDArray[np.int32]
    draft: Draft | None
    draws: tuple[Draw, ...] = ()

    @property
    def guesses(self) -> int:
        return max(len(self.draws) - 1, 0)


class AbortFlag:
    """Set by the event loop when nobody waits for a step any more; the engine looks at it between layers."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        self.is_set = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does. The rows of all segments go through each layer together."""

    segments: tuple[Segment, ...]
    abort: AbortFlag

    @property
    def rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


@dataclass(slots=True)
class Slice:
    """How long a wide step goes on before others have their turn: until `until_s` on the monotonic clock, or until the
    event loop says `is_over`."""

    until_s: float = math.inf
    is_over: bool = False

    def has_ended(self) -> bool:
        return self.is_over or time.monotonic() >= self.until_s


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What became of a segment: the tokens drawn, or the error that ends this session's call and no other's.

    One is drawn for each right guess and one more; fewer than were asked for means that the draft holds a wrong guess.
    """

    drawn: tuple[Sampled, ...] = ()
    error: SeraiError | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result a segment, in the plan's order; empty when the step was aborted."""

    segments: tuple[SegmentResult, ...]
    aborted: bool = False


class StepEngine(Protocol):
    """What the driver needs of an engine; tests put a scripted one here."""

    def step(self, plan: StepPlan) -> StepResult:
        """Run the plan on the calling thread. One session's error is in its result; raising means the engine broke."""
        ...

    def go_on(self, plan: StepPlan, turn: Slice) -> StepResult | None:
        """Begin a wide step, or go on with the one begun, for one slice and at least one pause of its model.

        Other steps may be run in between. None when it isn't finished: call again, with the same plan.
        """
        ...
