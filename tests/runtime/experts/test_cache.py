"""The expert cache's bookkeeping."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from serai.runtime.experts.cache import PAGE_BYTES, ExpertCache
from serai.runtime.experts.policy import Lru, SlotState
from serai.runtime.experts.slots import NOT_HELD, SlotTable


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def load(table: SlotTable, layer: int, *experts: int) -> NDArray[np.int64]:
    slots = table.begin_load(layer, ids(*experts))
    for slot in slots:
        table.finish_load(int(slot))
    return slots


def test_an_expert_is_found_once_its_read_has_ended() -> None:
    table = SlotTable((1, 3), 4, 3)
    assert table.want(3, ids(0, 2), 8).tolist() == [NOT_HELD, NOT_HELD]
    slots = table.begin_load(3, ids(0, 2))
    assert table.states(slots).tolist() == [SlotState.LOADING] * 2
    for slot in slots:
        table.finish_load(int(slot))
    assert table.lookup(3, ids(0, 1, 2)).tolist() == [0, NOT_HELD, 1]
    assert table.lookup(1, ids(0, 2)).tolist() == [NOT_HELD, NOT_HELD]
    assert table.expert_in(1) == (3, 2)
    assert table.expert_in(2) is None
    table.check()


def test_a_pinned_or_loading_expert_survives_every_need_for_room() -> None:
    """B12."""
    table = SlotTable((0,), 8, 3, Lru())
    pinned = load(table, 0, 0)
    table.pin(pinned)
    loading = table.begin_load(0, ids(1))
    assert len(table.begin_load(0, ids(2, 3, 4))) == 1
    assert table.expert_in(int(pinned[0])) == (0, 0)
    assert table.expert_in(int(loading[0])) == (0, 1)
    assert len(table.begin_load(0, ids(5))) == 0
    table.check()


def test_a_slot_pinned_twice_is_free_after_the_second_unpin() -> None:
    table = SlotTable((0,), 4, 2)
    slots = load(table, 0, 1)
    table.pin(slots)
    table.pin(slots)
    table.unpin(slots)
    assert table.states(slots).tolist() == [SlotState.IN_USE]
    table.unpin(slots)
    assert table.states(slots).tolist() == [SlotState.READY]
    with pytest.raises(ValueError, match="not all pinned"):
        table.unpin(slots)


def test_a_slot_pinned_while_loading_is_in_use_when_filled() -> None:
    table = SlotTable((0,), 4, 2)
    slots = table.begin_load(0, ids(1))
    table.pin(slots)
    table.finish_load(int(slots[0]))
    assert table.states(slots).tolist() == [SlotState.IN_USE]
    table.check()


def test_a_failed_load_leaves_the_slot_empty_and_the_expert_unknown() -> None:
    table = SlotTable((0,), 4, 2)
    slots = table.begin_load(0, ids(1))
    table.pin(slots)
    table.fail_load(int(slots[0]))
    assert table.lookup(0, ids(1)).tolist() == [NOT_HELD]
    assert table.counters.failed_loads == 1
    table.check()


def test_a_wanted_read_cannot_be_cancelled() -> None:
    table = SlotTable((0,), 4, 2)
    slots = table.begin_load(0, ids(1, 2), guess=True)
    table.pin(slots[:1])
    with pytest.raises(ValueError, match="waited for"):
        table.cancel_load(int(slots[0]))
    table.cancel_load(int(slots[1]))
    assert table.count(SlotState.EMPTY) == 1
    table.check()


def test_wants_are_counted_as_hits_late_or_misses_and_guesses_as_used_or_not() -> None:
    table = SlotTable((0, 1), 8, 6)
    load(table, 1, 0)
    guesses = table.begin_load(1, ids(1, 2, 3), guess=True)
    table.finish_load(int(guesses[0]))
    table.want(1, ids(0, 1, 2, 5), 8)
    counters = table.counters
    assert (counters.hits, counters.late, counters.misses) == (2, 1, 1)
    assert (counters.guessed, counters.guesses_used) == (3, 2)
    assert counters.hit_rate == counters.sharing == 0.5
    assert not table.view().guessed.any()  # the wrong guess is over too


def test_usage_outlives_eviction_and_can_be_carried_over() -> None:
    table = SlotTable((0,), 4, 1)
    for _ in range(3):
        table.want(0, ids(2), 8)
    table.want(0, ids(1), 8)
    usage = table.usage()
    assert usage[0].argsort()[::-1][:2].tolist() == [2, 1]
    other = SlotTable((0,), 4, 1)
    other.remember(usage)
    assert np.array_equal(other.usage(), usage)
    with pytest.raises(ValueError, match="before the first visit"):
        table.remember(usage)


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        SlotTable((0,), 4, 0)
    with pytest.raises(ValueError, match="multiple of 4096"):
        ExpertCache((0,), 4, 2, 1000)
    table = SlotTable((0,), 4, 2)
    load(table, 0, 1)
    with pytest.raises(ValueError, match=r"\[1\] of layer 0 are held already"):
        table.begin_load(0, ids(0, 1))
    with pytest.raises(ValueError, match="not LOADING"):
        table.finish_load(0)
    with pytest.raises(ValueError, match="empty"):
        table.pin(np.array([1]))


def test_slots_are_distinct_whole_pages() -> None:
    cache = ExpertCache((0,), 4, 3, 2 * PAGE_BYTES)
    addresses = cache.addresses(np.arange(3))
    assert (addresses % PAGE_BYTES == 0).all()
    assert np.diff(addresses).tolist() == [2 * PAGE_BYTES] * 2
    for slot in range(3):
        cache.memory(slot)[:] = slot
    assert [int(cache.memory(slot).sum()) for slot in range(3)] == [0, 8192, 16384]
    assert cache.memory(2).ctypes.data == addresses[2]
    assert cache.nbytes == 6 * PAGE_BYTES
    assert cache.resident_bytes == 0
    cache.begin_load(0, ids(1))
    assert cache.resident_bytes == 2 * PAGE_BYTES
    cache.check()


LAYERS, EXPERTS, SLOTS = (2, 3, 5), 6, 4


class CacheMachine(RuleBasedStateMachine):
    """Any order of operations against a dictionary of what must be held."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ExpertCache(LAYERS, EXPERTS, SLOTS, PAGE_BYTES)
        self.held: dict[int, tuple[int, int]] = {}
        self.loading: set[int] = set()
        self.pins: dict[int, int] = {}

    @rule(layer=st.sampled_from(LAYERS), wanted=st.sets(st.integers(0, EXPERTS - 1), min_size=1), guess=st.booleans())
    def load_what_is_missing(self, layer: int, wanted: set[int], guess: bool) -> None:
        asked = ids(*sorted(wanted))
        slots = self.cache.lookup(layer, asked) if guess else self.cache.want(layer, asked, 8)
        missing = asked[slots == NOT_HELD]
        protected = {slot: what for slot, what in self.held.items() if slot in self.loading or slot in self.pins}
        taken = self.cache.begin_load(layer, missing, guess=guess)
        for slot, expert in zip(taken.tolist(), missing.tolist(), strict=False):
            assert slot not in protected
            self.held[slot] = (layer, expert)
            self.loading.add(slot)
        for slot, what in protected.items():
            assert self.cache.expert_in(slot) == what

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), how=st.sampled_from(["finish", "fail", "cancel"]))
    def end_a_load(self, data: st.DataObject, how: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        if how == "cancel" and slot in self.pins:
            return
        getattr(self.cache, f"{how}_load")(slot)
        self.loading.remove(slot)
        if how != "finish":
            del self.held[slot]
            self.pins.pop(slot, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin_one(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.pin(np.array([slot]))
        self.pins[slot] = self.pins.get(slot, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin_one(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.pins)))
        self.cache.unpin(np.array([slot]))
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]

    @invariant()
    def holds_what_it_should(self) -> None:
        self.cache.check()
        assert self.cache.resident_bytes <= self.cache.nbytes == SLOTS * PAGE_BYTES
        assert {slot: self.cache.expert_in(slot) for slot in self.held} == self.held
        for slot in range(SLOTS):
            state = SlotState(int(self.cache.states(np.array([slot]))[0]))
            expected = (
                SlotState.EMPTY
                if slot not in self.held
                else SlotState.LOADING
                if slot in self.loading
                else SlotState.IN_USE
                if slot in self.pins
                else SlotState.READY
            )
            assert state is expected


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
