"""Sessions pushed to, pulled from and moved through a bucket: S3's own protocol, spoken by a local moto server."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import s3fs
from moto.server import ThreadedMotoServer

from serai.checkpoints import Store
from serai.checkpoints.errors import NotOwner, PlaceFailed, SessionGone
from serai.checkpoints.moving.handover import PlacePeer, hand_over
from serai.checkpoints.moving.ownership import OwnerStatus, ownership
from serai.checkpoints.moving.places import FsspecPlace
from serai.checkpoints.moving.remote import pull, push
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.samples import grown, make_node, make_snapshot, same_bits, saved

ACCESS = {"key": "anyone", "secret": "anything"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint: str) -> str:
    bucket = f"bucket-{uuid4().hex}"
    s3fs.S3FileSystem(endpoint_url=endpoint, **ACCESS).mkdir(bucket)
    return f"s3://{bucket}/sessions"


@pytest.fixture
def place(endpoint: str, url: str) -> FsspecPlace:
    return FsspecPlace(url, endpoint_url=endpoint, **ACCESS)


class Breaking(FsspecPlace):
    """A bucket whose line breaks after some more objects."""

    left = 0

    def put(self, name: str, data: bytes) -> None:
        self._one_less()
        super().put(name, data)

    def get(self, name: str) -> bytes:
        self._one_less()
        return super().get(name)

    def _one_less(self) -> None:
        if self.left == 0:
            raise PlaceFailed(url="s3://", doing="moving bytes", reason="the line broke")
        self.left -= 1


def test_a_bucket_holds_a_session_and_later_only_what_is_new(tmp_path: Path, place: FsspecPlace) -> None:
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(40)
        node = saved(here, state)
        first = push(here, place, node.id)
        assert first.parts_had == 0
        assert push(here, place, node.id).parts == 0
        pull(there, place, node.id)
        later_state = grown(state, 5)
        later = saved(here, later_state, node)
        pushed = push(here, place, later.id)
        assert (pushed.parts, pushed.parts_had) == (4, 10)
        assert (pull(there, place, later.id).nodes, there.session_head(node.session_id)) == (1, later.id)
        assert same_bits(there.load(later.id), later_state)
        with pytest.raises(SessionGone):
            pull(there, place, make_node(3).id)


def test_broken_transfers_go_on_where_they_stopped(tmp_path: Path, endpoint: str, url: str) -> None:
    place = Breaking(url, endpoint_url=endpoint, **ACCESS)
    with Store.open(str(tmp_path / "here")) as here, Store.open(str(tmp_path / "there")) as there:
        state = make_snapshot(9)
        node = saved(here, state)
        objects = 5 + 3  # parts; and the node, the manifest and the point
        for attempt in range(objects):
            place.left = attempt if attempt < 2 else 1
            with pytest.raises((PlaceFailed, SessionGone)):
                pull(there, place, node.id)
            place.left = 1
            if attempt < objects - 1:
                with pytest.raises(PlaceFailed, match="the line broke"):
                    push(here, place, node.id)
        assert push(here, place, node.id).parts == 0
        place.left = 0
        with pytest.raises(PlaceFailed, match="the line broke"):
            pull(there, place, node.id)
        for _ in range(4):
            place.left = 3 + 1  # the point, the node and the manifest, and one part that has not come yet
            with pytest.raises(PlaceFailed, match="the line broke"):
                pull(there, place, node.id)
            assert there.sessions() == []
        place.left = 3 + 1
        pull(there, place, node.id)
        assert same_bits(there.load(node.id), state)
        assert fsck(there).orphans == ()


def test_a_session_moves_through_a_bucket_to_one_taker(tmp_path: Path, place: FsspecPlace, url: str) -> None:
    peer = PlacePeer(url, place)
    stores = [Store.open(str(tmp_path / name)) for name in ("here", "there", "elsewhere")]
    here, there, elsewhere = stores
    try:
        state = make_snapshot(9)
        node = saved(here, state)
        hand_over(here, node.session_id, node.id, peer)
        assert ownership(here, node.session_id).status is OwnerStatus.MOVED
        peer.take(there, node.session_id)
        peer.take(there, node.session_id)  # as one that was killed and began anew
        assert ownership(there, node.session_id).may_be_used
        assert same_bits(there.load(node.id), state)
        with pytest.raises(NotOwner, match=f"the store {there.id} has taken it"):
            peer.take(elsewhere, node.session_id)
    finally:
        for store in stores:
            store.close()


def test_a_bucket_out_of_reach_is_told(tmp_path: Path) -> None:
    place = FsspecPlace("s3://none/sessions", endpoint_url="http://127.0.0.1:9", **ACCESS)
    with Store.open(str(tmp_path / "here")) as here:
        node = saved(here, make_snapshot(9))
        with pytest.raises(PlaceFailed, match="s3://none/sessions"):
            push(here, place, node.id)
