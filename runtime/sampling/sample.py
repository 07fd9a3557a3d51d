"""Choosing the next token: one pure function from logits to a token.

The order is the one vLLM and Hugging Face document: what the grammar forbids, repetition, frequency and presence
penalties, bias, bans, then temperature, top-k, top-p and min-p, each on what the one before left. Then one uniform
number picks by the inverse of the cumulative distribution, tokens standing in descending order of their logits, equal
ones by ascending id. So every tie, in the filters and in the draw, goes to the lowest id, and the choice is a function
of the arguments only.

Logprobs are of the model's own distribution, the softmax of the logits as they came, before penalties, temperature and
filters: the number says what the model thought, whatever was asked of the sampler.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter, LogitsInvalid
from serai.runtime.sampling.grammar import Written
from serai.runtime.sampling.params import SamplingParams
from serai.runtime.sampling.random import uniform

FIRST_CANDIDATES = 64
"""How many of the likeliest tokens are sorted at first; most distributions spend their mass there."""
CANDIDATES_GROWTH = 16
"""By how much more each time that was too few: a flat distribution over 163,840 ids is reached in three."""

_BLOCK = 8192
_COLUMNS_EACH = 16
_SIGN = np.int32(31)
_BELOW_SIGN = np.int32(0x7FFF_FFFF)
_ID_BITS = np.uint64(32)
_ID_MASK = np.uint64(0xFFFF_FFFF)
_LARGEST = float(np.finfo(np.float32).max)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; `logprob` and `top_logprobs` (most likely first, natural logarithms) are there when asked for.

    `non_finite` counts the NaN and +Inf logits that had to be left out. `written` is where its grammar stands after it,
    for a generation that has one.
    """

    token: int
    logprob: float | None = None
    top_logprobs: Mapping[int, float] | None = None
    non_finite: int = 0
    written: Written | None = None


class TokenCounts:
    """What penalties need to know of a timeline, derived from its token ids alone.

    `ids` are all of them; those from `generation_start` on (by default none) were generated in the present turn. The
    repetition penalty looks at all ids, presence and frequency at the generated ones. Takes a byte an id of the
    vocabulary, and a little for each different token of the turn. Raises `BadParameter` for an id outside it.
    """

    __slots__ = ("_generated", "_seen")

    def __init__(
        self,
        vocab_size: int,
        ids: Sequence[int] | NDArray[np.integer[Any]] = (),
        *,
        generation_start: int | None = None,
    ) -> None:
        every = np.asarray(ids, np.int64)
        if every.size and not 0 <= every.min() <= every.max() < vocab_size:
            raise BadParameter(
                f"token ids run from 0 to {vocab_size - 1}, and these run from {every.min()} to {every.max()}"
            )
        self._seen: NDArray[np.bool_] = np.zeros(vocab_size, np.bool_)
        self._seen[every] = True
        generated, times = np.unique(
            every[len(every) if generation_start is None else generation_start :], return_counts=True
        )
        self._generated: dict[int, int] = dict(zip(generated.tolist(), times.tolist(), strict=True))

    def push(self, token: int) -> None:
        """Count one more generated token."""
        self._seen[token] = True
        self._generated[token] = self._generated.get(token, 0) + 1

    def fork(self) -> "TokenCounts":
        """A copy that goes its own way."""
        copy = TokenCounts(0)
        copy._seen = self._seen.copy()
        copy._generated = dict(self._generated)
        return copy

    def seen(self) -> NDArray[np.int64]:
        """Every id that occurs, ascending."""
        return np.flatnonzero(self._seen)

    def generated(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The ids generated in this turn, and how often each was."""
        size = len(self._generated)
        return (
            np.fromiter(self._generated.keys(), np.int64, size),
            np.fromiter(self._generated.values(), np.float64, size),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenCounts):
            return NotImplemented
        return self._generated == other._generated and np.array_equal(self._seen, other._seen)

    __hash__ = None  # type: ignore[assignment]  # it changes


def sample(
    logits: NDArray[np.float32],
    params: SamplingParams,
    counts: TokenCounts,
    *,
    seed: int,
    branch: int,
    position: int,
    banned: Sequence[int] = (),
    written: Written | None = None,
) -> Sampled:
    """Choose the token at `position` from `logits`, float32 `[vocab]`, which are read only.

    `banned` ids can't be chosen (stop tokens before `min_tokens`), nor can ids whose logit is -Inf, nor those that the
    grammar of `written` does not allow; where it allows banned ids only, one of them is chosen. NaN and +Inf
    logits are left out, with one warning in the log. Raises `LogitsInvalid` if no finite logit is left. Ids in
    `params.logit_bias` and `banned` must be in the vocabulary (`SamplingParams.check_vocabulary`).
    """
    non_finite = 0
    likeliest = int(logits.argmax())
    if not math.isfinite(logits[likeliest]):  # argmax finds a NaN before anything else and +Inf before any number
        logits, non_finite = _finite_only(logits)
        likeliest = int(logits.argmax())

    scores = logits
    if written is not None:
        allowed = written.allowed()
        scores = np.where(allowed, logits, np.float32(-np.inf))
        if banned and np.count_nonzero(allowed) == np.count_nonzero(allowed[list(banned)]):
            banned = ()
    if params.penalizes or params.logit_bias or banned:
        scores = _adjusted(scores, params, counts, banned)
    if scores is not logits:
        likeliest = int(scores.argmax())
        if scores[likeliest] == -np.inf:
            raise LogitsInvalid("every token with a finite logit is banned here, so none is left to choose")

    if params.temperature == 0.0:
        token = likeliest
    else:
        token = _draw(scores, float(scores[likeliest]), params, uniform(seed, branch, position))
    if written is not None:
        written = written.after(token)
        written.look_ahead()
    if params.logprobs is None:
        return Sampled(token, non_finite=non_finite, written=written)
    logprob, alternatives = _logprobs(logits, token, params.logprobs)
    return Sampled(token, logprob, alternatives, non_finite, written)


def _finite_only(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """A copy without NaN and +Inf, and how many there were. A constant instead would make tokens of noise."""
    usable = np.isfinite(logits)
    if not usable.any():
        raise LogitsInvalid(f"none of the {len(logits)} logits is finite, so no token can be drawn from them")
    non_finite = len(logits) - int(usable.sum()) - int(np.isneginf(logits).sum())
    _warn_of_non_finite()
    return np.where(usable, logits, np.float32(-np.inf)), non_finite


@functools.cache  # once a process: the same weights would repeat it with every token
def _warn_of_non_finite() -> None:
    log.warning("a model gave NaN or +Inf logits; they are left out, and tokens are chosen among the finite ones only")


def _adjusted(
    logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts, banned: Sequence[int]
) -> NDArray[np.float32]:
    """A copy with penalties, bias and bans, kept within float32 so that a large penalty makes no infinity."""
    scores = logits.copy()
    if params.repetition_penalty != 1.0:
        seen = counts.seen()
        found = scores[seen].astype(np.float64)
        penalty = params.repetition_penalty
        with np.errstate(over="ignore"):  # `_put` clips
            _put(scores, seen, np.where(found > 0.0, found / penalty, found * penalty))
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        generated, times = counts.generated()
        taken = params.frequency_penalty * times + params.presence_penalty
        _put(scores, generated, scores[generated] - taken)
    if params.logit_bias:
        biased = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        added = np.fromiter(params.logit_bias.values(), np.float64, len(biased))
        _put(scores, biased, scores[biased] + added)
    if banned:
        scores[np.asarray(banned, np.int64)] = -np.inf
    return scores


def _put(scores: NDArray[np.float32], ids: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> None:
    """Write `values` rounded to float32 within its finite range; what was -Inf stays so."""
    masked = np.isneginf(scores[ids])
    scores[ids] = np.where(masked, -np.inf, np.clip(values, -_LARGEST, _LARGEST))


def _draw(scores: NDArray[np.float32], highest: float, params: SamplingParams, chance: float) -> int:
    """Temperature, filters and the draw: `chance`, in [0, 1), says how much of the kept mass lies before the token.

    Sorting a whole vocabulary for each token would cost more than everything else here, so the likeliest are sorted
    and more are fetched only while the answer may lie beyond them. It comes out the same however many are fetched: the
    cumulative sums of a longer list begin with those of a shorter one.
    """
    limited = 0 < params.top_k < len(scores)
    filtered = params.top_p < 1.0 or params.min_p > 0.0
    total = 0.0 if limited else _mass(scores, highest, params.temperature)
    wanted = params.top_k if limited else FIRST_CANDIDATES
    while True:
        ids = _highest(scores, wanted)
        if limited:
            ids = ids[:wanted]
        weights = _weights(scores[ids], highest, params.temperature)
        cumulative = weights.cumsum()
        mass = float(cumulative[-1]) if limited else total
        kept = _kept(weights, cumulative, mass, params)
        if kept <= len(ids):
            return _pick(ids[:kept], cumulative[:kept], chance * float(cumulative[kept - 1]))
        nothing_beyond = limited or len(ids) < wanted or len(ids) == len(scores)
        if nothing_beyond or (not filtered and chance * mass < cumulative[-1]):
            return _pick(ids, cumulative, chance * mass)
        wanted *= CANDIDATES_GROWTH


def _weights(scores: NDArray[np.float32], highest: float, temperature: float) -> NDArray[np.float64]:
    """Probabilities up to a factor: 1 for the highest score, whatever the temperature, so nothing can overflow."""
    weights = scores.astype(np.float64)
    weights -= highest
    with np.errstate(over="ignore"):  # a temperature near 0 makes -Inf of all but the highest, and weight 0
        weights /= temperature
    return np.exp(weights, out=weights)


def _mass(scores: NDArray[np.float32], highest: float, temperature: float) -> float:
    """The sum of all weights, block by block: a block fits the processor's cache, and the order is always this one."""
    return sum(
        float(_weights(scores[start : start + _BLOCK], highest, temperature).sum())
        for start in range(0, len(scores), _BLOCK)
    )


def _kept(weights: NDArray[np.float64], cumulative: NDArray[np.float64], mass: float, params: SamplingParams) -> int:
    """How many of the likeliest tokens top-p and min-p leave; one more than are here if that isn't decided yet."""
    kept = beyond = len(weights) + 1
    if params.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, params.top_p * mass, side="left")) + 1
    likely = int(np.count_nonzero(weights >= params.min_p))
    return min(kept, likely if likely < len(weights) else beyond)


def _pick(ids: NDArray[np.int64], cumulative: NDArray[np.float64], target: float) -> int:
    """The first token whose cumulative mass passes `target`; never one of no mass, even when `target` rounds up."""
    last = np.searchsorted(cumulative, cumulative[-1], side="left")
    return int(ids[min(np.searchsorted(cumulative, target, side="right"), last)])


def _highest(scores: NDArray[np.float32], wanted: int) -> NDArray[np.int64]:
    """Ids of the highest scores, highest first, equal ones by ascending id; -Inf is never among them.

    At least `wanted`, unless fewer are finite; a few more come for nothing.
    """
    candidates = np.flatnonzero(scores >= max(_reached_by(scores, min(wanted, len(scores))), -_LARGEST))
    bits = (scores[candidates] + np.float32(0.0)).view(np.int32)  # + 0 makes -0 equal to 0
    # As integers, positive floats ascend and negative ones descend. Flip them so that all descend, and let the id
    # decide between equals; sorting one integer is several times quicker than a stable sort by two keys.
    order = (bits ^ (~(bits >> _SIGN) & _BELOW_SIGN)).view(np.uint32).astype(np.uint64)
    order <<= _ID_BITS
    order |= candidates.view(np.uint64)
    order.sort()
    order &= _ID_MASK
    return order.view(np.int64)


def _reached_by(scores: NDArray[np.float32], wanted: int) -> float:
    """A number that at least `wanted` scores reach, and not many more.

    The maxima of many columns hold nearly all of the highest scores, and are much fewer.
    """
    columns = wanted * _COLUMNS_EACH
    rows = len(scores) // columns
    if rows > 1:
        scores = scores[: rows * columns].reshape(rows, columns).max(axis=0)
    at = len(scores) - wanted
    return float(np.partition(scores, at)[at])


def _logprobs(logits: NDArray[np.float32], token: int, alternatives: int) -> tuple[float, dict[int, float]]:
    """The token's log-probability and those of the likeliest tokens, by the softmax of `logits`."""
    highest = float(logits.max())
    normalizer = highest + math.log(_mass(logits, highest, 1.0))
    likeliest = _highest(logits, alternatives)[:alternatives] if alternatives else ()
    return float(logits[token]) - normalizer, {int(each): float(logits[each]) - normalizer for each in likeliest}
