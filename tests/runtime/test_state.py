"""States are values: shared by forks, written by drafts, given back whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serai.checkpoints.files.streams import BLOCK_BYTES, DIRECT_FROM_BYTES
from serai.checkpoints.snapshot import LatentType, StateLayout
from serai.runtime.errors import OutOfBudget
from serai.runtime.state import (
    Draft,
    Part,
    State,
    StatePool,
    fill,
    kda_view,
    page_view,
    part_bytes,
    session_bytes,
    snapshot_of,
    tails_view,
)

LAYOUT = StateLayout(
    kda_shape=(2, 1, 4, 4),
    conv_shape=(2, 3, 3, 4),
    mla_layers=2,
    latent_width=3,
    latent_type=LatentType.FLOAT32,
    page_tokens=4,
    vocab=5,
)


def write(layout: StateLayout, draft: Draft, tokens: list[int]) -> State:
    """What an engine does, with arithmetic a test can repeat: latents are the token ids, the rest their running sum."""
    for source, target, rows in draft.copies:
        page_view(layout, target)[:, :rows] = page_view(layout, source)[:, :rows]
    before = draft.before
    carried = 0.0 if before.fixed is None else float(before.fixed.array[0])
    draft.fixed.array[:] = carried + sum(tokens)
    for offset, token in enumerate(tokens):
        page, row = divmod(before.position + offset, layout.page_tokens)
        page_view(layout, draft.table.pages[page])[:, row] = token
    if draft.logits is not None:
        draft.logits.array[:] = carried + sum(tokens)
    return draft.commit()


def advance(pool: StatePool, state: State, tokens: list[int]) -> State:
    return write(pool.layout, pool.draft(state, len(tokens), with_logits=True), tokens)


def read(layout: StateLayout, state: State) -> list[int]:
    rows = [row[0] for page in state.table.pages for row in page_view(layout, page)[0]]
    return [int(one) for one in rows[: state.position]]


def test_a_fork_copies_nothing_and_a_diverging_one_copies_one_page() -> None:
    pool = StatePool(LAYOUT)
    parent = advance(pool, pool.empty(), [1, 2, 3, 4, 5, 6])
    before = pool.live_bytes
    child = parent.retain()
    assert pool.live_bytes == before

    first = advance(pool, parent, [7])
    assert pool.live(Part.PAGE) == 2, "the first to go on writes behind the shared rows"
    second = advance(pool, child, [8])
    assert pool.live(Part.PAGE) == 3, "the second copies the page they had in common"
    assert read(LAYOUT, first) == [1, 2, 3, 4, 5, 6, 7]
    assert read(LAYOUT, second) == [1, 2, 3, 4, 5, 6, 8]
    assert read(LAYOUT, parent) == [1, 2, 3, 4, 5, 6]


def test_an_abandoned_draft_gives_everything_back_and_its_rows_can_be_claimed_again() -> None:
    pool = StatePool(LAYOUT)
    state = advance(pool, pool.empty(), [1, 2])
    live = pool.live_bytes
    pool.draft(state, 5, with_logits=True).abandon()
    assert pool.live_bytes == live
    again = pool.draft(state, 1, with_logits=False)
    assert again.copies == (), "nobody else claimed the rows, so no page is copied"
    again.abandon()


def test_a_draft_over_the_limit_is_refused_and_takes_nothing() -> None:
    pool = StatePool(LAYOUT, limit_bytes=session_bytes(LAYOUT, 4) + 8)
    state = pool.draft(pool.empty(), 4, with_logits=True).commit()
    live = pool.live_bytes
    with pytest.raises(OutOfBudget) as refused:
        pool.draft(state, 1, with_logits=True)
    assert refused.value.needed_bytes == session_bytes(LAYOUT, 1)
    assert refused.value.free_bytes == 8
    assert pool.live_bytes == live


def test_poisoned_buffers_are_nan_in_every_part() -> None:
    pool = StatePool(LAYOUT, poison=True)
    draft = pool.draft(pool.empty(), 1, with_logits=True)
    assert draft.logits is not None
    for array in (kda_view(LAYOUT, draft.fixed), tails_view(LAYOUT, draft.fixed), draft.logits.array):
        assert np.isnan(array).all()
    assert np.isnan(page_view(LAYOUT, draft.table.pages[0])).all()


def test_a_state_whose_parts_disagree_cannot_be_built() -> None:
    pool = StatePool(LAYOUT)
    with pytest.raises(ValueError, match="fixed block"):
        State(3, None, pool.empty().table, None, pool.accounts.of(""))


@pytest.mark.parametrize("tokens", [0, 1, 4, 9])
def test_a_restored_snapshot_is_the_same_state(tokens: int) -> None:
    pool = StatePool(LAYOUT)
    state = pool.empty() if tokens == 0 else advance(pool, pool.empty(), list(range(1, tokens + 1)))
    other = StatePool(LAYOUT, poison=True)
    snapshot = snapshot_of(LAYOUT, state)
    again = other.empty()
    if tokens:
        draft = other.draft(again, tokens, with_logits=True)
        fill(draft, LAYOUT, snapshot)
        again = draft.commit()
    assert again.position == tokens
    assert read(LAYOUT, again) == read(LAYOUT, state)
    if state.fixed is not None and again.fixed is not None and state.logits is not None and again.logits is not None:
        np.testing.assert_array_equal(again.fixed.array, state.fixed.array)
        np.testing.assert_array_equal(again.logits.array, state.logits.array)


class Forks(RuleBasedStateMachine):
    """Any order of advancing, forking, abandoning and dropping leaves every state what a list of tokens says."""

    @initialize()
    def start(self) -> None:
        self.pool = StatePool(LAYOUT, poison=True)
        self.states: list[tuple[State, list[int]]] = [(self.pool.empty(), [])]

    @rule(which=st.integers(0, 99), tokens=st.lists(st.integers(1, 99), min_size=1, max_size=9))
    def advance_one(self, which: int, tokens: list[int]) -> None:
        index = which % len(self.states)
        state, ids = self.states[index]
        self.states[index] = (advance(self.pool, state, tokens), ids + tokens)
        state.release()

    @rule(which=st.integers(0, 99))
    def fork_one(self, which: int) -> None:
        state, ids = self.states[which % len(self.states)]
        self.states.append((state.retain(), list(ids)))

    @rule(which=st.integers(0, 99), tokens=st.integers(1, 9))
    def abandon_one(self, which: int, tokens: int) -> None:
        state, _ = self.states[which % len(self.states)]
        self.pool.draft(state, tokens, with_logits=True).abandon()

    @precondition(lambda self: len(self.states) > 1)
    @rule(which=st.integers(0, 99))
    def drop_one(self, which: int) -> None:
        state, _ = self.states.pop(which % len(self.states))
        state.release()

    @invariant()
    def every_state_reads_as_its_tokens(self) -> None:
        for state, ids in self.states:
            assert read(LAYOUT, state) == ids
            if state.fixed is not None:
                assert float(state.fixed.array[0]) == sum(ids)

    @invariant()
    def the_pool_counts_what_is_held(self) -> None:
        held = {id(buffer): buffer for state, _ in self.states for buffer in state.buffers()}
        assert self.pool.live_bytes == sum(part_bytes(LAYOUT, buffer.part) for buffer in held.values())


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_the_store_moves_as_it_lies_begins_on_a_block() -> None:
    layout = replace(LAYOUT, kda_shape=(1, 4, 128, 128), conv_shape=(1, 3, 3, 512))
    pool = StatePool(layout)
    assert part_bytes(layout, Part.FIXED) >= DIRECT_FROM_BYTES
    buffers = [pool.take(Part.FIXED, pool.accounts.of("")) for _ in range(3)]
    assert [buffer.address % BLOCK_BYTES for buffer in buffers] == [0, 0, 0]
