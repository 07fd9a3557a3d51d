"""Sessions move between stores whole, without what is there already, and however often the line breaks."""

import io
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serai.checkpoints import NodeRecord, Snapshot, Store
from serai.checkpoints.errors import FormatUnknown, SeraiError, SessionGone, SnapshotCorrupt, StoreFull, TransferBroken
from serai.checkpoints.harness.faulty_disk import Fault, FaultyDisk
from serai.checkpoints.moving.direct import fetch, send
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import BUNDLE_ENTRY, EntryKind, export, parts_of, wanted
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.disks import FailingDisk, WaitingDisk, eventually
from tests.checkpoints.samples import FINGERPRINT, all_files, grown, make_node, make_snapshot, same_bits, saved
from tests.checkpoints.test_delta import chain


@contextmanager
def two_stores(folder: Path, disk: FailingDisk | None = None) -> Iterator[tuple[Store, Store]]:
    with Store.open(str(folder / "here")) as here, Store.open(str(folder / "there"), disk=disk) as there:
        yield here, there


def bundle_of(store: Store, node: NodeRecord) -> bytes:
    sink = io.BytesIO()
    moved = export(store, node.id, sink)
    assert moved.bytes == len(sink.getvalue())
    return sink.getvalue()


class Dribble:
    """A source that gives a few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, count: int, /) -> bytes:
        return self._data.read(min(count, 1000))


def session(store: Store) -> tuple[NodeRecord, Snapshot]:
    """A session of three turns, a delta of a delta's base at its end, and one more node without a snapshot."""
    states = chain(store, 3)
    node = make_node(2, states[-1][0])
    store.record(node)
    return node, states[-1][1]


def test_a_session_arrives_with_its_tokens_and_state(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        node, state = session(here)
        moved = import_bundle(there, Dribble(bundle_of(here, node)))
        assert (moved.node_id, moved.nodes, moved.snapshots) == (node.id, 4, 1)
        assert np.array_equal(there.tokens(node.id), here.tokens(node.id))
        assert there.node(node.id).metadata == node.metadata
        step = there.nearest_snapshot(node.id)
        assert step is not None
        assert same_bits(there.load(step, FINGERPRINT), state)
        assert fsck(there).clean
        assert there.resolve(node.session_id) == node.id


def test_only_what_is_missing_is_sent(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        state = make_snapshot(40)
        node = saved(here, state)
        import_bundle(there, io.BytesIO(bundle_of(here, node)))
        later = saved(here, grown(state, 5), node)
        names = parts_of(here, later.id)
        missing = wanted(there, names)
        assert len(names) - len(missing) == 10  # the full pages
        sink = io.BytesIO()
        moved = export(here, later.id, sink, parts=set(missing))
        assert moved.parts == len(missing)
        arrived = import_bundle(there, io.BytesIO(sink.getvalue()))
        assert (arrived.nodes, arrived.parts) == (1, len(missing))
        assert same_bits(there.load(later.id), grown(state, 5))
        again = import_bundle(there, io.BytesIO(bundle_of(here, later)))
        assert (again.nodes, again.snapshots, again.parts) == (0, 0, 0)
        assert fsck(there).orphans == ()


def test_a_broken_transfer_goes_on_where_it_broke(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        node, state = session(here)
        data = bundle_of(here, node)
        names = parts_of(here, node.id)
        lacking = len(names)
        for end in range(100, len(data), len(data) // 9):
            with pytest.raises(TransferBroken, match=f"after {end} bytes"):
                import_bundle(there, io.BytesIO(data[:end]))
            assert there.sessions() == []
            missing = wanted(there, names)
            assert len(missing) <= lacking
            lacking = len(missing)
        assert lacking < len(names)
        sink = io.BytesIO()
        export(here, node.id, sink, parts=set(wanted(there, names)))
        assert len(sink.getvalue()) < len(data)
        import_bundle(there, io.BytesIO(sink.getvalue()))
        step = there.nearest_snapshot(node.id)
        assert step is not None
        assert same_bits(there.load(step), state)
        assert fsck(there).orphans == ()


def test_a_receiver_that_is_killed_has_a_whole_session_or_none(tmp_path: Path) -> None:
    """At each of its commits: half of its nodes would be a session to go on with."""
    with Store.open(str(tmp_path / "here"), threads=1) as here:
        node, _ = session(here)
        bundle, tokens = bundle_of(here, node), here.tokens(node.id)
    counting = FaultyDisk()
    with Store.open(str(tmp_path / "count"), disk=counting, threads=1) as there:
        begun = len(counting.calls)
        import_bundle(there, io.BytesIO(bundle))
        commits = [at for at, call in enumerate(counting.calls) if call == "passing" and at >= begun]
    seen = set()
    for at in commits:
        folder = str(tmp_path / f"{at}")
        child = os.fork()
        if child == 0:
            try:
                with Store.open(folder, disk=FaultyDisk(at, Fault.KILLED_AFTER), threads=1) as there:
                    import_bundle(there, io.BytesIO(bundle))
            finally:
                os._exit(3)
        _, result = os.waitpid(child, 0)
        assert os.WIFSIGNALED(result)
        with Store.open(folder, threads=1) as there:
            seen.add(len(there.sessions()))
            assert [info.head_id for info in there.sessions()] in ([], [node.id])
            import_bundle(there, io.BytesIO(bundle))
            assert np.array_equal(there.tokens(node.id), tokens)
            assert fsck(there).clean
    assert seen == {0, 1}


def test_left_parts_are_removed_if_nobody_comes_back_for_them(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        node, _ = session(here)
        data = bundle_of(here, node)
        with pytest.raises(TransferBroken):
            import_bundle(there, io.BytesIO(data[:-10]))
        assert len(fsck(there).orphans) > 0
        assert fsck(there).orphans == ()
        assert [file for file in (tmp_path / "there" / "parts").rglob("*") if file.is_file()] == []


@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
@pytest.mark.parametrize("after", [0, 3, 6, 9])
def test_a_full_receiver_keeps_nothing(tmp_path: Path, call: str, after: int) -> None:
    disk = FailingDisk(call, after=after)
    disk.broken = False
    with two_stores(tmp_path, disk) as (here, there):
        node, state = session(here)
        data = bundle_of(here, node)
        disk.broken = True
        with pytest.raises(StoreFull):
            import_bundle(there, io.BytesIO(data))
        disk.broken = False
        assert there.sessions() == []
        assert fsck(there).orphans == ()
        import_bundle(there, io.BytesIO(data))
        step = there.nearest_snapshot(node.id)
        assert step is not None
        assert same_bits(there.load(step), state)


def test_any_changed_byte_is_noticed_and_nothing_kept(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        node, _ = session(here)
        data = bytearray(bundle_of(here, node))
        for place in [*range(0, 400, 7), *range(400, len(data), len(data) // 60), len(data) - 1]:
            data[place] ^= 0x20
            with pytest.raises((SnapshotCorrupt, FormatUnknown, TransferBroken)) as caught:
                import_bundle(there, io.BytesIO(bytes(data)))
            data[place] ^= 0x20
            assert there.sessions() == []
            if not isinstance(caught.value, TransferBroken):
                assert fsck(there).orphans == ()
            else:
                fsck(there)


def test_a_bundle_is_taken_whatever_the_receiver_did_meanwhile(tmp_path: Path) -> None:
    """The nodes are there already and went on; the snapshot was dropped; parts are damaged."""
    with two_stores(tmp_path) as (here, there):
        node, state = session(here)
        data = bundle_of(here, node)
        import_bundle(there, io.BytesIO(data))
        step = there.nearest_snapshot(node.id)
        assert step is not None
        there.record(make_node(3, node))
        there.drop_snapshot(step)
        assert import_bundle(there, io.BytesIO(data)).snapshots == 1
        file = next(file for file in (tmp_path / "there" / "parts").rglob("*") if file.is_file())
        file.write_bytes(bytes(file.stat().st_size))
        with pytest.raises(SeraiError):
            there.load(step)
        assert import_bundle(there, io.BytesIO(data)).snapshots == 1
        assert same_bits(there.load(step), state)


def test_a_node_of_the_same_id_but_other_tokens_is_refused(tmp_path: Path) -> None:
    with two_stores(tmp_path) as (here, there):
        node = make_node(5)
        here.record(node)
        there.record(replace(node, position=1, visible_tokens=1, tokens=np.array([9], np.int32)))
        with pytest.raises(SnapshotCorrupt, match="another node of this id"):
            import_bundle(there, io.BytesIO(bundle_of(here, node)))
        assert there.tokens(node.id).tolist() == [9]
        with pytest.raises(SessionGone):
            export(here, make_node(1).id, io.BytesIO())


@pytest.mark.parametrize("kind", ["export", "import", "send to a place", "send to a store"])
def test_parts_that_were_erased_while_they_were_copied_are_unlinked_when_that_ends(tmp_path: Path, kind: str) -> None:
    asked = 0
    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, make_snapshot(9))
        bundle = io.BytesIO(bundle_of(here, node)[:-10])

        class Line:
            """Whose other side has the snapshot erased once a part is on its way."""

            def write(self, data: bytes, /) -> None:
                if data.startswith(BUNDLE_ENTRY.pack(EntryKind.PART, 0, b"")[:8]):
                    here.drop_snapshot(node.id)

            def read(self, count: int, /) -> bytes:
                data = bundle.read(count)
                if not data:
                    here.drop_snapshot(node.id)
                return data

        def meanwhile() -> bool:
            nonlocal asked
            asked += 1
            if asked == 4:
                here.drop_snapshot(node.id)
            return False

        with suppress(TransferBroken):  # the bundle has no end
            match kind:
                case "export":
                    export(here, node.id, Line())
                case "import":
                    import_bundle(here, Line())
                case "send to a place":
                    send(here, node.id, f"file://{tmp_path}/place", meanwhile)
                case _:
                    send(here, node.id, str(tmp_path / "there"), meanwhile)
        assert here.sizes().snapshots == 0
        assert not any((tmp_path / "here" / "parts").glob("*/*"))


@pytest.mark.parametrize("kind", ["export", "push"])
def test_a_snapshot_that_is_erased_while_a_copy_begins_is_copied_whole(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither without its manifest, nor with the parts of the one before it."""
    with two_stores(tmp_path) as (here, there):
        state = make_snapshot(9)
        first = saved(here, state)
        node = saved(here, grown(state, 5), first)
        nearest, erased = Store.nearest_snapshot, threading.Event()

        def drop() -> None:
            here.drop_snapshot(node.id)
            erased.set()

        def meanwhile(store: Store, node_id: str) -> str | None:
            found = nearest(store, node_id)
            if store is here and not dropping.ident:
                dropping.start()
                erased.wait(0.5)  # it has to wait itself, if nothing may change now
            return found

        dropping = threading.Thread(target=drop)
        monkeypatch.setattr(Store, "nearest_snapshot", meanwhile)
        place = f"file://{tmp_path}/place"
        sink = io.BytesIO()
        moved = export(here, node.id, sink) if kind == "export" else send(here, node.id, place)
        assert moved.snapshots == 1
        dropping.join()
        bundle = io.BytesIO(sink.getvalue())
        came = import_bundle(there, bundle) if kind == "export" else fetch(there, node.id, place)
        assert came.snapshots == 1
        assert same_bits(there.load(node.id), grown(state, 5))


@pytest.mark.parametrize("change", ["erase", "save anew", "erase the session", "erase the session and begin it anew"])
@pytest.mark.parametrize("kind", ["export", "send to a place", "send to a store"])
def test_a_copy_is_of_what_there_was_when_it_began(tmp_path: Path, kind: str, change: str) -> None:
    asked = 0
    with two_stores(tmp_path) as (here, there):
        state = make_snapshot(9)
        first = make_node(4)
        here.record(first)
        node = saved(here, state, first)
        sink = io.BytesIO()
        elsewhere = f"file://{tmp_path}/place" if kind == "send to a place" else str(tmp_path / "elsewhere")

        def change_it() -> None:
            match change:
                case "erase":
                    here.drop_snapshot(node.id)
                case "save anew":
                    here.save(node.id, state, replace(FINGERPRINT, build="another"), reason="again")
                case _:
                    here.delete_session(node.session_id)
            if change.endswith("anew") and not here.sessions():
                here.record(first)

        class Line:
            def write(self, data: bytes, /) -> None:
                if not sink.tell():
                    change_it()
                sink.write(data)

        def meanwhile() -> bool:
            nonlocal asked
            asked += 1
            if asked == 2:  # what is to be copied is known by then, and nothing more
                change_it()
            return False

        moved = export(here, node.id, Line()) if kind == "export" else send(here, node.id, elsewhere, meanwhile)
        assert (moved.nodes, moved.snapshots, moved.parts) == (2, 1, 5)
        if kind == "export":
            import_bundle(there, io.BytesIO(sink.getvalue()))
        else:
            fetch(there, node.id, elsewhere)
        assert there.snapshot_info(node.id).fingerprint == FINGERPRINT
        assert same_bits(there.load(node.id), state)
        assert fsck(here).clean
        files = {name.split("/")[0] for name in all_files(tmp_path / "here")}
        left = {"erase": {"nodes"}, "erase the session": set(), "save anew": {"nodes", "manifests", "parts"}}
        assert files == left.get(change, {"nodes"}), "what was erased has gone, and nothing else"


def test_bundles_need_no_second_copy_in_memory(tmp_path: Path) -> None:
    """A sink sees pieces of at most one buffer, and a source is asked for no more."""
    with two_stores(tmp_path) as (here, there):
        node, _ = session(here)
        sizes: list[int] = []

        class Sink:
            def write(self, data: bytes, /) -> None:
                sizes.append(len(data))

        export(here, node.id, Sink())
        assert max(sizes) <= 1 << 22
        data = io.BytesIO(bundle_of(here, node))

        class Source:
            def read(self, count: int, /) -> bytes:
                assert count <= 1 << 22
                return data.read(count)

        import_bundle(there, Source())
        assert list(itertools.chain(there.sessions()))


def test_what_comes_stands_on_no_file_that_another_save_has_yet_to_finish(tmp_path: Path) -> None:
    """Most of its parts are being saved while it comes: what was taken loads at once, whatever becomes of that save."""
    disk = WaitingDisk()
    here, there = Store.open(str(tmp_path / "here")), Store.open(str(tmp_path / "there"), disk=disk, threads=1)
    with here, there:
        state = make_snapshot(9)
        other = replace(state, logits=make_snapshot(9, seed=5).logits)
        node = saved(here, state)
        bundle = bundle_of(here, node)
        mine = make_node(9)
        there.record(mine)
        disk.skip = len(state.pages) + 1  # all its parts but the last, that of the logits
        disk.armed = True
        saver = threading.Thread(target=lambda: there.save(mine.id, other, FINGERPRINT, reason="pause"))
        saver.start()

        def meanwhile() -> None:
            try:
                assert disk.reached.wait(30)
                disk.armed = False
                assert there._pins.fresh, "written, and not under their names"
                import_bundle(there, io.BytesIO(bundle))
                assert same_bits(there.load(node.id), state)
            finally:
                disk.armed = False
                disk.go.set()

        eventually(saver, meanwhile)
        assert same_bits(there.load(mine.id), other)
        assert fsck(there).clean
