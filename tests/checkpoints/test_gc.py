"""Garbage: what a policy lets go, and what nothing may take away."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.checkpoints import NodeRecord, Store
from serai.checkpoints.index import Index
from serai.checkpoints.rows import FileKind
from serai.checkpoints.upkeep import gc
from serai.checkpoints.upkeep.gc import Candidate, GcPolicy, candidates_of, collect, least_valuable, surplus
from serai.checkpoints.upkeep.gc import value as value_of
from tests.checkpoints.samples import FINGERPRINT, LAYOUT, grown, make_node, make_snapshot, same_bits, saved
from tests.checkpoints.test_delta import chain


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time_s = 1_000_000.0

    def __call__(self) -> float:
        return self.time_s


def turns(store: Store, count: int) -> list[NodeRecord]:
    """One session of `count` turns, each with a snapshot."""
    state = make_snapshot(8)
    nodes = [saved(store, state)]
    for seed in range(1, count):
        state = grown(state, 5, seed)
        nodes.append(saved(store, state, nodes[-1]))
    return nodes


def kept(store: Store, nodes: list[NodeRecord]) -> list[int]:
    return [number for number, node in enumerate(nodes) if store.has_snapshot(node.id)]


def test_the_latest_snapshots_of_a_session_stay(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes, others = turns(store, 6), turns(store, 2)
        report = collect(store, GcPolicy(snapshots_per_session=3))
        assert kept(store, nodes) == [3, 4, 5]
        assert kept(store, others) == [0, 1]
        assert report.snapshots == 3
        assert report.freed_bytes > 0
        assert store.tokens(nodes[-1].id).tolist() == list(range(33))


def test_what_was_not_used_for_long_goes_but_not_a_head(tmp_path: Path) -> None:
    clock = Clock()
    with Store.open(str(tmp_path / "s"), now=clock) as store:
        nodes = turns(store, 4)
        clock.time_s += 100
        store.load(nodes[1].id)
        clock.time_s += 100
        collect(store, GcPolicy(snapshot_idle_s=150))
        assert kept(store, nodes) == [1, 3]


def test_tags_and_live_sessions_keep_what_they_need(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = turns(store, 5)
        unsaved = make_node(3, nodes[2])
        store.record(unsaved)
        store.tag("good", nodes[0].id)
        collect(store, GcPolicy(max_bytes=0, snapshots_per_session=0, snapshot_idle_s=0), protected=[unsaved.id])
        assert kept(store, nodes) == [0, 2]  # the tagged one, and what a replay to the live node starts from
        assert store.tokens(unsaved.id).size == 21


def test_what_can_no_longer_be_loaded_stands_for_nothing_and_goes_first(tmp_path: Path) -> None:
    """A tag on a node whose own snapshot was set aside needs the one before it, from which a replay starts."""
    with Store.open(str(tmp_path / "s")) as store:
        nodes = turns(store, 4)
        store.set_aside(nodes[2].id, "its first step failed")
        store.tag("good", nodes[2].id)
        collect(store, GcPolicy(snapshots_per_session=2))
        assert kept(store, nodes) == [1, 3], "the two latest that can be loaded"
        assert store.sizes().snapshots == 3, "what was set aside is there to look at"
        collect(store, GcPolicy(max_bytes=store.sizes().file_bytes - 1))
        assert kept(store, nodes) == [1, 3]
        assert store.sizes().snapshots == 2


def test_a_quota_takes_the_least_valuable_first(tmp_path: Path) -> None:
    clock = Clock()
    with Store.open(str(tmp_path / "s"), now=clock) as store:
        old = turns(store, 3)
        clock.time_s += 5 * 3600
        new = turns(store, 3)
        limit = store.sizes().file_bytes - 1
        collect(store, GcPolicy(max_bytes=limit))
        assert kept(store, new) == [0, 1, 2]
        assert len(kept(store, old)) == 2
        assert store.sizes().file_bytes <= limit
        collect(store, GcPolicy(max_bytes=0))
        assert kept(store, old) + kept(store, new) == []
        assert store.sizes().parts == 0


def tree(store: Store) -> list[NodeRecord]:
    """Turns of one session, and at every third a fork of it that shares its pages, with turns that have no snapshot."""
    nodes = turns(store, 8)
    for number in (1, 4, 7):
        between = make_node(2, nodes[number])
        store.record(between)
        state = make_snapshot(between.position + 3, seed=number)
        shared = store.load(nodes[number].id).pages[: nodes[number].position // state.layout.page_tokens]
        nodes.append(saved(store, replace(state, pages=shared + state.pages[len(shared) :]), between))
    return nodes


@pytest.mark.parametrize("tagged", [None, 4, 9])
def test_what_goes_first_is_as_if_all_were_counted_anew_after_each(tmp_path: Path, tagged: int | None) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = tree(store)
        kept = () if tagged is None else (nodes[tagged].id,)
        store.set_aside(nodes[2].id, "its first step failed")
        now_s = store.now()
        found, part_bytes = candidates_of(store, kept)
        assert any(candidate.own_bytes < sum(map(part_bytes.__getitem__, candidate.parts)) for candidate in found)
        chosen = least_valuable(found, store.sizes().file_bytes, now_s, part_bytes)
        one_by_one: list[str] = []
        before = store.sizes().file_bytes
        while victims := least_valuable(candidates_of(store, kept)[0], 1, now_s, part_bytes):
            needed = before - store.sizes().file_bytes + 1
            assert len(least_valuable(found, needed, now_s, part_bytes)) == len(one_by_one) + 1, "and as many as needed"
            store.drop_snapshot(victims[0])
            one_by_one.append(victims[0])
        assert chosen == one_by_one
        assert len(chosen) == len(nodes) - len(kept)


def test_the_store_is_counted_a_few_times_however_many_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 0
    file_bytes = Index.file_bytes

    def counted(index: Index) -> dict[FileKind, int]:
        nonlocal counts
        counts += 1
        return file_bytes(index)

    with Store.open(str(tmp_path / "s")) as store:
        for _ in range(5):
            turns(store, 8)
        monkeypatch.setattr(Index, "file_bytes", counted)
        assert collect(store, GcPolicy(max_bytes=0)).snapshots == 40
        assert counts <= 4


@pytest.mark.parametrize("policy", [GcPolicy(max_bytes=0), GcPolicy(session_idle_s=5000)])
def test_it_takes_a_thousand_parts_at_a_time_and_a_session_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: GcPolicy
) -> None:
    """What is recorded meanwhile waits for a step; and nobody goes on from half of a session."""
    parts, nodes = [], set()
    sweep = Store._sweep

    def noted(store: Store) -> None:
        parts.append(sum(item.kind is FileKind.PART for item in store._index.erasures()))
        nodes.add(store._index.counts().nodes)
        sweep(store)

    with Store.open(str(tmp_path / "s")) as store:
        node = None
        for turn in range(20):
            node = saved(store, make_snapshot(100 + turn, turn, replace(LAYOUT, page_tokens=1)), node)
        assert node is not None
        made, idle_since_s = store.sizes(), node.created_s
        store._now = lambda: idle_since_s + 10_000
        monkeypatch.setattr(Store, "_sweep", noted)
        report = collect(store, policy)
        left = store.sizes()
        assert report.freed_bytes == made.file_bytes - left.file_bytes
        assert (left.parts, left.snapshots) == (0, 0)
        assert nodes <= {20, left.nodes}
        assert sum(parts) == made.parts > 2000
        assert max(parts) <= 1200


@pytest.mark.parametrize(
    ("choice", "policy", "left"),
    [("surplus", GcPolicy(snapshots_per_session=1), [1, 2]), ("least_valuable", GcPolicy(max_bytes=0), [1])],
)
def test_what_was_saved_anew_since_the_choice_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, policy: GcPolicy, left: list[int]
) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = turns(store, 3)
        choose = getattr(gc, choice)

        def meanwhile(*given: Any) -> list[str]:
            chosen: list[str] = choose(*given)
            assert nodes[1].id in chosen
            store.save(nodes[1].id, store.load(nodes[1].id), FINGERPRINT, reason="asked for again")
            return chosen

        monkeypatch.setattr(gc, choice, meanwhile)
        assert collect(store, policy).snapshots == 3 - len(left)
        assert kept(store, nodes) == left


def test_who_uses_which_part_is_looked_up_for_a_quota_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = turns(store, 3)
        monkeypatch.delattr(Index, "uses")
        collect(store, GcPolicy(snapshots_per_session=1, snapshot_idle_s=1e6))
        assert kept(store, nodes) == [2]


def test_idle_sessions_go_as_a_whole_but_for_what_others_need(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes, tagged = turns(store, 3), turns(store, 3)
        store.tag("keep", tagged[1].id)
        store._now = lambda: nodes[0].created_s + 10_000
        report = collect(store, GcPolicy(session_idle_s=5000))
        assert report.sessions == 2
        assert [session.head_id for session in store.sessions()] == [tagged[1].id]
        assert store.tokens(tagged[1].id).size == 13
        assert same_bits(store.load(tagged[1].id), grown(make_snapshot(8), 5, 1)) or store.has_snapshot(tagged[1].id)


@pytest.mark.parametrize("policy", [GcPolicy(), GcPolicy(snapshots_per_session=1), GcPolicy(max_bytes=40_000)])
def test_what_is_left_still_loads(tmp_path: Path, policy: GcPolicy) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        states = chain(store, 6)
        collect(store, policy)
        for node, state in states:
            if store.has_snapshot(node.id):
                assert same_bits(store.load(node.id), state)
        files = [file for file in (tmp_path / "s" / "parts").rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) == store.sizes().part_bytes


numbers = st.integers(0, 1000)
candidates = st.lists(
    st.builds(
        Candidate,
        node_id=st.uuids().map(str),
        session_id=st.sampled_from("abc"),
        sequence=numbers,
        used_s=numbers.map(float),
        own_bytes=numbers,
        replay_tokens=numbers,
        is_head=st.booleans(),
        is_kept=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda candidate: candidate.sequence,
)


@settings(deadline=None)
@given(candidates, st.none() | st.integers(0, 3), st.none() | st.floats(0, 1000))
def test_choices_are_within_the_rules(found: list[Candidate], most: int | None, idle_s: float | None) -> None:
    by_id = {candidate.node_id: candidate for candidate in found}
    gone = surplus(found, GcPolicy(snapshots_per_session=most, snapshot_idle_s=idle_s), 1000.0)
    assert not any(by_id[node_id].is_kept or by_id[node_id].is_head for node_id in gone)
    if most is None and idle_s is None:
        assert gone == []
    assert least_valuable(found, 0, 1000.0, {}) == []
    victims = least_valuable(found, 1, 1000.0, {})
    assert (not victims) == all(candidate.is_kept for candidate in found)
    if victims:
        victim = victims[0]
        least: Callable[[Candidate], float] = lambda candidate: value_of(candidate, 1000.0)  # noqa: E731
        assert least(by_id[victim]) == min(least(c) for c in found if not c.is_kept)
    assert np.isfinite([value_of(candidate, 1e12) for candidate in found]).all()
