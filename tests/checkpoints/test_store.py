"""What goes into a store comes out again, exactly, once, and after a restart."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serai.checkpoints import (
    Fingerprint,
    LatentPage,
    LatentType,
    Packing,
    Snapshot,
    StateLayout,
    Storage,
    Store,
    StoredAs,
    new_id,
)
from serai.checkpoints.errors import (
    ModelMismatch,
    NameInvalid,
    NodeInUse,
    SessionGone,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreClosed,
)
from serai.checkpoints.files import codec
from serai.checkpoints.files.manifest import latents_stored_as
from serai.checkpoints.moving.transfer import parts_of
from serai.checkpoints.reports import Erased
from tests.checkpoints.samples import FINGERPRINT, LAYOUT, grown, make_node, make_snapshot, same_bits, saved


def files_bytes(folder: Path) -> int:
    kinds = ("nodes", "manifests", "parts", "tags")
    files = (file for kind in kinds for file in (folder / kind).rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("position", [0, 1, 4, 9])
def test_a_state_comes_back_bit_for_bit(tmp_path: Path, position: int, packing: Packing) -> None:
    """B54: an empty session, too, is saved and restored."""
    state = make_snapshot(position)
    with Store.open(str(tmp_path / "s")) as store:
        node = make_node(position)
        store.record(node)
        store.save(node.id, state, FINGERPRINT, reason="pause", packing=packing)
        assert same_bits(store.load(node.id, FINGERPRINT), state)
    with Store.open(str(tmp_path / "s"), create=False) as store:
        assert same_bits(store.load(node.id, FINGERPRINT), state)
        assert store.tokens(node.id).tolist() == list(range(position))


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, mla_layers=0),
        replace(LAYOUT, latent_width=0),
        replace(LAYOUT, kda_shape=(0, 2, 8, 8), conv_shape=(0, 3, 3, 16)),
        replace(LAYOUT, kda_shape=(3, 0, 8, 8), conv_shape=(3, 3, 0, 16)),
        replace(LAYOUT, latent_type=LatentType.BFLOAT16),
    ],
    ids=["kda-only", "no-width", "mla-only", "no-heads", "bfloat16"],
)
@pytest.mark.parametrize("packing", Packing)
def test_models_without_a_kind_of_state_are_saved_too(tmp_path: Path, layout: StateLayout, packing: Packing) -> None:
    """B55: zero-element arrays keep their shapes."""
    with Store.open(str(tmp_path / "s")) as store:
        for position in (0, 6):
            state = make_snapshot(position, layout=layout)
            node = make_node(position)
            store.record(node)
            store.save(node.id, state, FINGERPRINT, reason="pause", packing=packing)
            assert same_bits(store.load(node.id), state)


def test_only_the_rows_in_use_reach_the_disk(tmp_path: Path) -> None:
    """B56: a page buffer of 4 rows with one in use stores one, and nothing of what stood behind it."""
    whole = make_snapshot(8)
    stale = whole.pages[1].rows.copy()
    stale[:, 1:] = np.float32(1234.5)
    state = replace(make_snapshot(5), pages=(whole.pages[0], LatentPage(stale[:, :1])))
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, state)
        loaded = store.load(node.id)
    assert [page.rows.shape[1] for page in loaded.pages] == [4, 1]
    assert same_bits(loaded, state)
    pattern = np.float32(1234.5).tobytes()
    assert not any(pattern in file.read_bytes() for file in (tmp_path / "s" / "parts").rglob("*") if file.is_file())


def test_strided_views_of_a_pool_are_stored_as_they_look(tmp_path: Path) -> None:
    pool = np.random.default_rng(3).standard_normal((3, 5, 2, 8, 8), dtype=np.float32)
    state = replace(make_snapshot(4), kda=pool[:, 2])
    with Store.open(str(tmp_path / "s")) as store:
        assert same_bits(store.load(saved(store, state).id), state)


def test_a_child_writes_only_what_its_parent_lacks(tmp_path: Path) -> None:
    parent = make_snapshot(40)
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, parent)
        child = grown(parent, 3)
        child_node = make_node(3, node)
        store.record(child_node)
        report = store.save(child_node.id, child, FINGERPRINT, reason="turn")
        assert report.parts_shared == 10  # the full pages
        assert report.parts_new == 1 + 1 + 1  # fixed state, one partial page, logits
        assert same_bits(store.load(child_node.id), child)
        assert same_bits(store.load(node.id), parent)


@pytest.mark.parametrize("position", [1000, 1023, 1024, 1025])
@pytest.mark.parametrize("page_tokens", [16, 64, 256])
def test_growing_writes_the_fixed_state_and_hardly_more_than_the_new_rows(
    tmp_path: Path, position: int, page_tokens: int
) -> None:
    """At most two pages more than 100 tokens' latents, headers included."""
    layout = replace(LAYOUT, page_tokens=page_tokens, latent_width=200)
    with Store.open(str(tmp_path / "s")) as store:
        state = make_snapshot(position, layout=layout)
        node = saved(store, state)
        child = make_node(100, node)
        store.record(child)
        report = store.save(child.id, grown(state, 100), FINGERPRINT, reason="turn")
        excess = report.new_raw_bytes - layout.fixed_bytes - 100 * layout.token_bytes
        assert excess <= 2 * page_tokens * layout.token_bytes


def test_known_pages_are_not_read_again(tmp_path: Path) -> None:
    """A page with an identity the store knows is taken as stored: its buffer may even be gone by then."""
    state = make_snapshot(8)
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, state)
        loaded = store.load(node.id)
        before = [page.rows.copy() for page in loaded.pages]
        for page in loaded.pages:
            page.rows[:] = np.nan
        child = make_node(0, node)
        store.record(child)
        store.save(child.id, loaded, FINGERPRINT, reason="fork")
        again = store.load(child.id)
    assert all(np.array_equal(page.rows, rows) for page, rows in zip(again.pages, before, strict=True))


def test_equal_pages_of_strangers_are_stored_once(tmp_path: Path) -> None:
    state = make_snapshot(8)
    with Store.open(str(tmp_path / "s")) as store:
        saved(store, state)
        stranger = replace(state, pages=tuple(LatentPage(page.rows.copy()) for page in state.pages))
        node = make_node(8)
        store.record(node)
        report = store.save(node.id, stranger, FINGERPRINT, reason="pause")
        assert report.parts_new == 0
        assert store.sizes().file_bytes == files_bytes(tmp_path / "s")


def test_saving_again_replaces(tmp_path: Path) -> None:
    """B65: after a restart all is still listed and counted, and a second save leaves nothing of the first."""
    with Store.open(str(tmp_path / "s")) as store:
        nodes = [saved(store, make_snapshot(n, seed=n)) for n in (3, 7, 12)]
    with Store.open(str(tmp_path / "s")) as store:
        found = [(session.head_id, session.position, session.has_snapshot) for session in store.sessions()]
        assert found == [(node.id, node.position, True) for node in nodes]
        other = make_snapshot(7, seed=99)
        store.save(nodes[1].id, other, FINGERPRINT, reason="pause")
        assert store.sizes().snapshots == 3
        assert store.sizes().file_bytes == files_bytes(tmp_path / "s")
        assert same_bits(store.load(nodes[1].id), other)


@pytest.mark.parametrize("kind", [StoredAs.BFLOAT16, StoredAs.INT8_ROWS])
@pytest.mark.parametrize("latent_type", LatentType)
def test_smaller_types_are_recorded_and_close(tmp_path: Path, kind: StoredAs, latent_type: LatentType) -> None:
    layout = replace(LAYOUT, latent_type=latent_type)
    state = make_snapshot(6, layout=layout)
    storage = Storage(state=kind, latents=kind)
    with Store.open(str(tmp_path / "s")) as store:
        node = make_node(6)
        store.record(node)
        store.save(node.id, state, FINGERPRINT, reason="pause", storage=storage)
        kept = replace(storage, latents=latents_stored_as(layout, storage))
        assert store.snapshot_info(node.id).storage == kept
        assert storage.lossy
        loaded = store.load(node.id)
        limit = np.max(np.abs(state.kda)) / (256 if kind is StoredAs.BFLOAT16 else 254)
        assert np.max(np.abs(loaded.kda - state.kda)) <= limit * 1.001
        assert np.array_equal(loaded.conv, state.conv)
        assert loaded.logits is not None
        assert state.logits is not None
        assert np.array_equal(loaded.logits, state.logits)
        # and a lossless save of the same state does not fall back on the lossy pages
        store.save(node.id, state, FINGERPRINT, reason="pause")
        assert same_bits(store.load(node.id), state)


def test_a_state_whose_parts_disagree_cannot_be_built() -> None:
    state = make_snapshot(6)
    with pytest.raises(ValueError, match=r"latent page 1 is float32 \[2, 2, 10\] where float32 \[2, 3, 10\] belongs"):
        replace(state, position=7)
    with pytest.raises(ValueError, match="no next-token logits at position 6"):
        replace(state, logits=None)
    with pytest.raises(ValueError, match="some next-token logits at position 0"):
        replace(state, position=0, pages=())
    with pytest.raises(ValueError, match=r"kda is float64"):
        replace(state, kda=state.kda.astype(np.float64))
    with pytest.raises(ValueError, match="latent page 1 holds 2 of 4 rows"):
        replace(state, pages=(state.pages[0], replace(state.pages[1], identity=state.pages[0].identity)))


def test_a_snapshot_goes_with_its_node_only(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        node = make_node(5)
        store.record(node)
        with pytest.raises(ValueError, match="is at position 5, the snapshot at 4"):
            store.save(node.id, make_snapshot(4), FINGERPRINT, reason="pause")
        with pytest.raises(SnapshotMissing):
            store.load(node.id)
        with pytest.raises(SessionGone):
            store.save(new_id(), make_snapshot(4), FINGERPRINT, reason="pause")
        with pytest.raises(SessionGone):
            store.load(new_id())


def test_another_model_is_refused_by_field(tmp_path: Path) -> None:
    """B57: each model or option field is checked by name; passing no fingerprint is the explicit override."""
    state = make_snapshot(5)
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, state)
        values: dict[str, Any] = FINGERPRINT.as_json()
        for name in values:
            other = Fingerprint(**{**values, name: 3 if name == "experts_per_token" else "other"})
            if name in ("build", "simd"):
                assert same_bits(store.load(node.id, other), state)
                assert store.snapshot_info(node.id).fingerprint.build_differences(other) == [name]
            else:
                with pytest.raises(ModelMismatch, match=name) as caught:
                    store.load(node.id, other)
                assert caught.value.fields == (name,)
        assert same_bits(store.load(node.id, None), state)


def test_the_nearest_snapshot_is_found_up_the_parents(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        root = make_node(3)
        store.record(root)
        middle = saved(store, make_snapshot(5), root)
        leaf = make_node(2, middle)
        store.record(leaf)
        assert store.nearest_snapshot(leaf.id) == middle.id
        assert store.nearest_snapshot(root.id) is None
        assert store.ancestry(leaf.id) == [root.id, middle.id, leaf.id]
        assert [node.id for node in store.path(leaf.id)] == [root.id, middle.id, leaf.id]
        assert store.tokens(leaf.id).tolist() == list(range(7))
        assert store.children(root.id) == [middle.id]
        store.set_aside(middle.id, "its first step failed")
        assert store.nearest_snapshot(leaf.id) is None
        with pytest.raises(SnapshotCorrupt, match="its first step failed"):
            store.load(middle.id)


def test_nodes_come_back_as_recorded(tmp_path: Path) -> None:
    node = make_node(5)
    with Store.open(str(tmp_path / "s")) as store:
        store.record(node)
        with pytest.raises(ValueError, match="nodes never change"):
            store.record(node)
        with pytest.raises(ValueError, match="do not end at position"):
            store.record(replace(make_node(2, node), position=8))
        with pytest.raises(SessionGone):
            store.record(make_node(1, make_node(1)))
    with Store.open(str(tmp_path / "s")) as store:
        found = store.node(node.id)
        for name in type(node).__dataclass_fields__:
            assert np.array_equal(getattr(found, name), getattr(node, name)), name
        assert store.session_head(node.session_id) == node.id
        with pytest.raises(SessionGone):
            store.session_head(new_id())


def test_names_lead_to_nodes(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        first = saved(store, make_snapshot(3))
        second = saved(store, make_snapshot(5), first)
        store.tag("before the storm", first.id)
    with Store.open(str(tmp_path / "s")) as store:
        assert store.resolve(first.id) == first.id
        assert store.resolve(first.session_id) == second.id
        assert store.resolve("before the storm") == first.id
        store.tag("before the storm", second.id)
        assert store.tags() == {"before the storm": second.id}
        store.untag("before the storm")
        with pytest.raises(SessionGone):
            store.resolve("before the storm")
        assert store.sizes().file_bytes == files_bytes(tmp_path / "s")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "...", "a/b", "a\\b", "a\0", "x" * 300, "trailing ", "dot.", "../../etc/passwd", "Å", "A\u030a"],
)
def test_odd_names_touch_no_file(tmp_path: Path, name: str) -> None:
    """B72: a name that is no id is only ever looked up; as a tag it is refused or kept under a hash of itself."""
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, make_snapshot(3))
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SessionGone):
            store.resolve(name)
        for call in (store.load, store.node, store.delete, store.session_head, store.children):
            with pytest.raises(SessionGone):
                call(name)
        with pytest.raises(NameInvalid):
            replace(node, id=name)
        assert sorted(tmp_path.rglob("*")) == before
        try:
            store.tag(name, node.id)
        except NameInvalid:
            assert sorted(tmp_path.rglob("*")) == before
        else:
            assert store.tags() == {name: node.id}
            assert [len(file.name) for file in (tmp_path / "s" / "tags").iterdir()] == [64]


def test_ids_are_apart_in_any_case(tmp_path: Path) -> None:
    """B72: the same id in other letters is another name, and no node."""
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, make_snapshot(3))
        with pytest.raises(SessionGone):
            store.resolve(node.id.upper())
        with pytest.raises(NameInvalid, match="form of an id"):
            store.tag(new_id(), node.id)


def test_deletion_erases_data_and_metadata(tmp_path: Path) -> None:
    """B65: nothing of a deleted session is left in any file, the index and its log included."""
    secret = b"xyzzy-label"
    with Store.open(str(tmp_path / "s")) as store:
        kept = saved(store, make_snapshot(4))
        node = replace(make_node(5), label=secret.decode())
        store.record(node)
        store.save(node.id, make_snapshot(5, seed=8), FINGERPRINT, reason="pause")
        store.tag("xyzzy-tag", node.id)
        erased = store.delete_session(node.session_id)
        assert (erased.nodes, erased.snapshots) == (1, 1)
        assert store.sizes().file_bytes == files_bytes(tmp_path / "s")
        everything = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
        assert secret not in everything
        assert b"xyzzy-tag" not in everything
        assert node.id.encode() not in everything
        assert same_bits(store.load(kept.id), make_snapshot(4))


def test_what_others_continue_from_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        root = saved(store, make_snapshot(4))
        fork = replace(make_node(2, root), session_id=new_id())
        store.record(fork)
        with pytest.raises(NodeInUse):
            store.delete(root.id)
        store.delete_session(root.session_id)
        assert store.tokens(fork.id).tolist() == list(range(6))
        assert not store.has_snapshot(root.id)
        with monkeypatch.context() as watched:  # a server asks every second, of each that others still stand on
            watched.setattr(Store, "sizes", lambda self: pytest.fail("the whole store is counted for nothing"))
            assert store.delete_session(root.session_id) == Erased(0, 0, 0)
        store.delete(fork.id)
        store.delete(root.id)
        assert store.sizes().nodes == 0
        assert files_bytes(tmp_path / "s") == 0


def test_what_could_not_go_with_its_session_goes_when_that_is_asked_for_again(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")) as store:
        root = saved(store, make_snapshot(4))
        store.record(replace(make_node(2, root), session_id=new_id()))
        with store._pins.held() as pin:
            for name in parts_of(store, root.id):
                pin(name)
            store.delete_session(root.session_id)
            assert any((tmp_path / "s" / "parts").glob("*/*"))
        assert store.delete_session(root.session_id) == Erased(0, 0, 0)
        assert not any((tmp_path / "s" / "parts").glob("*/*"))


def test_shared_parts_outlive_one_of_their_users(tmp_path: Path) -> None:
    state = make_snapshot(8)
    with Store.open(str(tmp_path / "s")) as store:
        one, two = saved(store, state), saved(store, state)
        store.delete(one.id)
        assert same_bits(store.load(two.id), state)
        store.drop_snapshot(two.id)
        assert store.sizes().parts == 0
        assert store.tokens(two.id).tolist() == list(range(8))


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "s"))
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.sessions()


def test_snapshot_values_are_not_aliased(tmp_path: Path) -> None:
    """Two loads of one snapshot are two states."""
    state = make_snapshot(5)
    with Store.open(str(tmp_path / "s")) as store:
        node = saved(store, state)
        first: Snapshot = store.load(node.id)
        first.kda[:] = 0
        assert same_bits(store.load(node.id), state)


@pytest.mark.parametrize("smooth", [False, True], ids=["noise", "what shrinks"])
def test_whether_packing_pays_is_tried_once_for_pages_of_noise(
    smooth: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried for each, a fifth of the time it takes to save a state of many small pages."""
    tried: list[int] = []
    pays = codec._pays

    def noted(data: Sequence[codec.Bytes], item_bytes: int) -> bool:
        tried.append(item_bytes)
        return pays(data, item_bytes)

    monkeypatch.setattr(codec, "_pays", noted)
    state = make_snapshot(40, smooth=smooth)
    with Store.open(str(tmp_path / "s"), threads=1) as store:
        node = saved(store, state)
        assert same_bits(store.load(node.id), state)
    assert len(state.pages) == 10
    assert (len(tried) == 3) is not smooth
