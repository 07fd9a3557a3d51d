"""States kept as the difference to their parent's."""

import io
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints import NodeRecord, Packing, Snapshot, StateLayout, Store
from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files.codec import Codec
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import export
from tests.checkpoints.disks import WaitingDisk, eventually
from tests.checkpoints.samples import FINGERPRINT, LAYOUT, make_node, make_snapshot, same_bits

TWO_PARTS = replace(LAYOUT, kda_shape=(3, 6, 256, 256), conv_shape=(3, 3, 3, 16))  # two layers and one


def step(state: Snapshot, seed: int) -> Snapshot:
    """A state one token later that differs in few numbers, as slowly decaying heads do."""
    later = make_snapshot(state.position + 1, seed, state.layout)
    kda = state.kda.copy()
    kda[:, :, seed % 8] += np.float32(0.5)
    return replace(later, kda=kda, conv=state.conv)


def save_small(store: Store, state: Snapshot, parent: NodeRecord | None = None) -> NodeRecord:
    node = make_node(state.position - (0 if parent is None else parent.position), parent)
    store.record(node)
    store.save(node.id, state, FINGERPRINT, reason="turn", packing=Packing.SMALL)
    return node


def codecs(store: Store, node: NodeRecord) -> list[Codec]:
    heads = [store._files.head(name) for name in store._manifest(node.id).state]
    return [Codec(head.codec) for head in heads if head is not None]


def chain(store: Store, length: int, layout: StateLayout = LAYOUT) -> list[tuple[NodeRecord, Snapshot]]:
    state = make_snapshot(5, layout=layout)
    found = [(save_small(store, state), state)]
    for seed in range(1, length):
        state = step(state, seed)
        found.append((save_small(store, state, found[-1][0]), state))
    return found


def test_a_child_s_state_is_a_delta_where_that_is_smaller(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = chain(store, 4)
        assert Codec.ZSTD_DELTA_4 not in codecs(store, nodes[0][0])
        for node, _ in nodes[1:]:
            assert set(codecs(store, node)) == {Codec.ZSTD_DELTA_4}
        for node, state in nodes:
            assert same_bits(store.load(node.id), state)
        stranger = save_small(store, make_snapshot(11, seed=77), nodes[-1][0])
        assert Codec.ZSTD_DELTA_4 not in codecs(store, stranger)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_a_base_outlives_its_snapshot_and_goes_with_its_last_delta(tmp_path: Path, order: tuple[int, ...]) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        nodes = chain(store, 4)
        left = dict(enumerate(nodes))
        for number in order:
            store.drop_snapshot(left.pop(number)[0].id)
            for node, state in left.values():
                assert same_bits(store.load(node.id), state)
        assert store.sizes().parts == 0
        assert [file for file in (tmp_path / "s" / "parts").rglob("*") if file.is_file()] == []


def test_a_damaged_base_is_told_and_done_without(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        (_, _), (node, state) = chain(store, 2)
        head = store._files.head(store._manifest(node.id).state[0])
        assert head is not None
        assert head.base is not None
        file = tmp_path / "s" / "parts" / head.base[:2] / head.base[2:]
        file.write_bytes(bytes(file.stat().st_size))
        with pytest.raises(SnapshotCorrupt, match=head.base):
            store.load(node.id)
        later = step(state, 3)
        child = save_small(store, later, node)
        assert same_bits(store.load(child.id), later)
        store.save(node.id, state, FINGERPRINT, reason="replayed", packing=Packing.SMALL)
        assert same_bits(store.load(node.id), state)


def test_a_base_erased_while_its_delta_is_written_is_kept(tmp_path: Path) -> None:
    disk = WaitingDisk()
    with Store.open(str(tmp_path / "s"), disk=disk, threads=1) as store:
        (node, state), *_ = chain(store, 1)
        later = step(state, 1)
        child = make_node(1, node)
        store.record(child)
        disk.armed = True

        def save() -> None:
            store.save(child.id, later, FINGERPRINT, reason="turn", packing=Packing.SMALL)

        saver = threading.Thread(target=save)
        saver.start()

        def meanwhile() -> None:
            try:
                assert disk.reached.wait(30)
                store.drop_snapshot(node.id)
            finally:
                disk.armed = False
                disk.go.set()

        eventually(saver, meanwhile)
        assert Codec.ZSTD_DELTA_4 in codecs(store, child)
        assert same_bits(store.load(child.id), later)
        store.drop_snapshot(child.id)
        assert store.sizes().parts == 0


def test_a_delta_that_another_namespace_wrote_whole_meanwhile_has_no_base_any_more(tmp_path: Path) -> None:
    """Whoever wrote it as a delta commits last, and is erased with the base: what the other has moves and is whole."""
    disk = WaitingDisk()
    with Store.open(str(tmp_path / "s"), disk=disk, threads=3) as store, Store.open(str(tmp_path / "t")) as elsewhere:
        (parent, state), *_ = chain(store, 1)
        later = step(state, 1)
        first, second = make_node(1, parent), replace(make_node(6), namespace="other")
        store.record(first, second)
        disk.skip = len(later.pages) + 2  # its parts of KDA state, pages and logits; the next file is its manifest
        disk.armed = True

        def save(node: NodeRecord) -> None:
            store.save(node.id, later, FINGERPRINT, reason="turn", packing=Packing.SMALL)

        saver = threading.Thread(target=save, args=(first,))
        saver.start()

        def meanwhile() -> None:
            try:
                assert disk.reached.wait(30)
                assert any(part.row.base for part in store._pins.written.values()), "a delta is written, not committed"
                disk.armed = False
                save(second)
            finally:
                disk.armed = False
                disk.go.set()

        eventually(saver, meanwhile)
        assert Codec.ZSTD_DELTA_4 not in codecs(store, second)
        assert same_bits(store.load(first.id), later)
        rows = store._index.parts()
        sizes = {row.hash: (tmp_path / "s" / "parts" / row.hash[:2] / row.hash[2:]).stat().st_size for row in rows}
        assert {row.hash: row.file_bytes for row in rows} == sizes
        store.drop_snapshot(first.id)
        store.drop_snapshot(parent.id)
        sink = io.BytesIO()
        export(store, second.id, sink)
        import_bundle(elsewhere, io.BytesIO(sink.getvalue()))
        assert same_bits(elsewhere.load(second.id), later)


def test_groups_of_layers_are_parts_of_their_own(tmp_path: Path) -> None:
    """A part holds as many layers as fit into it; the last may hold fewer, and each is a delta to its like."""
    with Store.open(str(tmp_path / "s")) as store, Store.open(str(tmp_path / "t")) as other:
        states = chain(store, 2, TWO_PARTS)
        for node, state in states:
            assert len(store._manifest(node.id).state) == 2
            assert same_bits(store.load(node.id), state)
        assert codecs(store, states[1][0]) == [Codec.ZSTD_DELTA_4] * 2
        sink = io.BytesIO()
        export(store, states[1][0].id, sink)
        import_bundle(other, io.BytesIO(sink.getvalue()))
        assert same_bits(other.load(states[1][0].id), states[1][1])
