"""Routing traces, and what a cache would have done with them."""

from pathlib import Path

import numpy as np
import pytest

from serai.runtime.errors import BadParameter
from serai.runtime.experts.access import ResidentExperts
from serai.runtime.experts.policy import DEFAULT_POLICY, POLICIES, Lru, NextUse, Policy
from serai.runtime.experts.simulate import SyntheticRouting, compare, simulate, simulate_ideal
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.experts.trace import RoutingTrace, TracedExperts, TraceRecorder
from tests.runtime.experts.records import EXPERTS, LAYERS, RecordFile, ids

SMALL = SyntheticRouting(layers=4, experts=32, per_token=4, steps=40, drift_steps=15)


def recorded(*visits: tuple[int, list[int]]) -> RoutingTrace:
    recorder = TraceRecorder((1, 2), 8)
    for layer, wanted in visits:
        recorder.add(layer, ids(*wanted), 2 * len(wanted))
    return recorder.trace()


def test_a_trace_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = SMALL.trace()
    trace.save(tmp_path / "t.npz")
    loaded = RoutingTrace.load(tmp_path / "t.npz")
    assert loaded.layers == trace.layers
    assert loaded.experts == 32
    assert loaded.visits == 160
    for (layer, wanted, picks), (layer_too, wanted_too, picks_too) in zip(trace, loaded, strict=True):
        assert (layer, wanted.tolist(), picks) == (layer_too, wanted_too.tolist(), picks_too)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a trace")
    with pytest.raises(BadParameter, match="no routing trace"):
        RoutingTrace.load(tmp_path / "text")
    with pytest.raises(BadParameter, match="no routing trace"):
        RoutingTrace.load(tmp_path / "missing")
    trace = recorded((1, [0, 1]))
    for broken in (
        {"ids": np.array([0, 9], np.uint16)},
        {"starts": np.array([0, 3])},
        {"visit_layers": np.array([7], np.uint16)},
        {"picks": np.array([1, 2])},
    ):
        arrays = {name: getattr(trace, name) for name in ("visit_layers", "starts", "ids", "picks")}
        np.savez(tmp_path / "broken.npz", layers=[1, 2], experts=8, **(arrays | broken))
        with pytest.raises(BadParameter, match="no sound routing trace"):
            RoutingTrace.load(tmp_path / "broken.npz")


def test_visits_are_recorded_on_their_way_to_the_experts(tmp_path: Path) -> None:
    source = RecordFile(tmp_path)
    recorder = TraceRecorder(LAYERS, EXPERTS)
    experts = TracedExperts(ResidentExperts.load(source, 1), recorder)
    source.close()
    visit = experts.visit(2, ids(1, 5), 3)
    batch = visit.take()
    assert batch is not None
    assert len(batch.addresses) == 2
    experts.guess(1, ids(0))
    experts.close()
    assert [(layer, wanted.tolist(), picks) for layer, wanted, picks in recorder.trace()] == [(2, [1, 5], 3)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("slots", [3, 9, 40])
def test_the_simulator_counts_what_the_cache_does(tmp_path: Path, policy: Policy, slots: int) -> None:
    trace = SyntheticRouting(layers=2, experts=EXPERTS, per_token=3, steps=30).trace()
    simulated = simulate(trace, slots, policy)
    experts = StreamedExperts(RecordFile(tmp_path), slots, 2, policy)
    for layer, wanted, picks in trace:
        visit = experts.visit(layer, wanted, picks)
        while not visit.finished:
            if visit.take() is None:
                visit.wait(30)
        visit.close()
    counters = experts.status.cache
    experts.close()
    assert simulated.wanted == counters.wanted == counters.picks
    if slots >= 3 + 3:  # with fewer, the order in which reads end decides what is dropped within a visit
        assert simulated.misses == counters.misses


def test_no_policy_beats_the_ideal_and_all_are_equal_when_everything_fits() -> None:
    trace = SMALL.trace()
    for slots, results in compare(trace, [4, 16, 60, 128]):
        ideal = results[-1]
        assert ideal.policy == "ideal"
        for result in results:
            assert result.misses >= ideal.misses
            assert result.slots == slots
            if slots == 128:
                assert result.misses == len(np.unique(trace.ids + 32 * np.repeat(trace.visit_layers, 4)))


def test_the_ideal_drops_what_is_wanted_last() -> None:
    trace = recorded((1, [0]), (1, [1]), (1, [2]), (1, [0]), (1, [1]), (1, [2]), (1, [0]))
    assert simulate_ideal(trace, 2).misses == 5  # 0, 1, then 2 in place of 1, then 1 and 2 again
    assert simulate(trace, 2, Lru()).misses == 7


def test_a_cache_under_one_pass_keeps_something_unless_it_is_lru() -> None:
    """A pass through the layers is a scan: by the time an expert is wanted again, LRU has dropped it."""
    trace = SMALL.trace()
    assert simulate(trace, 8, Lru()).hit_rate == 0
    assert simulate(trace, 8, NextUse()).hit_rate > 0.05


def test_the_chosen_policy_is_the_best_of_them_on_routing_like_a_models() -> None:
    for rows in (1, 4):
        trace = SyntheticRouting(layers=4, experts=48, per_token=4, rows=rows, steps=120).trace()
        for _, results in compare(trace, [8, 32, 64]):
            rates = {result.policy: result.hit_rate for result in results}
            assert rates[DEFAULT_POLICY.name] >= rates["lru"] - 0.02
            assert rates[DEFAULT_POLICY.name] >= rates["lfru"] - 0.01


def test_rows_of_a_step_share_what_they_read() -> None:
    alone, together = SMALL.trace(), SyntheticRouting(layers=4, experts=32, per_token=4, steps=40, rows=8).trace()
    assert len(alone.ids) == alone.picks.sum()
    assert len(together.ids) < 0.8 * together.picks.sum()
