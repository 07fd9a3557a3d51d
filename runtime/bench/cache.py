"""`serai bench cache`: what the expert cache's policies would have done with recorded routing, without a model.

Nothing is timed, so the figures are the same on every machine: hit rates of every policy at several sizes, beside the
ideal that knows the future (`experts.simulate`). They answer which policy to keep and which budget is worth it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from serai.runtime.bench.report import Report
from serai.runtime.errors import BadParameter
from serai.runtime.experts.simulate import EXAMPLES, WORKING_SETS, compare
from serai.runtime.experts.trace import RoutingTrace

QUICK_STEPS = 40


def bench_cache(files: Sequence[Path] = (), slots: Sequence[int] = (), *, quick: bool = False) -> Report:
    """A row for each trace, number of slots and policy; without `files` the synthetic examples are taken.

    `slots` replaces the usual sizes, which are multiples of the experts that one step visits in all layers. Raises
    `BadParameter` for a file that is no trace, or for fewer slots than one.
    """
    if any(count < 1 for count in slots):
        raise BadParameter(f"slots is {min(slots)}, but a cache has at least one slot")
    rows: list[Mapping[str, object]] = []
    for name, trace in _traces(files, quick).items():
        step = len(trace.ids) / max(trace.visits, 1) * len(trace.layers)
        sizes = sorted(set(slots) or {max(1, round(share * step)) for share in WORKING_SETS})
        for _, results in compare(trace, sizes):
            for result in results:
                rows.append(
                    {"trace": name, "visits": trace.visits} | asdict(result) | {"hit_rate": round(result.hit_rate, 4)}
                )
    return Report("cache", (), tuple(rows))


def _traces(files: Sequence[Path], quick: bool) -> dict[str, RoutingTrace]:
    if files:
        return {str(path): RoutingTrace.load(path) for path in files}
    return {
        name: (replace(example, steps=QUICK_STEPS) if quick else example).trace() for name, example in EXAMPLES.items()
    }
