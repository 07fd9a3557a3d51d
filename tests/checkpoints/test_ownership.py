"""A session that moves has one owner, whatever step the move stopped at."""

import io
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from serai.checkpoints import Store, new_id
from serai.checkpoints.errors import NotOwner, SessionGone, SnapshotCorrupt
from serai.checkpoints.moving.ownership import (
    OwnerStatus,
    abort_move,
    accept_move,
    begin_move,
    decline_move,
    finish_move,
    override_move,
    ownership,
)
from serai.checkpoints.moving.receiving import import_bundle
from serai.checkpoints.moving.transfer import export
from tests.checkpoints.samples import make_node, make_snapshot, saved


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Store, Store, str]]:
    """Two stores, and a session that both have the nodes of; the first owns it."""
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        node = saved(here, make_snapshot(5))
        sink = io.BytesIO()
        export(here, node.id, sink)
        import_bundle(there, io.BytesIO(sink.getvalue()))
        yield here, there, node.session_id


def test_a_move_hands_over(sides: tuple[Store, Store, str]) -> None:
    here, there, session = sides
    moving = begin_move(here, session, "there")
    assert not moving.may_be_used
    with pytest.raises(NotOwner, match="is moving"):
        begin_move(here, session, "elsewhere")
    assert accept_move(there, session, moving.epoch, "here").may_be_used
    assert accept_move(there, session, moving.epoch, "here").may_be_used
    assert finish_move(here, session, moving.epoch).status is OwnerStatus.MOVED
    assert not ownership(here, session).may_be_used
    back = begin_move(there, session, "here")
    assert accept_move(here, session, back.epoch, "there").may_be_used


def test_a_source_in_doubt_asks_and_gets_a_binding_answer(sides: tuple[Store, Store, str]) -> None:
    here, there, session = sides
    moving = begin_move(here, session, "there")
    assert decline_move(there, session, moving.epoch, "here").status is OwnerStatus.DECLINED
    with pytest.raises(NotOwner, match="cannot be taken"):
        accept_move(there, session, moving.epoch, "here")
    assert abort_move(here, session, moving.epoch).may_be_used
    again = begin_move(here, session, "there")
    accept_move(there, session, again.epoch, "here")
    assert decline_move(there, session, again.epoch, "here").may_be_used  # accepted: the answer says so
    with pytest.raises(NotOwner, match="not moving"):
        finish_move(here, session, again.epoch - 1)
    finish_move(here, session, again.epoch)


def test_what_has_not_come_cannot_be_accepted(sides: tuple[Store, Store, str]) -> None:
    _, there, _ = sides
    with pytest.raises(SessionGone):
        accept_move(there, new_id(), 1, "here")


def test_it_outlives_the_process_and_damage_is_named(sides: tuple[Store, Store, str], tmp_path: Path) -> None:
    here, _, session = sides
    begin_move(here, session, "there")
    here.close()
    with Store.open(str(tmp_path / "here")) as again:
        assert ownership(again, session).status is OwnerStatus.MOVING
        assert override_move(again, session).may_be_used
        file = tmp_path / "here" / "owners" / session
        file.write_bytes(bytes(200))
        with pytest.raises(SnapshotCorrupt):
            ownership(again, session)


def test_no_order_of_messages_makes_two_owners(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Messages are lost, repeated and late; both sides act on whatever they know."""

    class Moves(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            folder = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path_factory.mktemp("moves")
            self.folder = folder / f"serai-moves-{new_id()}"
            self.stores = [Store.open(str(self.folder / str(side))) for side in range(2)]
            node = make_node(3)
            for store in self.stores:
                store.record(node)
            self.session = node.session_id
            self.epochs = [0]
            override = begin_move(self.stores[1], self.session, "0")  # the second side does not own it
            finish_move(self.stores[1], self.session, override.epoch)
            accept_move(self.stores[0], self.session, override.epoch, "1")
            self.epochs.append(override.epoch)

        @rule(side=st.integers(0, 1))
        def begin(self, side: int) -> None:
            with suppress(NotOwner):
                self.epochs.append(begin_move(self.stores[side], self.session, str(1 - side)).epoch)

        @rule(side=st.integers(0, 1), data=st.data())
        def accept_offer(self, side: int, data: st.DataObject) -> None:
            """An offer, perhaps an old one, reaches the side it was made to."""
            epoch = data.draw(st.sampled_from(self.epochs))
            offered_by = ownership(self.stores[1 - side], self.session)
            if offered_by.epoch < epoch:
                return  # this side made that offer itself
            with suppress(NotOwner):
                accept_move(self.stores[side], self.session, epoch, str(1 - side))

        @rule(side=st.integers(0, 1))
        def ask(self, side: int) -> None:
            """A side in doubt asks the other and acts on the answer."""
            mine = ownership(self.stores[side], self.session)
            if mine.status is not OwnerStatus.MOVING:
                return
            answer = decline_move(self.stores[1 - side], self.session, mine.epoch, str(side))
            if answer.status is OwnerStatus.DECLINED:
                abort_move(self.stores[side], self.session, mine.epoch)
            else:
                finish_move(self.stores[side], self.session, mine.epoch)

        @invariant()
        def one_owner_at_most(self) -> None:
            assert sum(ownership(store, self.session).may_be_used for store in self.stores) <= 1

        def teardown(self) -> None:
            for store in self.stores:
                store.close()
            shutil.rmtree(self.folder)

    run_state_machine_as_test(Moves, settings=settings(max_examples=25, stateful_step_count=12, deadline=None))
