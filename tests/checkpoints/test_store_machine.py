"""A store and a dictionary are given the same random work, reopening and rebuilding in between, and stay equal."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from serai.checkpoints import NodeRecord, Packing, Snapshot, Store, new_id
from serai.checkpoints.errors import NodeInUse, SessionGone, SnapshotMissing
from serai.checkpoints.upkeep.fsck import fsck, rebuild
from serai.checkpoints.upkeep.gc import GcPolicy, collect
from tests.checkpoints.samples import FINGERPRINT, grown, make_node, make_snapshot, same_bits

_MEMORY = Path("/dev/shm")


class StoreMachine(RuleBasedStateMachine):
    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="serai-test-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self.store = Store.open(str(self.folder / "s"), threads=2)
        self.known: dict[str, NodeRecord] = {}
        self.states: dict[str, Snapshot] = {}
        self.tags: dict[str, str] = {}

    @rule(target=nodes, count=st.integers(0, 9))
    def begin(self, count: int) -> NodeRecord:
        return self._record(make_node(count))

    @rule(target=nodes, parent=nodes, count=st.integers(0, 5), fork=st.booleans())
    def go_on(self, parent: NodeRecord, count: int, fork: bool) -> NodeRecord:
        node = make_node(count, parent, session_id=new_id() if fork else None)
        if parent.id in self.known:
            return self._record(node)
        try:
            self.store.record(node)
        except SessionGone:
            return parent
        raise AssertionError("a node was recorded below one that is gone")

    def _record(self, node: NodeRecord) -> NodeRecord:
        self.store.record(node)
        self.known[node.id] = node
        return node

    @rule(node=nodes, seed=st.integers(0, 3), packing=st.sampled_from(Packing), share=st.booleans())
    def save(self, node: NodeRecord, seed: int, packing: Packing, share: bool) -> None:
        if node.id not in self.known:
            return
        before = self.states.get(node.parent_id or "")
        if share and before is not None:
            state = grown(before, node.position - before.position, seed)
        else:
            state = make_snapshot(node.position, seed, smooth=seed == 0)
        self.store.save(node.id, state, FINGERPRINT, reason="test", packing=packing)
        self.states[node.id] = state

    @rule(node=nodes)
    def load(self, node: NodeRecord) -> None:
        if node.id in self.states:
            assert same_bits(self.store.load(node.id, FINGERPRINT), self.states[node.id])
            return
        try:
            self.store.load(node.id)
        except SnapshotMissing:
            assert node.id in self.known
        except SessionGone:
            assert node.id not in self.known
        else:
            raise AssertionError("a snapshot came from nowhere")

    @rule(node=nodes)
    def read_tokens(self, node: NodeRecord) -> None:
        if node.id in self.known:
            assert self.store.tokens(node.id).size == node.position
            assert np.array_equal(self.store.node(node.id).tokens, node.tokens)

    @rule(node=nodes)
    def drop(self, node: NodeRecord) -> None:
        if node.id in self.known:
            self.store.drop_snapshot(node.id)
            self.states.pop(node.id, None)

    @rule(node=consumes(nodes))
    def delete(self, node: NodeRecord) -> None:
        if node.id not in self.known:
            return
        has_children = any(other.parent_id == node.id for other in self.known.values())
        try:
            self.store.delete(node.id)
            assert not has_children
            self._forget(node.id)
        except NodeInUse:
            assert has_children

    @rule(node=nodes)
    def delete_session(self, node: NodeRecord) -> None:
        own = [other for other in self.known.values() if other.session_id == node.session_id]
        if not own:
            return
        self.store.delete_session(node.session_id)
        for other in reversed(own):
            self.states.pop(other.id, None)
            if not any(child.parent_id == other.id for child in self.known.values()):
                self._forget(other.id)

    def _forget(self, node_id: str) -> None:
        del self.known[node_id]
        self.states.pop(node_id, None)
        self.tags = {tag: node for tag, node in self.tags.items() if node != node_id}

    @rule(node=nodes, tag=st.sampled_from(["a", "b c", "größer"]))
    def tag(self, node: NodeRecord, tag: str) -> None:
        if node.id in self.known:
            self.store.tag(tag, node.id)
            self.tags[tag] = node.id

    @rule(most=st.integers(0, 2))
    def collect(self, most: int) -> None:
        collect(self.store, GcPolicy(snapshots_per_session=most))
        self.states = {node_id: state for node_id, state in self.states.items() if self.store.has_snapshot(node_id)}

    @rule(lost=st.booleans())
    def reopen(self, lost: bool) -> None:
        self.store.close()
        if lost:
            for file in (self.folder / "s").glob("index.sqlite*"):
                file.unlink()
            assert rebuild(str(self.folder / "s")).clean
        self.store = Store.open(str(self.folder / "s"), threads=2)

    @invariant()
    def counts_agree(self) -> None:
        sizes = self.store.sizes()
        assert (sizes.nodes, sizes.snapshots) == (len(self.known), len(self.states))
        assert self.store.tags() == self.tags
        kinds = ("nodes", "manifests", "parts", "tags")
        files = (file for kind in kinds for file in (self.folder / "s" / kind).rglob("*"))
        assert sizes.file_bytes == sum(file.stat().st_size for file in files if file.is_file())

    def teardown(self) -> None:
        for node_id, state in self.states.items():
            assert same_bits(self.store.load(node_id), state)
        report = fsck(self.store)
        assert report.clean
        assert report.orphans == ()
        self.store.close()
        shutil.rmtree(self.folder)


def test_a_store_behaves_like_a_dictionary() -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(max_examples=30, stateful_step_count=20, deadline=None))
