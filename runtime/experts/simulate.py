"""What a cache would have done: policies and sizes compared on recorded or synthetic routing, without a model.

`python -m serai.runtime.experts.simulate [TRACE.npz …]` prints hit rates; without a trace those of `EXAMPLES`. Slots as
multiples of the experts that one step visits in all layers:

=================================  =====  =====  =====  =====
one session, popular experts        0.5     1      2      4
=================================  =====  =====  =====  =====
lru                                0.000  0.233  0.269  0.352
lfru                               0.128  0.197  0.290  0.371
next-use                           0.138  0.206  0.307  0.374
ideal                              0.304  0.392  0.490  0.601
one session, sticky routing
lru                                0.000  0.382  0.397  0.443
lfru                               0.102  0.195  0.273  0.446
next-use                           0.113  0.200  0.328  0.449
ideal                              0.396  0.476  0.551  0.637
8 sessions, popular experts
lru                                0.000  0.338  0.483  0.828
lfru                               0.211  0.348  0.544  0.836
next-use                           0.232  0.375  0.567  0.837
ideal                              0.422  0.594  0.769  0.925
=================================  =====  =====  =====  =====

LRU keeps nothing below one step's experts (a pass is a scan) and is the best just above it when a token's experts are
those of the token before. `next-use` is never worse than `lfru`, and the best at the sizes that streaming is for.
"""

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serai.runtime.experts.policy import POLICIES, Policy
from serai.runtime.experts.slots import NOT_HELD, SlotTable
from serai.runtime.experts.trace import RoutingTrace, TraceRecorder

IDEAL = "ideal"
"""The policy that knows the future and drops what is wanted last (Belady): no policy can do better."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """How one policy did with one number of slots."""

    policy: str
    slots: int
    wanted: int
    misses: int

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.misses / self.wanted if self.wanted else 0.0


def simulate(trace: RoutingTrace, slots: int, policy: Policy) -> Simulated:
    """Make the trace's visits to a table of `slots`, as `StreamedVisit` makes them."""
    table = SlotTable(trace.layers, trace.experts, slots, policy)
    for layer, ids, picks in trace:
        found = table.want(layer, ids, picks)
        held = found[found != NOT_HELD]
        missing = ids[found == NOT_HELD]
        table.pin(held)
        while len(missing):
            loaded = table.begin_load(layer, missing)
            for slot in loaded.tolist():
                table.finish_load(slot)
            table.unpin(held)
            held, missing = loaded, missing[len(loaded) :]
            table.pin(held)
        table.unpin(held)
    table.check()
    counters = table.counters
    return Simulated(policy.name, slots, counters.wanted, counters.misses)


def simulate_ideal(trace: RoutingTrace, slots: int) -> Simulated:
    """The fewest misses any policy could have: what is wanted again last goes first."""
    keys = trace.ids.astype(np.int64) + trace.experts * np.repeat(trace.visit_layers, np.diff(trace.starts))
    never = len(keys)
    following = np.full(len(keys), never, dtype=np.int64)
    last: dict[int, int] = {}
    for place in range(len(keys) - 1, -1, -1):
        key = int(keys[place])
        following[place] = last.get(key, never)
        last[key] = place
    held: dict[int, int] = {}  # by key, when it is wanted next
    farthest: list[tuple[int, int]] = []  # the same as a heap of (-next, key); entries that are out of date are skipped
    misses = 0
    for key, again in zip(keys.tolist(), following.tolist(), strict=True):
        if key not in held:
            misses += 1
            if len(held) == slots:
                while True:
                    when, victim = heapq.heappop(farthest)
                    if held.get(victim) == -when:
                        del held[victim]
                        break
        held[key] = again
        heapq.heappush(farthest, (-again, key))
    return Simulated(IDEAL, slots, len(keys), misses)


def compare(
    trace: RoutingTrace, slots: Iterable[int], policies: Sequence[Policy] = POLICIES
) -> list[tuple[int, list[Simulated]]]:
    """For each number of slots how each policy does, the ideal last."""
    return [
        (count, [*(simulate(trace, count, policy) for policy in policies), simulate_ideal(trace, count)])
        for count in slots
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticRouting:
    """Routing with two properties that real routing has: some experts are more popular (`skew`, the exponent of a Zipf
    law; each layer has an order of its own), and a row tends to pick again what it picked for the token before
    (`stickiness`, added to the logarithm of an expert's weight). Every `drift_steps` a tenth of each layer's experts
    trade places, as when the subject changes."""

    layers: int = 26
    experts: int = 256
    per_token: int = 8
    rows: int = 1
    steps: int = 300
    skew: float = 0.6
    stickiness: float = 1.5
    drift_steps: int = 100
    seed: int = 0

    def trace(self) -> RoutingTrace:
        rng = np.random.default_rng(self.seed)
        numbers = range(1, self.layers + 1)
        recorder = TraceRecorder(numbers, self.experts)
        weight = -self.skew * np.log(np.arange(1, self.experts + 1))
        popularity = np.stack([rng.permutation(weight) for _ in numbers])
        before = np.zeros((self.layers, self.rows, self.experts), dtype=np.bool_)
        for step in range(self.steps):
            if step and step % self.drift_steps == 0:
                for order in popularity:
                    moved = rng.choice(self.experts, self.experts // 10, replace=False)
                    order[moved] = order[rng.permutation(moved)]
            for place, layer in enumerate(numbers):
                # The largest of log-weights plus Gumbel noise are a draw without replacement.
                noise = rng.gumbel(size=(self.rows, self.experts))
                score = popularity[place] + self.stickiness * before[place] + noise
                picks = np.argpartition(-score, self.per_token, axis=1)[:, : self.per_token]
                before[place] = False
                np.put_along_axis(before[place], picks, True, axis=1)
                recorder.add(layer, np.unique(picks).astype(np.int32), picks.size)
        return recorder.trace()


EXAMPLES = {
    "one session, popular experts": SyntheticRouting(layers=8, steps=300, skew=0.6, stickiness=1.5),
    "one session, sticky routing": SyntheticRouting(layers=8, steps=300, skew=0.3, stickiness=3.0),
    "8 sessions, popular experts": SyntheticRouting(layers=8, steps=120, rows=8, skew=0.6, stickiness=1.5),
}
"""Routing between which real models lie: what is reused is what many tokens pick, or what the last token picked."""

WORKING_SETS = (0.5, 1, 2, 4)
"""Sizes compared, in experts that one step visits in all layers."""


def report(name: str, trace: RoutingTrace) -> str:
    """The hit rates of every policy at each size, as lines of text."""
    visited = len(trace.ids) / max(trace.visits, 1)
    lines = [f"{name}: {trace.visits:,} visits of {visited:.1f} experts"]
    sizes = sorted({max(1, round(share * visited * len(trace.layers))) for share in WORKING_SETS})
    for slots, results in compare(trace, sizes):
        rates = "  ".join(f"{result.policy} {result.hit_rate:.3f}" for result in results)
        lines.append(f"  {slots:6,} slots: {rates}")
    return "\n".join(lines)


def main() -> None:
    """Print the comparison for the examples, or for the trace files named on the command line."""
    traces = {path: RoutingTrace.load(Path(path)) for path in sys.argv[1:]}
    for name, trace in (traces or {name: example.trace() for name, example in EXAMPLES.items()}).items():
        print(report(name, trace))


if __name__ == "__main__":
    main()
