"""Which requests go into the next step, and with how many rows: one pure function."""

from collections.abc import Sequence
from dataclasses import dataclass

from serai.runtime.errors import BadParameter

HIGHEST_PRIORITY = 4
"""Priorities go from minus this to this. Each is worth twice the rows of the one below."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that could run now.

    `tokens` are those it still has to feed (0 when it only draws from logits it already has); `served` is its
    workflow's virtual time, in rows over weight; `key` tells requests apart and orders equals by arrival. One that is
    `decoding` is fed whole. `weight` is what its rows are shared out by. `untried` names what its state was read from,
    as long as no step has gone on from that state.
    """

    key: int
    tokens: int
    served: float
    decoding: bool
    workflow: str = ""
    weight: float = 1.0
    untried: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows a step may hold, and how many of them prompts may take while somebody is decoding.

    256 rows use a weight often enough per read and keep a step short; beside running answers, which wait for the whole
    step, prompts get fewer. A wide step, of `wide_rows` (0: there are none), is for prompts only and leaves answers
    their turns.
    """

    step_rows: int = 256
    prefill_rows_beside_decode: int = 64
    wide_rows: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of the step: feed its next `tokens` tokens."""

    key: int
    tokens: int


def weight_of(priority: int) -> float:
    """The weight of a priority: 1 for 0, and twice that of the one below. Raises `BadParameter` outside the range."""
    if not -HIGHEST_PRIORITY <= priority <= HIGHEST_PRIORITY:
        raise BadParameter(
            f"priority is {priority}, but must be from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY} (0 is the usual one)"
        )
    return 2.0**priority


def plan(ready: Sequence[Ready], limits: Limits) -> tuple[Share, ...]:
    """Share one step among the requests.

    Those that are decoding go first, the least served first, but leave waiting prompts their bounded part. What is left
    is shared among the workflows that have prompts, by weight, and each one's part among its prompts: a parent with
    twenty forks gets what its neighbour gets, and a short prompt behind a long one is not kept waiting for all of it.
    Every request that is ready is reached after a bounded number of steps: serving a request raises its workflow's
    virtual time, the slower the higher its weight, and what a step's division leaves over goes to the least served.
    """
    order = _in_order(ready)
    shares: list[Share] = []
    prompts = [one for one in order if not one.decoding]
    beside = min(limits.prefill_rows_beside_decode, sum(one.tokens for one in prompts), limits.step_rows // 2)
    rows = limits.step_rows
    decoding = False
    for one in order:
        # The least served is fed whole in any case: what it wants may be more than prompts leave.
        if one.decoding and one.tokens <= (rows - beside if decoding else rows):
            shares.append(Share(one.key, one.tokens))
            rows -= one.tokens
            decoding = decoding or one.tokens > 0
    if decoding:
        rows = min(rows, limits.prefill_rows_beside_decode)
    return (*shares, *_prompt_shares(prompts, rows))


def plan_wide(ready: Sequence[Ready], limits: Limits) -> tuple[Share, ...]:
    """Share one wide step among the long prompts, as `plan` shares what is left of an ordinary one; nothing unless they
    have more to be read than one of those would hold.

    A prompt that fits beside answers is no long one: its first token would wait for the whole pass. As many prompts get
    a share as an ordinary step has rows, since what follows the layers has room for so many ends.
    """
    long = [one for one in ready if not one.decoding and one.tokens > limits.prefill_rows_beside_decode]
    prompts = _in_order(long)[: limits.step_rows]
    if limits.wide_rows <= limits.step_rows or sum(one.tokens for one in prompts) <= limits.step_rows:
        return ()
    return _prompt_shares(prompts, limits.wide_rows)


def _in_order(ready: Sequence[Ready]) -> list[Ready]:
    """The least served first, and of those whose states are untried only one state's: should the step break the engine,
    it is known which of them may have done so."""
    order = sorted(ready, key=lambda one: (one.served, one.key))
    untried = next((one.untried for one in order if one.untried is not None), None)
    return [one for one in order if one.untried in (None, untried)]


def _prompt_shares(prompts: Sequence[Ready], rows: int) -> tuple[Share, ...]:
    """The prompts' parts of that many rows; they come least served first."""
    shares: list[Share] = []
    flows: dict[str, list[Ready]] = {}
    for one in prompts:
        flows.setdefault(one.workflow, []).append(one)
    wanted = [sum(one.tokens for one in flow) for flow in flows.values()]
    weights = [max(one.weight for one in flow) for flow in flows.values()]
    for members, part in zip(flows.values(), _shared(wanted, weights, rows), strict=True):
        given = _shared([one.tokens for one in members], [one.weight for one in members], part)
        for one, tokens in zip(members, given, strict=True):
            if tokens or not one.tokens:
                shares.append(Share(one.key, tokens))
    return tuple(shares)


def _shared(wanted: Sequence[int], weights: Sequence[float], rows: int) -> list[int]:
    """Rows for each: as many as wanted, or a part by weight of what those who want less leave; the first get the rest.

    Weights are powers of two, so their sums are exact.
    """
    given = [0] * len(wanted)
    left, total = rows, sum(weights)
    order = sorted(range(len(wanted)), key=lambda index: wanted[index] / weights[index])
    for done, index in enumerate(order):
        if wanted[index] * total > left * weights[index]:
            for other in order[done:]:
                given[other] = int(left * weights[other] / total)
            break
        given[index] = wanted[index]
        left -= wanted[index]
        total -= weights[index]
    left = rows - sum(given)
    for index, want in enumerate(wanted):
        if left and given[index] < want:
            given[index] += 1
            left -= 1
    return given
