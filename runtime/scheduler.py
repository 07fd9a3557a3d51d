"""Which requests go into the next step, and with how many rows: one pure function."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that could run now.

    `tokens` are those it still has to feed (0 when it only draws from logits it already has); `served` is its
    workflow's virtual time, in rows; `key` tells requests apart and orders equals by arrival. One that is `decoding` is
    fed whole.
    """

    key: int
    tokens: int
    served: float
    decoding: bool
    workflow: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows a step may hold, and how many of them prompts may take while somebody is decoding.

    256 rows use a weight often enough per read and keep a step short; beside running answers, which wait for the whole
    step, prompts get fewer.
    """

    step_rows: int = 256
    prefill_rows_beside_decode: int = 64


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of the step: feed its next `tokens` tokens."""

    key: int
    tokens: int


def plan(ready: Sequence[Ready], limits: Limits) -> tuple[Share, ...]:
    """Share one step among the requests.

    Those that are decoding go first, the least served first. What is left is shared evenly among the workflows that
    have prompts, and each one's part among its prompts: a parent with twenty forks gets what its neighbour gets, and a
    short prompt behind a long one is not kept waiting for all of it. Every request that is ready is reached after
    a bounded number of steps, because serving a request raises its virtual time.
    """
    order = sorted(ready, key=lambda one: (one.served, one.key))
    shares: list[Share] = []
    rows = limits.step_rows
    decoding = False
    for one in order:
        if one.decoding and rows >= one.tokens:
            shares.append(Share(one.key, one.tokens))
            rows -= one.tokens
            decoding = decoding or one.tokens > 0
    if decoding:
        rows = min(rows, limits.prefill_rows_beside_decode)
    flows: dict[str, list[Ready]] = {}
    for one in order:
        if not one.decoding:
            flows.setdefault(one.workflow, []).append(one)
    for members, part in zip(flows.values(), _evenly([_tokens(flow) for flow in flows.values()], rows), strict=True):
        for one, tokens in zip(members, _evenly([one.tokens for one in members], part), strict=True):
            if tokens or not one.tokens:
                shares.append(Share(one.key, tokens))
    return tuple(shares)


def _tokens(flow: Sequence[Ready]) -> int:
    return sum(one.tokens for one in flow)


def _evenly(wanted: Sequence[int], rows: int) -> list[int]:
    """Rows for each: as many as wanted, or an equal part of what those who want less leave; the first get the rest."""
    level = 0
    for count, want in enumerate(sorted(wanted)):
        level = rows // (len(wanted) - count)
        if want > level:
            break
        rows -= want
    given = [min(want, level) for want in wanted]
    rows -= sum(level for want in wanted if want > level)
    for index, want in enumerate(wanted):
        if rows and given[index] < want:
            given[index] += 1
            rows -= 1
    return given
