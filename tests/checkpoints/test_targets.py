"""What a target names is in its form: a URL is a place, a path the folder of a store, whatever lies there."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serai.checkpoints import Store
from serai.checkpoints.errors import NotOwner, PlaceFailed, PlaceUnknown, SessionGone, StoreInvalid, TransferStopped
from serai.checkpoints.files.parts import PartFiles
from serai.checkpoints.moving import receiving, remote
from serai.checkpoints.moving.direct import fetch, send
from serai.checkpoints.moving.handover import PlacePeer, StorePeer, hand_over, peer_at, place_peer_at, settle
from serai.checkpoints.moving.ownership import OwnerStatus, ownership
from serai.checkpoints.moving.transfer import Moved
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.samples import make_node, make_snapshot, same_bits, saved

STATE = make_snapshot(9, seed=4)


def test_a_path_is_a_store_and_a_url_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And both are kept from the root on: they are asked for again from another working folder."""
    monkeypatch.chdir(tmp_path)
    for path in ("there", f"{tmp_path}/there"):
        assert peer_at(path) == StorePeer(str(tmp_path / "there"))
    peer = peer_at(f"file://{tmp_path}/there")
    assert isinstance(peer, PlacePeer)
    assert peer.name == f"file://{tmp_path}/there"
    with pytest.raises(PlaceUnknown, match="from the root on: file:///folder"):
        peer_at("file://there")


def test_what_is_sent_to_a_path_makes_a_store_there(tmp_path: Path) -> None:
    """As a session that is moved there does."""
    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, STATE)
        assert send(here, node.id, str(tmp_path / "there")).nodes == 1
        with Store.open(str(tmp_path / "there"), create=False) as there:
            assert same_bits(there.load(node.id), STATE)
        assert not (tmp_path / "there" / "points").exists()
        other = make_node(3)
        here.record(other)
        hand_over(here, other.session_id, other.id, peer_at(str(tmp_path / "moved")))
    with Store.open(str(tmp_path / "moved"), create=False) as moved:
        assert ownership(moved, other.session_id).epoch == 1


def test_a_place_is_not_taken_for_a_store(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = saved(here, STATE)
        send(here, node.id, f"file://{place}")
        calls: list[Callable[[], object]] = [
            lambda: send(here, node.id, str(place)),
            lambda: fetch(there, node.id, str(place)),
            lambda: hand_over(here, node.session_id, node.id, peer_at(str(place))),
        ]
        for call in calls:
            with pytest.raises(StoreInvalid, match=rf"it is a place that sessions .*by its URL, file://{place}"):
                call()
        assert ownership(here, node.session_id).epoch == 0
        assert sorted(path.name for path in place.iterdir()) == ["manifests", "nodes", "parts", "points"]
        fetch(there, node.id, f"file://{place}")
        assert same_bits(there.load(node.id), STATE)


def test_a_store_is_not_taken_for_a_place(tmp_path: Path) -> None:
    """What lay beside its index would never be seen."""
    folder = tmp_path / "store"
    with Store.open(str(folder)) as store:
        node = saved(store, STATE)
    before = sorted(path.name for path in folder.iterdir())
    with Store.open(str(tmp_path / "here")) as here:
        mine = saved(here, STATE)
        calls: list[Callable[[], object]] = [
            lambda: send(here, mine.id, f"file://{folder}"),
            lambda: fetch(here, node.id, f"file://{folder}"),
            lambda: hand_over(here, mine.session_id, mine.id, peer_at(f"file://{folder}")),
        ]
        for call in calls:
            with pytest.raises(PlaceUnknown, match=rf"a store lies in that folder, and is named by its path: {folder}"):
                call()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_folder_that_one_may_not_read_is_a_place_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, STATE)
        monkeypatch.setattr(Path, "is_file", refused)  # root may read every folder
        url = f"file://{tmp_path}/closed/place"
        calls: list[Callable[[], object]] = [
            lambda: send(here, node.id, url),
            lambda: fetch(here, node.id, url),
            lambda: peer_at(url),
        ]
        for call in calls:
            with pytest.raises(PlaceFailed, match=r"a store lies there failed at .*: Permission denied; .* again$"):
                call()


def test_a_session_is_taken_from_a_place_only(tmp_path: Path) -> None:
    with pytest.raises(PlaceUnknown, match=r"it is the folder of a store, .* is resumed by a runtime over it"):
        place_peer_at(str(tmp_path))


@pytest.mark.parametrize("nothing", ["missing", "empty"])
def test_nothing_is_fetched_where_no_store_lies(tmp_path: Path, nothing: str) -> None:
    (tmp_path / "empty").mkdir()
    with Store.open(str(tmp_path / "here")) as here, pytest.raises(StoreInvalid, match=nothing):
        fetch(here, "a" * 26, str(tmp_path / nothing))


def test_a_side_in_doubt_asks_the_place_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From whichever folder: another place would say that it never came, and then two would own it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")

    class Lost(PlacePeer):
        def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
            super().accept(session_id, epoch, node_id, source)
            raise ConnectionResetError("the line broke")

        def decline(self, session_id: str, epoch: int, node_id: str, source: str) -> OwnerStatus:
            raise ConnectionResetError("the line broke")

    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, STATE)
        for url in ("file://place", f"file://{tmp_path}/a/place"):
            try:
                peer = peer_at(url)
            except PlaceUnknown:
                continue
            assert isinstance(peer, PlacePeer)
            with pytest.raises(NotOwner, match="can't be asked"):
                hand_over(here, node.session_id, node.id, Lost(peer.name, peer.place))
            break
        monkeypatch.chdir(tmp_path / "b")
        assert settle(here, node.session_id).status is OwnerStatus.MOVED


class Counted:
    """Calls a transfer off when it has been asked `most` times, or as a Ctrl-C then does."""

    def __init__(self, most: int, *, by_key: bool = False) -> None:
        self.left = most
        self._by_key = by_key

    def __call__(self) -> bool:
        self.left -= 1
        if self.left < 0 and self._by_key:
            raise KeyboardInterrupt
        return self.left < 0


SMALL_BYTES = 2048


def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote, receiving):
        monkeypatch.setattr(module, "BUFFER_BYTES", SMALL_BYTES)


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("kind", ["to a store", "to a place", "from a store", "from a place"])
def test_a_copy_that_is_called_off_is_seen_whole_or_not_at_all(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, *, by_key: bool
) -> None:
    """Whenever it is called off, and what had come is not sent again."""
    small_buffers(monkeypatch)
    off, had = 0, [0]
    while True:
        folder = tmp_path / f"{off}"
        there = f"file://{folder}/place" if "place" in kind else str(folder / "there")
        with Store.open(str(folder / "here")) as here, Store.open(str(folder / "mine")) as mine:
            node = saved(here, STATE)
            if kind == "from a place":
                send(here, node.id, there)

            def copy(stopped: Counted, here: Store = here, mine: Store = mine) -> Moved:
                if kind.startswith("to "):
                    return send(here, node.id, there, stopped)  # noqa: B023
                return fetch(mine, node.id, there if "place" in kind else str(folder / "here"), stopped)  # noqa: B023

            try:
                whole = copy(Counted(off, by_key=by_key))
            except (TransferStopped, KeyboardInterrupt):
                if kind.startswith("from"):
                    assert mine.sessions() == []
                elif kind == "to a store":
                    with Store.open(there) as other:
                        assert other.sessions() == []
                else:
                    assert not (folder / "place" / "points").exists()
                    with pytest.raises(SessionGone):
                        fetch(mine, node.id, there)
                whole = copy(Counted(1_000))
                assert whole.parts + whole.parts_had == 5
                had.append(whole.parts_had)
                ended = False
            else:
                ended = True
            if kind.startswith("to "):
                fetch(mine, node.id, there)
            assert same_bits(mine.load(node.id), STATE)
            assert fsck(mine, remove_orphans=False).orphans == ()
            assert list((folder / "mine" / "tmp").iterdir()) == []
            assert fsck(mine).clean
        if ended:
            assert had == sorted(had), "the later, the more had come"
            assert set(had) == set(range(6))
            return
        off += 1


@pytest.mark.parametrize("left", range(4))
def test_a_copy_is_called_off_while_what_an_attempt_before_had_left_is_read(
    tmp_path: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part may have hundreds of megabytes."""

    def came() -> int:
        return sum(file.is_file() for file in (tmp_path / "mine" / "parts").rglob("*"))

    read, read_again = PartFiles.read, 0

    def counted(files: PartFiles, name: str, specs: Any, out: Any) -> None:
        nonlocal read_again
        read_again += 1
        read(files, name, specs, out)

    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, STATE)
        place = f"file://{tmp_path}/place"
        send(here, node.id, place)
    with Store.open(str(tmp_path / "mine")) as mine:
        with pytest.raises(TransferStopped):
            fetch(mine, node.id, place, lambda: came() == 4)
        monkeypatch.setattr(PartFiles, "read", counted)
        with pytest.raises(TransferStopped):
            fetch(mine, node.id, place, lambda: came() == 5 and read_again == left)
        assert (came(), read_again) == (5, left)
        assert mine.sessions() == []
        whole = fetch(mine, node.id, place)
        assert (whole.parts, whole.parts_had) == (0, 5)
        assert same_bits(mine.load(node.id), STATE)
        assert fsck(mine).clean


@pytest.mark.parametrize("kind", ["to a store", "to a place", "from a store", "from a place"])
def test_a_copy_asks_within_a_part_whether_it_is_called_off(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a store has read or written a buffer of it."""
    small_buffers(monkeypatch)
    asked = Counted(1_000)
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "mine")) as mine:
        node = saved(here, STATE)
        there = f"file://{tmp_path}/place" if "place" in kind else str(tmp_path / "there")
        if kind == "from a place":
            send(here, node.id, there)
        if kind.startswith("to "):
            send(here, node.id, there, asked)
        else:
            fetch(mine, node.id, there if "place" in kind else str(tmp_path / "here"), asked)
        buffers = here.sizes().part_bytes // SMALL_BYTES
    assert buffers >= 10
    assert 1_000 - asked.left > buffers


def test_a_taking_that_is_called_off_leaves_the_session_where_it_was(tmp_path: Path) -> None:
    peer = place_peer_at(f"file://{tmp_path}/place")
    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, STATE)
        hand_over(here, node.session_id, node.id, peer)
    off = 0
    while True:
        with Store.open(str(tmp_path / f"{off}")) as mine:
            try:
                peer.take(mine, node.session_id, Counted(off))
            except TransferStopped:
                off += 1
                continue
            assert ownership(mine, node.session_id).may_be_used
            assert ownership(mine, node.session_id).epoch == 2
            assert off >= 9, "a point, a node, a manifest, five parts, and once all has come"
            return


@pytest.mark.parametrize("kind", ["store", "place"])
def test_a_move_that_is_called_off_leaves_the_session_where_it_was(tmp_path: Path, kind: str) -> None:
    off = 0
    while True:
        folder = tmp_path / f"{off}"
        peer = peer_at(str(folder / "there") if kind == "store" else f"file://{folder}/place")
        with Store.open(str(folder / "here")) as here:
            node = saved(here, STATE)
            try:
                hand_over(here, node.session_id, node.id, peer, Counted(off))
            except TransferStopped:
                assert ownership(here, node.session_id).epoch == 0
            else:
                assert ownership(here, node.session_id).status is OwnerStatus.MOVED
                assert off >= 8
                return
            hand_over(here, node.session_id, node.id, peer)
        off += 1
