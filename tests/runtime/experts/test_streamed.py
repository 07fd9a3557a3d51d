"""Visits to a cache smaller than all experts."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from serai.runtime.experts.access import Experts, ResidentExperts, Visit, pairs_of
from serai.runtime.experts.disk import DiskCalls
from serai.runtime.experts.errors import ExpertUnreadable
from serai.runtime.experts.policy import SlotState
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.experts.visits import StreamedVisit
from tests.runtime.experts.faults import FailingReads, GatedReads
from tests.runtime.experts.records import EXPERTS, LAYERS, LAYOUT, RecordFile, at_address, expected_record, ids


@contextmanager
def streaming(
    folder: Path, slots: int, calls: DiskCalls | None = None, reads_in_flight: int = 2
) -> Iterator[StreamedExperts]:
    experts = StreamedExperts(RecordFile(folder, calls), slots, reads_in_flight)
    try:
        yield experts
        experts.check()
    finally:
        experts.close()


def everything(experts: Experts, visit: Visit, layer: int, wanted: NDArray[np.int32]) -> list[list[int]]:
    """Take all of a visit, holding each record against what it should be; gives the ids batch by batch."""
    batches = []
    end_s = time.monotonic() + 60
    while not visit.finished:
        assert time.monotonic() < end_s, "it waits for ever"
        batch = visit.take()
        if batch is None:
            visit.wait(1)
            continue
        for which, address in zip(batch.which, batch.addresses, strict=True):
            assert np.array_equal(at_address(int(address)), expected_record(layer, int(wanted[which])))
        batches.append(wanted[batch.which].tolist())
    assert visit.take() is None
    visit.close()
    return batches


def read_to_the_end(experts: StreamedExperts) -> None:
    while experts.cache.count(SlotState.LOADING):
        assert experts.reader.wait(30)
        experts.collect()


def visited(experts: Experts, layer: int, *wanted: int) -> list[list[int]]:
    return everything(experts, experts.visit(layer, ids(*wanted), 9), layer, ids(*wanted))


@pytest.mark.parametrize("slots", [1, 2, 5, 100])
def test_every_expert_comes_once_and_whole_whatever_the_cache_holds(tmp_path: Path, slots: int) -> None:
    """B13, as far as bytes go: the same records at every size of the cache."""
    with streaming(tmp_path, slots) as experts:
        for layer in (1, 2, 1, 2):
            batches = visited(experts, layer, 0, 2, 3, 5, 7)
            assert sorted(chain(*batches)) == [0, 2, 3, 5, 7]
        assert experts.cache.slots <= len(LAYERS) * EXPERTS


def test_all_in_memory_comes_at_once(tmp_path: Path) -> None:
    source = RecordFile(tmp_path)
    seen: list[tuple[int, int]] = []
    experts = ResidentExperts.load(source, 2, lambda done, total: seen.append((done, total)))
    source.close()
    assert seen[-1] == (16, 16)
    assert experts.nbytes == 16 * LAYOUT.record_bytes
    assert visited(experts, 2, 1, 4, 6) == [[1, 4, 6]]
    experts.guess(1, ids(1))
    empty = experts.visit(1, ids(), 9)
    assert empty.finished
    experts.close()


def test_what_is_in_memory_comes_first_while_the_rest_is_read(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 6, calls) as experts:
        visited(experts, 1, 2, 4)
        calls.armed = True
        wanted = ids(1, 2, 3, 4)
        visit = experts.visit(1, wanted, 9)
        first = visit.take()
        assert first is not None
        assert wanted[first.which].tolist() == [2, 4]
        assert calls.waiting.acquire(timeout=30)  # the disk is at work before anything was computed
        assert visit.take() is None
        assert not visit.finished
        calls.gate.set()
        assert sorted(chain(*everything(experts, visit, 1, wanted))) == [1, 3]


def test_a_step_whose_experts_are_all_in_memory_reads_nothing(tmp_path: Path) -> None:
    with streaming(tmp_path, 4) as experts:
        visited(experts, 1, 0, 1, 2, 3)
        reads = experts.reader.counters.reads
        assert visited(experts, 1, 0, 1, 2, 3) == [[0, 1, 2, 3]]
        assert experts.reader.counters.reads == reads == 4
        assert experts.status.cache.hits == 4


def test_addresses_hold_until_the_next_batch_is_taken(tmp_path: Path) -> None:
    """B12: with two slots the third expert must not land on one that is being computed with."""
    with streaming(tmp_path, 2) as experts:
        wanted = ids(0, 1, 2, 3)
        visit = experts.visit(1, wanted, 9)
        seen = 0
        while not visit.finished:
            batch = visit.take()
            if batch is None:
                visit.wait(30)
                continue
            seen += len(batch.which)
            held = experts.cache.lookup(1, wanted[batch.which])
            assert (experts.cache.states(held) == SlotState.IN_USE).all()
            experts.cache.check()
        assert seen == 4
        visit.close()


def test_two_visits_share_a_cache_of_one_slot(tmp_path: Path) -> None:
    """B12: two groups taking turns; each gets through, neither is given the other's bytes."""
    with streaming(tmp_path, 1) as experts:
        asked = [(1, ids(0, 3)), (2, ids(0, 3)), (1, ids(3, 5))]
        visits = [experts.visit(layer, wanted, 9) for layer, wanted in asked]
        left = [len(wanted) for _, wanted in asked]
        turns = 0
        while any(left):
            turns += 1
            assert turns < 1000
            moved = False
            for number, (layer, wanted) in enumerate(asked):
                batch = visits[number].take()
                if batch is not None:
                    moved = True
                    left[number] -= len(batch.which)
                    for which, address in zip(batch.which, batch.addresses, strict=True):
                        assert np.array_equal(at_address(int(address)), expected_record(layer, int(wanted[which])))
                experts.check()
            if not moved:
                visits[0].wait(30)
        for visit in visits:
            assert visit.finished
            visit.close()


def test_two_visits_that_miss_the_same_expert_read_it_once(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 4, calls) as experts:
        calls.armed = True
        one, two = experts.visit(1, ids(6), 9), experts.visit(1, ids(6), 9)
        calls.gate.set()
        assert everything(experts, one, 1, ids(6)) == [[6]]
        assert everything(experts, two, 1, ids(6)) == [[6]]
        assert experts.reader.counters.reads == 1


def test_a_dropped_visit_gives_its_slots_back_and_cancels_its_reads(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 4, calls, reads_in_flight=1) as experts:
        calls.armed = True
        visit = experts.visit(1, ids(0, 1, 2), 9)
        assert calls.waiting.acquire(timeout=30)
        visit.close()
        visit.close()
        assert experts.status.cache.cancelled_loads == 2
        calls.gate.set()
        assert visited(experts, 1, 3) == [[3]]
        assert experts.reader.counters.reads == 2
        experts.check()


def test_closing_one_visit_leaves_what_the_other_waits_for(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 4, calls, reads_in_flight=1) as experts:
        calls.armed = True
        one, two = experts.visit(1, ids(0, 1), 9), experts.visit(1, ids(1), 9)
        one.close()
        calls.gate.set()
        assert everything(experts, two, 1, ids(1)) == [[1]]


def test_an_unreadable_expert_fails_alone_and_is_tried_again_by_the_next_step(tmp_path: Path) -> None:
    """B25, EIO: the visit goes on with the others; the cause is kept for health reports."""
    calls = FailingReads(lambda number: number < 2)
    with streaming(tmp_path, 4, calls, reads_in_flight=1) as experts:
        calls.armed = True
        wanted = ids(2, 5, 6)
        visit = experts.visit(1, wanted, 9)
        assert sorted(chain(*everything(experts, visit, 1, wanted))) == [5, 6]
        assert list(visit.failures) == [0]
        assert isinstance(visit.failures[0], ExpertUnreadable)
        assert experts.status.degraded == str(visit.failures[0])
        experts.check()
        assert visited(experts, 1, 2) == [[2]]
        assert experts.status.degraded == "", "it could be read after all"


def test_cached_experts_serve_on_when_the_file_is_cut(tmp_path: Path) -> None:
    """B25."""
    with streaming(tmp_path, 4) as experts:
        visited(experts, 2, 4, 5)
        os.truncate(tmp_path / "records", 3 * LAYOUT.record_bytes)
        assert visited(experts, 2, 4, 5) == [[4, 5]]
        wanted = ids(4, 7)
        visit = experts.visit(2, wanted, 9)
        assert everything(experts, visit, 2, wanted) == [[4]]
        assert "ended at 12,288 of 65,536 bytes" in str(visit.failures[1])
        assert visited(experts, 1, 0) == [[0]]


def test_a_failure_reaches_every_visit_that_waits(tmp_path: Path) -> None:
    calls = FailingReads(lambda number: number < 2)
    with streaming(tmp_path, 4, calls, reads_in_flight=1) as experts:
        calls.armed = True
        one, two = experts.visit(1, ids(3), 9), experts.visit(1, ids(3), 9)
        assert everything(experts, one, 1, ids(3)) == []
        assert everything(experts, two, 1, ids(3)) == []
        assert one.failures.keys() == two.failures.keys() == {0}


def test_a_right_guess_is_there_when_its_layer_comes(tmp_path: Path) -> None:
    with streaming(tmp_path, 8) as experts:
        visited(experts, 1, 0, 1)
        experts.guess(2, ids(3, 4))
        read_to_the_end(experts)
        assert visited(experts, 2, 3, 5)[0] == [3]
        counters = experts.status.cache
        assert (counters.guessed, counters.guesses_used, counters.guess_rate) == (2, 1, 0.5)


def test_a_guess_takes_no_slot_from_what_is_in_use_nor_all_that_is_free(tmp_path: Path) -> None:
    with streaming(tmp_path, 4) as experts:
        visited(experts, 1, 0, 1)
        visit = experts.visit(1, ids(0, 1), 9)
        batch = visit.take()
        assert batch is not None
        experts.guess(2, ids(0, 1, 2, 3))
        assert experts.status.cache.guessed == 1  # half of the two that were free
        assert np.array_equal(at_address(int(batch.addresses[1])), expected_record(1, 1))
        visit.close()


def test_wrong_guesses_not_begun_are_not_read(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 8, calls, reads_in_flight=1) as experts:
        calls.armed = True
        experts.guess(2, ids(1, 2, 3))
        assert calls.waiting.acquire(timeout=30)
        visit = experts.visit(2, ids(3, 4), 9)
        assert experts.status.cache.cancelled_loads == 1  # 2; the read of 1 was under way, 3 is wanted
        calls.gate.set()
        assert sorted(chain(*everything(experts, visit, 2, ids(3, 4)))) == [3, 4]
        assert experts.status.cache.late == 1


def test_what_a_step_misses_is_read_before_what_a_standing_visit_in_order_comes_to_later(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 16, calls, reads_in_flight=1) as experts:
        calls.armed = True
        order: list[tuple[int, int]] = []
        finish = experts.cache.finish_load

        def noted(slot: int) -> None:
            held = experts.cache.expert_in(slot)
            assert held is not None
            order.append(held)
            finish(slot)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts.cache, "finish_load", noted)
            wide = experts.visit(1, ids(*range(8)), 99, expected=experts.expect(1))
            assert calls.waiting.acquire(timeout=30)
            answer = experts.visit(2, ids(3), 1)
            calls.gate.set()
            assert everything(experts, answer, 2, ids(3)) == [[3]]
            assert sorted(chain(*everything(experts, wide, 1, ids(*range(8))))) == list(range(8))
        assert order[:2] == [(1, 0), (2, 3)]


def test_steps_in_between_leave_a_wide_pass_what_was_read_ahead_for_it(tmp_path: Path) -> None:
    """Neither those of the same layer, which want other experts, nor those that need every slot they may take."""
    calls = GatedReads()
    with streaming(tmp_path, 8, calls, reads_in_flight=1) as experts:
        calls.armed = True
        expected = experts.expect(2)
        assert calls.waiting.acquire(timeout=30)
        visit = experts.visit(2, ids(3, 5), 2)
        calls.gate.set()
        assert sorted(chain(*everything(experts, visit, 2, ids(3, 5)))) == [3, 5]
        assert visited(experts, 1, *range(8))
        wide = experts.visit(2, ids(0, 1, 3), 99, expected=expected)
        assert sorted(chain(*everything(experts, wide, 2, ids(0, 1, 3)))) == [0, 1, 3]
        # Nothing was read twice; the second expert, read ahead and not wanted in the end, perhaps not at all.
        assert experts.reader.counters.reads in (3 + 1 + 8, 4 + 1 + 8)


def test_an_ordered_visit_is_read_ahead_of_by_the_next_as_slots_come_free(tmp_path: Path) -> None:
    """Half of the slots hold what both have read; every expert is read once."""
    with streaming(tmp_path, 8) as experts:
        expected: Visit | None = experts.expect(1)
        for layer, following in ((1, 2), (2, None)):
            visit = experts.visit(layer, ids(*range(8)), 99, expected=expected)
            expected = None if following is None else experts.expect(following)
            batches = everything(experts, visit, layer, ids(*range(8)))
            assert list(chain(*batches)) == list(range(8))
            if expected is not None:
                read_to_the_end(experts)
                assert experts.reader.counters.reads == 8 + 4
                assert np.count_nonzero(experts.cache.lookup(2, ids(*range(8))) >= 0) == 4
        assert experts.reader.counters.reads == 16
        counters = experts.status.cache
        assert (counters.misses + counters.guesses_used, counters.loads) == (16, 16)


def test_a_later_ordered_visit_leaves_the_slots_to_the_one_before_it(tmp_path: Path) -> None:
    """Of two slots ordered visits have one; the later took it when it came free, and the earlier waited for ever."""
    with streaming(tmp_path, 2) as experts:
        step = experts.visit(1, ids(6, 7), 2)
        first = experts.expect(1)  # the step holds both slots
        read_to_the_end(experts)
        step.close()
        second = experts.expect(2)
        visit = experts.visit(1, ids(0, 3), 99, expected=first)
        assert list(chain(*everything(experts, visit, 1, ids(0, 3)))) == [0, 3]
        visit = experts.visit(2, ids(1, 4), 99, expected=second)
        assert list(chain(*everything(experts, visit, 2, ids(1, 4)))) == [1, 4]


def test_what_was_expected_and_is_not_chosen_is_not_read(tmp_path: Path) -> None:
    calls = GatedReads()
    with streaming(tmp_path, 16, calls, reads_in_flight=1) as experts:
        calls.armed = True
        expected = experts.expect(1)
        assert calls.waiting.acquire(timeout=30)
        visit = experts.visit(1, ids(2, 7), 99, expected=expected)
        assert experts.status.cache.cancelled_loads == 5  # the read of 0 had begun
        calls.gate.set()
        assert list(chain(*everything(experts, visit, 1, ids(2, 7)))) == [2, 7]
        expected = experts.expect(2)
        expected.close()
        assert not experts.visits


def test_a_read_that_failed_before_its_expert_was_chosen_is_a_failure_of_the_visit(tmp_path: Path) -> None:
    calls = FailingReads(lambda number: number < 4)  # two experts, both times
    with streaming(tmp_path, 16, calls, reads_in_flight=1) as experts:
        calls.armed = True
        expected = experts.expect(1)
        read_to_the_end(experts)
        visit = experts.visit(1, ids(1, 2, 5), 99, expected=expected)
        assert list(visit.failures) == [0]
        assert list(chain(*everything(experts, visit, 1, ids(1, 2, 5)))) == [2, 5]


def test_a_warm_start_reads_what_was_used_most(tmp_path: Path) -> None:
    usage = np.zeros((2, EXPERTS))
    usage[0, 3], usage[1, 6], usage[1, 2] = 5.0, 9.0, 1.0
    with streaming(tmp_path, 2) as experts:
        experts.warm(usage)
        assert experts.cache.lookup(1, ids(3)).min() >= 0
        assert experts.cache.lookup(2, ids(6)).min() >= 0
        reads = experts.reader.counters.reads
        assert visited(experts, 2, 6) == [[6]]
        assert experts.reader.counters.reads == reads


def test_the_status_says_how_it_goes(tmp_path: Path) -> None:
    with streaming(tmp_path, 3) as experts:
        visited(experts, 1, 0, 1)
        status = experts.status
        assert (status.slots, status.slots_filled, status.slot_bytes) == (3, 2, LAYOUT.record_bytes)
        assert status.reads.read_bytes == 2 * LAYOUT.record_bytes
        assert status.degraded == ""
        assert experts.nbytes == 3 * LAYOUT.record_bytes + 2 * RecordFile.scratch_bytes
    assert isinstance(experts.source, RecordFile)
    assert experts.source.closed


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_groups_of_pairs_can_be_taken_apart(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    pairs = np.random.default_rng(1).permutation(int(starts[-1])).astype(np.int32)
    which = np.array(sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))))
    new_starts, new_pairs = pairs_of(which, starts, pairs)
    assert new_starts.dtype == new_pairs.dtype == np.int32
    for place, group in enumerate(which):
        old = pairs[starts[group] : starts[group + 1]]
        assert new_pairs[new_starts[place] : new_starts[place + 1]].tolist() == old.tolist()


def test_many_visits_of_two_groups_keep_the_books(tmp_path: Path) -> None:
    """B12: fifty steps of two groups over two slots, the disk failing now and then."""
    calls = FailingReads(lambda number: number % 7 in (0, 1))
    rng = np.random.default_rng(11)
    with streaming(tmp_path, 2, calls) as experts:
        calls.armed = True
        for _ in range(50):
            asked = [
                (int(rng.choice(LAYERS)), np.sort(rng.choice(EXPERTS, 4, replace=False)).astype(np.int32))
                for _ in range(2)
            ]
            visits: list[StreamedVisit] = [experts.visit(layer, wanted, 9) for layer, wanted in asked]
            moved = True
            while not all(visit.finished for visit in visits):
                if not moved:
                    visits[0].wait(30)
                moved = False
                for visit, (layer, wanted) in zip(visits, asked, strict=True):
                    batch = visit.take()
                    if batch is None:
                        continue
                    moved = True
                    for which, address in zip(batch.which, batch.addresses, strict=True):
                        assert np.array_equal(at_address(int(address)), expected_record(layer, int(wanted[which])))
                experts.check()
            for visit in visits:
                visit.close()
            experts.check()
            assert experts.cache.resident_bytes <= experts.cache.nbytes
