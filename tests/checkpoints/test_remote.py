"""Sessions pushed to a place far away and pulled from it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from serai.checkpoints import Store
from serai.checkpoints.errors import NameInvalid, PlaceUnknown, SeraiError, SessionGone, SnapshotCorrupt
from serai.checkpoints.fsck import fsck
from serai.checkpoints.remote import FsspecPlace, pull, push
from tests.checkpoints.samples import grown, make_node, make_snapshot, same_bits, saved
from tests.checkpoints.test_delta import chain


class Shelf:
    """A place in memory that notes what it is sent and can break."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.left: int | None = None

    def existing(self, sizes: Mapping[str, int]) -> set[str]:
        return {name for name, size in sizes.items() if len(self.objects.get(name, b"")) == size}

    def put(self, name: str, data: bytes) -> None:
        if self.left is not None:
            if self.left == 0:
                self.objects[name] = data[: len(data) // 2]
                raise ConnectionResetError("the line broke")
            self.left -= 1
        self.objects[name] = data

    def get(self, name: str) -> bytes:
        try:
            return self.objects[name]
        except KeyError as error:
            raise FileNotFoundError(name) from error


def test_a_pushed_session_is_pulled_elsewhere(tmp_path: Path) -> None:
    place = Shelf()
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        states = chain(here, 3)
        last = make_node(2, states[-1][0])
        here.record(last)
        push(here, place, last.id)
        moved = pull(there, place, last.id)
        assert (moved.nodes, moved.snapshots) == (4, 1)
        assert there.tokens(last.id).tolist() == here.tokens(last.id).tolist()
        assert same_bits(there.load(states[-1][0].id), states[-1][1])
        assert fsck(there).orphans == ()
        with pytest.raises(SessionGone):
            pull(there, place, states[0][0].id)
        with pytest.raises(NameInvalid):
            pull(there, place, "../points")


def test_a_later_push_and_pull_move_only_what_is_new(tmp_path: Path) -> None:
    place = Shelf()
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(40)
        node = saved(here, state)
        push(here, place, node.id)
        pull(there, place, node.id)
        later = saved(here, grown(state, 5), node)
        pushed = push(here, place, later.id)
        assert (pushed.parts, pushed.parts_had) == (4, 10)
        pulled = pull(there, place, later.id)
        assert (pulled.nodes, pulled.parts) == (1, 4)
        assert push(here, place, later.id).parts == 0


def test_a_broken_push_hides_nothing_and_goes_on(tmp_path: Path) -> None:
    place = Shelf()
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(9)
        node = saved(here, state)
        attempts = 0
        while True:
            place.left = 1
            try:
                push(here, place, node.id)
                break
            except SeraiError as error:
                assert "pushing" in str(error)  # noqa: PT017 - the last attempt succeeds
            attempts += 1
            with pytest.raises((SessionGone, SnapshotCorrupt)):
                pull(there, place, node.id)
            assert there.sessions() == []
        assert attempts == 7  # eight objects, one more each time
        pull(there, place, node.id)
        assert same_bits(there.load(node.id), state)


def test_what_was_changed_there_is_refused(tmp_path: Path) -> None:
    place = Shelf()
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = saved(here, make_snapshot(9))
        push(here, place, node.id)
        for name, data in list(place.objects.items()):
            place.objects[name] = data[:-200] + b"\1" + data[-199:]
            with pytest.raises(SnapshotCorrupt):
                pull(there, place, node.id)
            del place.objects[name]
            with pytest.raises((SnapshotCorrupt, SessionGone)):
                pull(there, place, node.id)
            place.objects[name] = data
            assert there.sessions() == []
            assert fsck(there).orphans == ()


def test_fsspec_urls_are_places(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec to push to URLs")
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(9)
        node = saved(here, state)
        for url in (str(tmp_path / "bucket"), "memory://bucket/sessions"):
            place = FsspecPlace(url)
            assert push(here, place, node.id).parts == 5
            assert push(here, place, node.id).parts == 0
            pull(there, place, node.id)
            assert same_bits(there.load(node.id), state)
            there.delete(node.id)
    with pytest.raises(PlaceUnknown, match="carrier-pigeon"):
        FsspecPlace("carrier-pigeon://loft")
