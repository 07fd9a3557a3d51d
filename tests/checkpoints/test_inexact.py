"""That a snapshot is inexact is kept with it, and it never stands where an exact one belongs."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from serai.checkpoints import Fingerprint, NodeRecord, Storage, Store, StoredAs, nodes, tree
from serai.checkpoints.errors import SnapshotCorrupt
from serai.checkpoints.files import manifest
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import export
from serai.checkpoints.upkeep.fsck import fsck, rebuild
from tests.checkpoints.samples import FINGERPRINT, grown, make_node, make_snapshot, same_bits

ELSEWHERE = replace(FINGERPRINT, build="another")
STATE = make_snapshot(6)


def inexact_node(store: Store) -> NodeRecord:
    """A new node, with an inexact snapshot that says it was made here."""
    node = replace(make_node(6), inexact=True)
    store.record(node)
    store.save(node.id, replace(STATE, inexact=True), FINGERPRINT, reason="pause")
    return node


def bundle_of(store: Store, node: NodeRecord) -> io.BytesIO:
    sink = io.BytesIO()
    export(store, node.id, sink)
    return io.BytesIO(sink.getvalue())


def test_it_is_recorded_and_survives_the_index(tmp_path: Path) -> None:
    folder = str(tmp_path / "s")
    with Store.open(folder) as store:
        node = inexact_node(store)
    assert rebuild(folder).clean
    with Store.open(folder) as store:
        assert fsck(store).clean
        assert store._manifest(node.id).inexact
        assert not store.snapshot_info(node.id).is_exact_for(FINGERPRINT)
        assert store.load(node.id).inexact
        store.set_aside(node.id, "for a look")
        store.save(node.id, replace(STATE, inexact=True), FINGERPRINT, reason="pause")
        assert same_bits(store.load(node.id), STATE)


def test_a_manifest_that_says_nothing_of_it_goes_by_its_node(tmp_path: Path) -> None:
    """As builds before wrote them; an exact one's is written as it was, byte for byte."""
    with Store.open(str(tmp_path / "s")) as store:
        for inexact in (False, True):
            node = replace(make_node(6), inexact=inexact)
            store.record(node)
            store.save(node.id, STATE, FINGERPRINT, reason="pause")
            assert b"inexact" not in manifest.encode(store._manifest(node.id))
            assert store.snapshot_info(node.id).is_exact_for(FINGERPRINT) is not inexact
            assert store.load(node.id).inexact is inexact


@pytest.mark.parametrize(
    ("made_by", "storage", "running", "inexact"),
    [
        (FINGERPRINT, Storage(), FINGERPRINT, False),
        (FINGERPRINT, Storage(), None, False),
        (ELSEWHERE, Storage(), FINGERPRINT, True),
        (ELSEWHERE, Storage(), ELSEWHERE, False),
        (FINGERPRINT, Storage(state=StoredAs.BFLOAT16), FINGERPRINT, True),
        (FINGERPRINT, Storage(latents=StoredAs.INT8_ROWS), None, True),
    ],
)
def test_what_is_loaded_says_whether_it_is(
    tmp_path: Path, made_by: Fingerprint, storage: Storage, running: Fingerprint | None, inexact: bool
) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        node = make_node(6)
        store.record(node)
        store.save(node.id, STATE, made_by, reason="pause", storage=storage)
        assert store.load(node.id, running).inexact is inexact


def test_it_never_takes_an_exact_nodes_place(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        node = make_node(6)
        store.record(node)
        store.save(node.id, STATE, ELSEWHERE, reason="pause")
        loaded = store.load(node.id, FINGERPRINT)
        with pytest.raises(ValueError, match="inexact"):
            store.save(node.id, loaded, FINGERPRINT, reason="pause")
        assert store.snapshot_info(node.id).fingerprint == ELSEWHERE
        assert same_bits(store.load(node.id), STATE)


def test_what_continues_from_an_inexact_node_is_inexact(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        node = inexact_node(store)
        child = make_node(2, node)
        with pytest.raises(ValueError, match="inexact"):
            store.record(child)
        store.record(replace(child, inexact=True))
        assert store.node(child.id).inexact


def test_it_is_inexact_in_another_store_too(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = inexact_node(here)
        import_bundle(there, bundle_of(here, node))
        assert there.node(node.id).inexact
        assert there.load(node.id).inexact


def test_a_bundle_in_which_it_becomes_exact_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = replace(make_node(6), inexact=True)
        here.record(node)
        child = make_node(2, node)
        with monkeypatch.context() as then:  # a file that says otherwise than what was asked for
            then.setattr(tree, "encode", lambda _, **named: nodes.encode(child, **named))
            here.record(replace(child, inexact=True))
        here.save(child.id, grown(STATE, 2), FINGERPRINT, reason="pause")
        with pytest.raises(SnapshotCorrupt, match="says that it is exact, and its parent is inexact"):
            import_bundle(there, bundle_of(here, child))
        assert not there.sessions()


@pytest.mark.parametrize("as_inexact", [False, True])
def test_a_bundle_that_says_otherwise_of_a_node_that_is_there_is_refused(tmp_path: Path, *, as_inexact: bool) -> None:
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = inexact_node(here)
        there.record(replace(node, inexact=False))
        source, target = (here, there) if as_inexact else (there, here)
        says, has = ("inexact", "exact") if as_inexact else ("exact", "inexact")
        with pytest.raises(SnapshotCorrupt, match=f"says that it is {says}, and the store has it as {has}"):
            import_bundle(target, bundle_of(source, node))
        assert not there.has_snapshot(node.id)
