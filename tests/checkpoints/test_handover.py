"""A session is handed over whole: killed at any call, it has one owner at most, and one after asking."""

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from serai.checkpoints import Store
from serai.checkpoints.errors import NotOwner, PlaceUnknown, SessionGone
from serai.checkpoints.files.disk import Disk
from serai.checkpoints.harness.faulty_disk import Fault, FaultyDisk
from serai.checkpoints.moving.handover import (
    Peer,
    PlacePeer,
    StorePeer,
    hand_over,
    peer_at,
    require_owned,
    settle,
)
from serai.checkpoints.moving.ownership import OwnerStatus, begin_move, override_move, ownership
from serai.checkpoints.moving.places import FolderPlace, place_at
from serai.checkpoints.moving.remote import pull, push
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.samples import grown, make_node, make_snapshot, same_bits, saved

STATE = make_snapshot(9, seed=4)


@dataclass(frozen=True, slots=True)
class OnDisk(StorePeer):
    """A store on a disk of its own kind, with one thread, so that it can be forked."""

    disk: Disk

    def opened(self, *, create: bool) -> Store:
        return Store.open(self.name, create=create, disk=self.disk, threads=1)


@dataclass(frozen=True, slots=True)
class Sides:
    """A store that owns a session, and where the session is to go."""

    folder: Path
    kind: str

    def here(self, disk: Disk | None = None) -> Store:
        return Store.open(str(self.folder / "here"), disk=disk, threads=1)

    def there(self) -> Store:
        return Store.open(str(self.folder / "there"), threads=1)

    def peer(self, disk: Disk | None = None) -> Peer:
        if self.kind == "store":
            return OnDisk(str(self.folder / "there"), disk or Disk())
        return PlacePeer(f"file://{self.folder}/place", FolderPlace(str(self.folder / "place"), disk=disk))

    def arrive(self, session: str) -> None:
        """What whoever waits for the session does on the other side; `NotOwner` or `SessionGone` if it has not come."""
        with self.there() as there:
            if self.kind == "place":
                PlacePeer(f"file://{self.folder}/place", FolderPlace(str(self.folder / "place"))).take(there, session)
            there.session_head(session)
            if ownership(there, session).epoch == 0:
                raise NotOwner(session_id=session, problem="has not been handed over", remedy="wait")
            require_owned(there, session)

    def owners(self, session: str) -> int:
        """How many stores may use the session by their own word, nobody having been asked."""
        count = 0
        for name in ("here", "there"):
            if (self.folder / name).exists():
                with Store.open(str(self.folder / name), threads=1) as store:
                    owner = ownership(store, session)
                    # A copy that was never handed over is no claim.
                    count += owner.may_be_used and (name == "here" or owner.epoch > 0)
        return count


@pytest.fixture(params=["store", "place"])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Sides:
    return Sides(tmp_path, request.param)


def prepared(sides: Sides) -> tuple[str, str]:
    """The session's id and its last node's."""
    with sides.here() as here:
        node = saved(here, STATE)
    return node.session_id, node.id


def test_a_session_is_owned_where_it_went(sides: Sides) -> None:
    session, node = prepared(sides)
    with sides.here() as here:
        moved = hand_over(here, session, node, sides.peer())
        assert (moved.nodes, moved.snapshots, moved.parts_had) == (1, 1, 0)
        assert ownership(here, session).status is OwnerStatus.MOVED
        with pytest.raises(NotOwner, match="was moved to"):
            require_owned(here, session)
        with pytest.raises(NotOwner, match="settle that move first"):
            hand_over(here, session, node, sides.peer())
    sides.arrive(session)
    sides.arrive(session)
    with sides.there() as there:
        assert same_bits(there.load(node), STATE)


def test_a_session_comes_back_with_what_it_has_grown(tmp_path: Path) -> None:
    """There and back again, only what is new moving each time."""
    sides = Sides(tmp_path, "store")
    session, node = prepared(sides)
    with sides.here() as here:
        hand_over(here, session, node, sides.peer())
    with sides.there() as there:
        parent = there.node(node)
        later_state = grown(STATE, 5)
        later = saved(there, later_state, parent)
        moved = hand_over(there, session, later.id, StorePeer(str(tmp_path / "here")))
        assert (moved.nodes, moved.parts_had) == (1, 2)  # the two full pages were there before
    with sides.here() as here:
        require_owned(here, session)
        assert here.session_head(session) == later.id
        assert same_bits(here.load(later.id), later_state)
        assert ownership(here, session).epoch == 2


class Silent(StorePeer):
    """Takes what it is sent, and loses every answer after `answers` of them."""

    answers = 0

    def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
        self._answer()
        super().accept(session_id, epoch, node_id, source)
        self._answer()

    def decline(self, session_id: str, epoch: int, node_id: str, source: str) -> OwnerStatus:
        self._answer()
        return super().decline(session_id, epoch, node_id, source)

    def _answer(self) -> None:
        if Silent.answers == 0:
            raise ConnectionResetError("the line broke")
        Silent.answers -= 1


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_side_in_doubt_uses_nothing_before_it_has_asked(tmp_path: Path, answers: int) -> None:
    sides = Sides(tmp_path, "store")
    session, node = prepared(sides)
    Silent.answers = answers
    with sides.here() as here:
        silent = Silent(str(tmp_path / "there"))
        if answers < 2:
            with pytest.raises(NotOwner, match="can't be asked"):
                hand_over(here, session, node, silent)
            assert ownership(here, session).status is OwnerStatus.MOVING
            with pytest.raises(NotOwner, match="settle that move first"):
                hand_over(here, session, node, silent)
            accepted = answers == 1
            settled = settle(here, session)  # asks the store, which answers now
            assert settled.may_be_used is not accepted
        else:
            hand_over(here, session, node, silent)
    assert sides.owners(session) == 1


def test_an_answer_that_was_lost_is_asked_for_again(tmp_path: Path) -> None:
    """The other side accepts, its word is lost, and asking finds out: no error, one owner."""

    class Forgetful(StorePeer):
        def accept(self, session_id: str, epoch: int, node_id: str, source: str) -> None:
            super().accept(session_id, epoch, node_id, source)
            raise ConnectionResetError("the line broke")

    sides = Sides(tmp_path, "store")
    session, node = prepared(sides)
    with sides.here() as here:
        hand_over(here, session, node, Forgetful(str(tmp_path / "there")))
        assert ownership(here, session).status is OwnerStatus.MOVED
    sides.arrive(session)


def test_a_person_may_decide_when_nobody_answers(tmp_path: Path) -> None:
    sides = Sides(tmp_path, "store")
    session, node = prepared(sides)
    Silent.answers = 0
    with sides.here() as here:
        with pytest.raises(NotOwner, match="can't be asked"):
            hand_over(here, session, node, Silent(str(tmp_path / "there")))
        assert override_move(here, session).may_be_used
        require_owned(here, session)
        hand_over(here, session, node, sides.peer())  # at a later epoch, which the other side takes
    sides.arrive(session)


def test_targets_that_take_nothing_in_are_refused(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:8000", "https://example.org/v1"):
        with pytest.raises(PlaceUnknown, match="a server takes no sessions in"):
            peer_at(url)
    with pytest.raises(PlaceUnknown, match="carrier-pigeon"):
        peer_at("carrier-pigeon://loft")
    assert peer_at(str(tmp_path / "x")) == StorePeer(str(tmp_path / "x"))


def killed_at(sides: Sides, session: str, node: str, at: int, fault: Fault) -> bool:
    """Hand over in a child that is killed at its disk call number `at`, of both sides; False when it got to the end."""
    child = os.fork()
    if child == 0:
        status = 3
        try:
            disk = FaultyDisk(at, fault)
            with sides.here(disk) as here:
                hand_over(here, session, node, sides.peer(disk))
            status = 0
        finally:
            os._exit(status)
    _, result = os.waitpid(child, 0)
    assert os.WIFSIGNALED(result) or os.WEXITSTATUS(result) == 0
    return os.WIFSIGNALED(result)


def calls_of(sides: Sides) -> tuple[int, int]:
    """How many disk calls a hand-over takes to send the content, and in all."""
    disk = FaultyDisk()
    session, node = prepared(sides)
    with sides.here(disk) as here:
        peer = sides.peer(disk)
        peer.receive(here, node)
        content = len(disk.calls)
        hand_over(here, session, node, peer)
    return content, len(disk.calls)


def every_call(folder: Path, kind: str, fault: Fault) -> Iterator[tuple[Sides, str, str]]:
    """Fresh sides, whose hand-over was killed: at every call that settles the owner, and at some of those before."""
    content, _ = calls_of(Sides(folder / "count", kind))
    at = 0
    while True:
        sides = Sides(folder / f"{at}", kind)
        session, node = prepared(sides)
        if not killed_at(sides, session, node, at, fault):
            assert at > content + 8
            return
        yield sides, session, node
        at += 1 if at >= content - 8 else 6


@pytest.mark.parametrize("kind", ["store", "place"])
@pytest.mark.parametrize("fault", [Fault.KILLED_BEFORE, Fault.POWER_CUT])
def test_killed_at_any_call_it_has_one_owner(tmp_path: Path, kind: str, fault: Fault) -> None:
    """Two processes and SIGKILL (or the power cut) at every disk call: never two owners, and all of it with the one."""
    outcomes = set()
    for sides, session, node in every_call(tmp_path, kind, fault):
        assert sides.owners(session) <= 1
        with sides.here() as here:
            settled = settle(here, session, None if sides.kind == "place" else sides.peer())
            outcomes.add(settled.status)
            assert settled.status in (OwnerStatus.OWNED, OwnerStatus.MOVED)
            assert same_bits(here.load(node), STATE)
        if settled.may_be_used:
            with pytest.raises((NotOwner, SessionGone)):
                sides.arrive(session)
            assert sides.owners(session) == 1
            with sides.here() as here:
                hand_over(here, session, node, sides.peer())
        sides.arrive(session)
        assert sides.owners(session) == 1
        with sides.there() as there:
            assert same_bits(there.load(node), STATE)
            assert fsck(there).problems == ()
    assert outcomes == {OwnerStatus.OWNED, OwnerStatus.MOVED}


def test_a_taker_killed_at_any_call_takes_it_in_the_end(tmp_path: Path) -> None:
    at = 1
    while True:
        sides = Sides(tmp_path / f"{at}", "place")
        session, node = prepared(sides)
        with sides.here() as here:
            hand_over(here, session, node, sides.peer())
        child = os.fork()
        if child == 0:
            status = 3
            try:
                disk = FaultyDisk(at, Fault.KILLED_BEFORE)
                with Store.open(str(sides.folder / "there"), disk=disk, threads=1) as there:
                    peer = PlacePeer("place", FolderPlace(str(sides.folder / "place"), disk=disk))
                    peer.take(there, session)
                status = 0
            finally:
                os._exit(status)
        _, result = os.waitpid(child, 0)
        if not os.WIFSIGNALED(result):
            assert os.WEXITSTATUS(result) == 0
            break
        assert sides.owners(session) <= 1
        sides.arrive(session)
        assert sides.owners(session) == 1
        at += 2
    assert at > 30


def test_two_takers_at_once_are_one(tmp_path: Path) -> None:
    """Both have seen that it is free; the place lets one of them be first."""
    sides = Sides(tmp_path, "place")
    session, node = prepared(sides)
    with sides.here() as here:
        hand_over(here, session, node, sides.peer())
    place = FolderPlace(str(tmp_path / "place"))

    class Slow(FolderPlace):
        """Between what it read and what it writes, somebody else takes the session."""

        def create(self, name: str, data: bytes) -> bool:
            with Store.open(str(tmp_path / "fast"), threads=1) as fast:
                PlacePeer("place", place).take(fast, session)
            return super().create(name, data)

    with sides.there() as there:
        with pytest.raises(NotOwner, match="has taken it"):
            PlacePeer("place", Slow(str(tmp_path / "place"))).take(there, session)
        assert not ownership(there, session).epoch
    with Store.open(str(tmp_path / "fast")) as fast:
        assert ownership(fast, session).may_be_used


def test_a_node_elsewhere_in_the_tree_is_no_session_of_its_own(tmp_path: Path) -> None:
    """Only a session has an owner; what was there before it moved stays readable."""
    sides = Sides(tmp_path, "store")
    with sides.here() as here:
        first = saved(here, STATE)
        later = make_node(2, first)
        here.record(later)
        hand_over(here, first.session_id, later.id, sides.peer())
        assert here.tokens(first.id).size == 9


@pytest.mark.parametrize("kind", ["store", "place"])
def test_of_two_copies_moved_to_one_side_the_second_is_refused_and_stays_owned(kind: str, tmp_path: Path) -> None:
    copies = FolderPlace(str(tmp_path / "copies"))
    target = str(tmp_path / "target")
    peer: Peer = StorePeer(target) if kind == "store" else PlacePeer(f"file://{target}", FolderPlace(target))
    with Store.open(str(tmp_path / "a"), threads=1) as a, Store.open(str(tmp_path / "b"), threads=1) as b:
        node = make_node(3)
        a.record(node)
        push(a, copies, node.id)
        pull(b, copies, node.id)
        hand_over(a, node.session_id, node.id, peer)
        with pytest.raises(NotOwner):
            hand_over(b, node.session_id, node.id, peer)
        assert ownership(a, node.session_id).status is OwnerStatus.MOVED
        assert ownership(b, node.session_id).may_be_used


class NoLinks(Disk):
    """As FAT: no file has two names."""

    def link(self, name: str, new_name: str, *, folder: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")


def test_a_place_that_cannot_decide_is_refused_and_the_session_stays_as_it_was(tmp_path: Path) -> None:
    peer = PlacePeer(f"file://{tmp_path}/fat", FolderPlace(str(tmp_path / "fat"), disk=NoLinks()))
    with Store.open(str(tmp_path / "here"), threads=1) as here:
        node = make_node(3)
        here.record(node)
        with pytest.raises(PlaceUnknown, match="only if there is none"):
            hand_over(here, node.session_id, node.id, peer)
        assert ownership(here, node.session_id).may_be_used


def test_a_file_system_that_looks_before_it_writes_decides_nothing() -> None:
    class LooksFirst(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        protocol = "looksfirst"
        store: ClassVar[dict[str, object]] = {}
        pipe_file = AbstractFileSystem.pipe_file

    fsspec.register_implementation("looksfirst", LooksFirst, clobber=True)
    with pytest.raises(PlaceUnknown, match="only if there is none"):
        place_at("looksfirst://bucket/folder").create("owners/session/1", b"mine")
    assert not LooksFirst.store


def left_in_doubt(sides: Sides, here: Store, *, accepted: bool, name: str | None = None) -> str:
    """A session whose move was broken off before or after the other side had accepted it; `name` is on record."""
    node = saved(here, STATE)
    peer = sides.peer()
    moved_to = name or peer.name
    peer.receive(here, node.id)
    moving = begin_move(here, node.session_id, moved_to)
    if accepted:
        peer.accept(node.session_id, moving.epoch, node.id, here.id)
    return node.session_id


@pytest.mark.parametrize("instead", ["nothing", "an empty folder"])
@pytest.mark.parametrize("accepted", [False, True])
def test_what_is_not_there_answers_nothing_and_nothing_is_made_in_its_stead(
    sides: Sides, instead: str, *, accepted: bool
) -> None:
    """A disk that is not mounted: the session may have come there, so nothing but that disk can decline it."""
    with sides.here() as here:
        session = left_in_doubt(sides, here, accepted=accepted)
        there = sides.folder / ("there" if sides.kind == "store" else "place")
        there.rename(sides.folder / "away")
        if instead == "an empty folder":
            there.mkdir(0o700)
        for _ in range(2):
            with pytest.raises(NotOwner, match="can't be asked whether it has come"):
                settle(here, session)
        assert ownership(here, session).status is OwnerStatus.MOVING
        assert list(there.iterdir() if there.exists() else ()) == []
        assert there.exists() is (instead == "an empty folder")
        if there.exists():
            there.rmdir()
        (sides.folder / "away").rename(there)
        assert settle(here, session).may_be_used is not accepted
    assert sides.owners(session) == (1 if sides.kind == "store" or not accepted else 0)
    if accepted:
        sides.arrive(session)


@pytest.mark.parametrize("accepted", [False, True])
def test_another_in_its_stead_answers_nothing(sides: Sides, *, accepted: bool) -> None:
    """Another disk at the same mount point, or a store or place that was made anew: two would own the session."""
    with sides.here() as here:
        other = saved(here, make_snapshot(4))
        session = left_in_doubt(sides, here, accepted=accepted)
        there = sides.folder / ("there" if sides.kind == "store" else "place")
        there.rename(sides.folder / "away")
        sides.peer().receive(here, other.id)
        for _ in range(2):
            with pytest.raises(NotOwner, match="can't be asked whether it has come"):
                settle(here, session)
        assert ownership(here, session).status is OwnerStatus.MOVING
        assert not list((there / "owners").glob("*"))
        shutil.rmtree(there)
        (sides.folder / "away").rename(there)
        assert settle(here, session).may_be_used is not accepted
    if accepted:
        sides.arrive(session)
    assert sides.owners(session) == 1


def test_what_was_answered_stays_the_answer_when_the_session_is_erased_there(tmp_path: Path) -> None:
    for accepted in (False, True):
        sides = Sides(tmp_path / f"{accepted}", "store")
        with sides.here() as here:
            session = left_in_doubt(sides, here, accepted=accepted)
            if not accepted:
                sides.peer().decline(session, 1, here.session_head(session), here.id)
            with sides.there() as there:
                there.delete_session(session)
            assert settle(here, session).may_be_used is not accepted


@pytest.mark.parametrize("accepted", [False, True])
def test_a_place_that_a_record_names_by_its_path_is_asked(tmp_path: Path, *, accepted: bool) -> None:
    """As earlier builds recorded it."""
    sides = Sides(tmp_path, "place")
    with sides.here() as here:
        session = left_in_doubt(sides, here, accepted=accepted, name=str(tmp_path / "place"))
        assert settle(here, session).status is (OwnerStatus.MOVED if accepted else OwnerStatus.OWNED)
    if accepted:
        sides.arrive(session)


def test_a_path_from_an_unknown_folder_is_followed_from_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sides = Sides(tmp_path, "store")
    with sides.here() as here:
        session = left_in_doubt(sides, here, accepted=False, name="there")
        with pytest.raises(NotOwner, match=r"only this path, and not from which folder .* --take-back"):
            settle(here, session)
