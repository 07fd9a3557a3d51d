"""A store says what is wrong with it, removes what nobody owns, and its index can be made anew from the files."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serai.checkpoints import NodeRecord, Snapshot, Store, new_id
from serai.checkpoints.errors import SnapshotCorrupt, StoreBusy
from serai.checkpoints.upkeep.fsck import fsck, rebuild
from tests.checkpoints.samples import FINGERPRINT, make_node, make_snapshot, same_bits, saved
from tests.checkpoints.test_delta import chain


def filled(folder: Path) -> list[tuple[NodeRecord, Snapshot]]:
    """A store with two trees, deltas, a fork, a tag and nodes without a snapshot."""
    with Store.open(str(folder)) as store:
        found = chain(store, 3)
        state = make_snapshot(9, seed=40)
        root = saved(store, state)
        fork = replace(make_node(4, root), session_id=new_id())
        store.record(fork)
        store.record(make_node(2, fork))
        store.tag("v1", root.id)
        return [*found, (root, state)]


def listing(store: Store) -> object:
    index = store._index
    return index.nodes(), [replace(row, used_s=0.0) for row in index.snapshots()], index.parts(), index.tags()


def test_a_sound_store_is_clean(tmp_path: Path) -> None:
    filled(tmp_path / "s")
    with Store.open(str(tmp_path / "s")) as store:
        report = fsck(store)
    assert report.clean
    assert (report.nodes, report.snapshots, report.orphans) == (6, 4, ())


def test_the_index_is_rebuilt_from_the_files_alone(tmp_path: Path) -> None:
    """B65: with the index gone, the same nodes, snapshots, parts and tags are found."""
    folder = tmp_path / "s"
    states = filled(folder)
    with Store.open(str(folder)) as store:
        before = listing(store)
        with pytest.raises(StoreBusy):
            rebuild(str(folder))
    for file in folder.glob("index.sqlite*"):
        file.unlink()
    report = rebuild(str(folder))
    assert report.clean
    assert [file.name for file in folder.glob("index.sqlite*")] == ["index.sqlite"]
    with Store.open(str(folder)) as store:
        assert listing(store) == before
        for node, state in states:
            assert same_bits(store.load(node.id, FINGERPRINT), state)
        assert fsck(store).clean


def files_of(folder: Path, kind: str) -> list[Path]:
    return sorted(file for file in (folder / kind).rglob("*") if file.is_file())


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["nodes", "manifests", "parts", "tags"])
@pytest.mark.parametrize("harm", [flip, Path.unlink], ids=["flipped", "missing"])
def test_damage_is_found_wherever_it_is(tmp_path: Path, kind: str, harm: Callable[[Path], None]) -> None:
    folder = tmp_path / "s"
    filled(folder)
    whole = tmp_path / "whole"
    shutil.copytree(folder, whole)
    for number in range(len(files_of(folder, kind))):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        file = files_of(folder, kind)[number]
        harm(file)
        with Store.open(str(folder)) as store:
            report = fsck(store)
            assert len(report.problems) >= 1
            assert report.orphans == ()
        rebuilt = rebuild(str(folder))
        assert harm is Path.unlink or kind == "parts" or not rebuilt.clean
        with Store.open(str(folder)) as store:
            assert fsck(store).clean or kind == "parts"


def test_damaged_snapshots_are_not_used_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        node = saved(store, make_snapshot(5))
        flip(files_of(folder, "parts")[0])
        assert store.has_snapshot(node.id)
        assert len(fsck(store).problems) == 1
        assert not store.has_snapshot(node.id)
        with pytest.raises(SnapshotCorrupt):
            store.load(node.id)


def test_orphans_are_removed_and_change_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    states = filled(folder)
    with Store.open(str(folder)) as store:
        before = listing(store)
        strays = [
            folder / "nodes" / new_id(),
            folder / "manifests" / ("ab" * 32),
            folder / "tags" / ("cd" * 32),
            folder / "parts" / "ef" / ("01" * 31),
        ]
        for stray in strays:
            stray.parent.mkdir(exist_ok=True)
            stray.write_bytes(b"left by a killed save")
        found = fsck(store, remove_orphans=False)
        assert sorted(found.orphans) == sorted(str(stray.relative_to(folder)) for stray in strays)
        assert all(stray.exists() for stray in strays)
        assert fsck(store).orphans == found.orphans
        assert not any(stray.exists() for stray in strays)
        assert fsck(store).orphans == ()
        assert listing(store) == before
        assert same_bits(store.load(states[0][0].id), states[0][1])


def test_a_lost_ancestor_loses_its_descendants_only(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        root = saved(store, make_snapshot(3))
        child = saved(store, make_snapshot(5), root)
        other = saved(store, make_snapshot(4))
    (folder / "nodes" / root.id).unlink()
    report = rebuild(str(folder))
    assert any(f"node {child.id}" in problem and "is lost" in problem for problem in report.problems)
    with Store.open(str(folder)) as store:
        assert [session.head_id for session in store.sessions()] == [other.id]
        assert same_bits(store.load(other.id), make_snapshot(4))


def test_a_number_that_a_killed_save_has_taken_too_hinders_no_rebuild(tmp_path: Path) -> None:
    """The index counts on from the last committed node, so what a kill left without a row has the next one's number."""
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        root = saved(store, make_snapshot(3))
        killed = [make_node(2, root)]
        killed.append(make_node(1, killed[0]))
        store.record(*killed)
        left = {node.id: (folder / "nodes" / node.id).read_bytes() for node in killed}
        for node in reversed(killed):
            store.delete(node.id)
        heads = [make_node(4, root)]
        heads.append(make_node(1, heads[0]))
        for node in heads:
            store.record(node)
    for name, data in left.items():
        (folder / "nodes" / name).write_bytes(data)
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert [len(store.path(node.id)) for node in (*killed, *heads)] == [2, 3, 2, 3]
        store.record(make_node(1, heads[1]))
        before = [row.id for row in store._index.nodes()]
        assert len(before) == 6
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert [row.id for row in store._index.nodes()] == before


def test_what_was_set_aside_stays_so_when_the_index_is_rebuilt(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        root = saved(store, make_snapshot(3))
        child = saved(store, make_snapshot(5), root)
        store.set_aside(child.id, "the first step after it failed")
        store.set_aside(child.id, "a second reason is not needed")
        before = listing(store)
        assert len(files_of(folder, "manifests")) == 2
        assert fsck(store).orphans == ()
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert listing(store) == before
        assert store.nearest_snapshot(child.id) == root.id
        with pytest.raises(SnapshotCorrupt, match=r"set aside \(the first step after it failed\)"):
            store.load(child.id)
        store.save(child.id, make_snapshot(5), FINGERPRINT, reason="pause")
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert same_bits(store.load(child.id), make_snapshot(5))
        assert fsck(store).clean


def test_of_a_manifest_and_the_one_that_set_it_aside_the_latter_counts(tmp_path: Path) -> None:
    """A kill may leave both."""
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        nodes = [saved(store, make_snapshot(3, seed=seed)) for seed in range(6)]
        former = {file: file.read_bytes() for file in files_of(folder, "manifests")}
        for node in nodes:
            store.set_aside(node.id, "the first step after it failed")
    for file, data in former.items():
        file.write_bytes(data)
    assert rebuild(str(folder)).clean
    with Store.open(str(folder)) as store:
        assert not any(store.has_snapshot(node.id) for node in nodes)
        assert len(fsck(store).orphans) == 6
