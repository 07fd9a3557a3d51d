"""Sessions pushed to a place far away and pulled from it."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from serai.checkpoints import Store
from serai.checkpoints.errors import NameInvalid, PlaceFailed, PlaceUnknown, SeraiError, SessionGone, SnapshotCorrupt
from serai.checkpoints.moving.places import DecidingPlace, FolderPlace, FsspecPlace, place_at
from serai.checkpoints.moving.remote import pull, push
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.disks import FailingDisk, TracingDisk
from tests.checkpoints.samples import grown, make_node, make_snapshot, same_bits, saved
from tests.checkpoints.test_delta import chain


class Shelf:
    """A place in memory that notes what it is sent and can break."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.left: int | None = None
        self.reads_left: int | None = None

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
        if self.reads_left is not None:
            if self.reads_left == 0:
                raise PlaceFailed(url="shelf", doing=f"reading {name}", reason="the line broke")
            self.reads_left -= 1
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


def test_a_broken_pull_shows_nothing_and_goes_on(tmp_path: Path) -> None:
    """What came whole before the line broke is not fetched again."""
    place = Shelf()
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(40)
        node = saved(here, state)
        whole = push(here, place, node.id).parts
        attempts = 0
        while True:
            place.reads_left = 3 + 2  # its point, node and manifest, and two parts
            try:
                pull(there, place, node.id)
                break
            except PlaceFailed:
                attempts += 1
            assert there.sessions() == []
        assert attempts == (whole - 1) // 2
        assert same_bits(there.load(node.id), state)
        assert fsck(there).orphans == ()


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


PLACES: dict[str, Callable[[Path], DecidingPlace]] = {
    "file URL": lambda path: place_at(f"file://{path}/bucket/sessions"),
    "fsspec in memory": lambda path: place_at(f"memory://{path}/sessions"),
    "fsspec on a folder": lambda path: FsspecPlace(f"file://{path}/bucket"),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> DecidingPlace:
    return PLACES[request.param](tmp_path)


def test_every_kind_of_url_is_a_place(tmp_path: Path, place: DecidingPlace) -> None:
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(9)
        node = saved(here, state)
        with pytest.raises(SessionGone):
            pull(there, place, node.id)
        assert push(here, place, node.id).parts == 5
        assert push(here, place, node.id).parts == 0
        pull(there, place, node.id)
        assert same_bits(there.load(node.id), state)


@pytest.mark.parametrize("kind", [kind for kind in PLACES if kind != "fsspec on a folder"])  # looks, then writes
def test_a_place_lets_one_be_first(kind: str, tmp_path: Path) -> None:
    place = PLACES[kind](tmp_path)
    assert place.names("owners/x") == []
    assert place.create("owners/x/1", b"mine")
    assert not place.create("owners/x/1", b"theirs")
    assert place.get("owners/x/1") == b"mine"
    assert place.create("owners/x/2", b"next")
    assert sorted(place.names("owners/x")) == ["1", "2"]
    place.put("owners/x/1", b"replaced")
    assert place.get("owners/x/1") == b"replaced"
    assert place.existing({"owners/x/1": 8, "owners/x/2": 9, "owners/x/3": 1}) == {"owners/x/1"}
    with pytest.raises(FileNotFoundError):
        place.get("owners/x/3")


def test_a_place_that_cannot_be_is_named() -> None:
    with pytest.raises(PlaceUnknown, match="carrier-pigeon"):
        place_at("carrier-pigeon://loft")


@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
def test_a_folder_holds_an_object_whole_or_not_at_all(tmp_path: Path, call: str) -> None:
    disk = FailingDisk(call)
    disk.broken = False
    place = FolderPlace(str(tmp_path / "bucket"), disk=disk)
    place.put("nodes/a", b"before")
    disk.broken = True
    with pytest.raises(PlaceFailed, match=r"writing nodes/a failed at .*bucket.*: No space"):
        place.put("nodes/a", b"after")
    assert place.get("nodes/a") == b"before"
    assert place.names("nodes") == [entry.name for entry in (tmp_path / "bucket" / "nodes").iterdir()] == ["a"]


def test_what_keeps_a_folder_from_being_reached_is_told_as_of_any_place(tmp_path: Path) -> None:
    (tmp_path / "bucket").write_bytes(b"no folder")
    place = FolderPlace(str(tmp_path / "bucket"))
    for act in (
        lambda: place.existing({"nodes/a": 1}),
        lambda: place.put("nodes/a", b"x"),
        lambda: place.create("nodes/a", b"x"),
        lambda: place.get("nodes/a"),
        lambda: place.names("nodes"),
    ):
        with pytest.raises(PlaceFailed, match=r"bucket.*: (Not a directory|File exists)"):
            act()


def test_nothing_is_read_that_is_too_large_or_lies_elsewhere(tmp_path: Path) -> None:
    """A sparse file of a terabyte, a symlink out, a folder that is one, and a pipe."""
    (tmp_path / "secret").write_bytes(b"secret")
    bucket = tmp_path / "bucket"
    (bucket / "nodes").mkdir(parents=True)
    with (bucket / "nodes" / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    (bucket / "nodes" / "link").symlink_to(tmp_path / "secret")
    (bucket / "out").symlink_to(tmp_path)
    os.mkfifo(bucket / "nodes" / "pipe")
    place = FolderPlace(str(bucket))
    for name, problem in {"huge": "no object of a place", "link": "cannot be opened", "pipe": "no regular"}.items():
        with pytest.raises(SnapshotCorrupt, match=problem):
            place.get(f"nodes/{name}")
    with pytest.raises(PlaceFailed, match="Not a directory"):
        place.get("out/secret")
    with pytest.raises(SnapshotCorrupt, match="no object of a place"):
        FsspecPlace(f"file://{bucket}").get("nodes/huge")


def test_what_is_put_in_a_folder_is_durable_before_it_has_its_name(tmp_path: Path) -> None:
    disk = TracingDisk()
    place = FolderPlace(str(tmp_path / "bucket"), disk=disk)
    place.put("nodes/a", b"x")
    steps = [call if call != "rename" else "rename" for call, _ in disk.calls]
    assert steps[-5:] == ["create", "write", "fsync", "rename", "fsync"]
