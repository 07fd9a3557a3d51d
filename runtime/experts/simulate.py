"""What a cache would have done: policies and sizes compared on recorded or synthetic routing, without a model."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
