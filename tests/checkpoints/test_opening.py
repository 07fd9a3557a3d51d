"""What is opened as a store, and by whom: private folders, one owner, readers beside it, an index that is lost."""

import os
import stat
from pathlib import Path

import pytest

from serai.checkpoints import Store
from serai.checkpoints.errors import (
    SessionGone,
    StoreBusy,
    StoreFailed,
    StoreInvalid,
)
from tests.checkpoints.samples import FINGERPRINT, all_files, make_node, make_snapshot, same_bits, saved


def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    """B73: 0600 and 0700 from the moment they exist, the index included."""
    former = os.umask(0)
    try:
        with Store.open(str(tmp_path / "s")) as store:
            saved(store, make_snapshot(5))
            store.tag("x", store.sessions()[0].head_id)
            for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
                mode = stat.S_IMODE(path.stat().st_mode)
                assert mode == (0o700 if path.is_dir() else 0o600), path
            fd = store._folders.temporary.disk.create("new", folder=store._folders.temporary.fd)
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
            os.close(fd)
    finally:
        os.umask(former)


def test_folders_that_others_may_change_are_refused(tmp_path: Path) -> None:
    """B73: group- or world-writable folders, and another user's, are refused with the way to mend it."""
    folder = tmp_path / "s"
    Store.open(str(folder)).close()
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(StoreInvalid, match="chmod go-w"):
            Store.open(str(folder))
    folder.chmod(0o755)
    Store.open(str(folder)).close()
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
        with pytest.raises(StoreInvalid, match="belongs to user 12345"):
            Store.open(str(folder))


def test_only_stores_are_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreInvalid, match="no such folder"):
        Store.open(str(tmp_path / "none"), create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreInvalid, match="is no folder"):
        Store.open(str(tmp_path / "file"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("x")
    with pytest.raises(StoreInvalid, match="no serai store"):
        Store.open(str(tmp_path / "home"))
    assert [file.name for file in (tmp_path / "home").iterdir()] == ["thesis.txt"]


def test_a_lost_or_broken_index_is_named_with_its_remedy(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        saved(store, make_snapshot(5))
    (folder / "index.sqlite").write_bytes(b"not a database, surely not one at all" * 100)
    with pytest.raises(StoreInvalid, match="fsck --rebuild"):
        Store.open(str(folder))
    (folder / "index.sqlite").unlink()
    with pytest.raises(StoreInvalid, match="fsck --rebuild"):
        Store.open(str(folder))


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    with Store.open(str(tmp_path / "s")), pytest.raises(StoreBusy, match=str(os.getpid())):
        Store.open(str(tmp_path / "s"))
    Store.open(str(tmp_path / "s")).close()


def test_a_store_is_read_beside_its_writer(tmp_path: Path) -> None:
    """A second process may look, sees what is committed, and can change nothing."""
    folder = str(tmp_path / "s")
    with pytest.raises(StoreInvalid):
        Store.open(folder, read_only=True)
    assert list(tmp_path.iterdir()) == []
    with Store.open(folder) as store:
        node = saved(store, make_snapshot(5))
        with Store.open(folder, read_only=True) as reader:
            assert same_bits(reader.load(node.id, FINGERPRINT), make_snapshot(5))
            later = saved(store, make_snapshot(8), node)
            assert same_bits(reader.load(later.id), make_snapshot(8))
            assert [session.head_id for session in reader.sessions()] == [later.id]
            before = all_files(tmp_path / "s")
            for change in (
                lambda: reader.record(make_node(3)),
                lambda: reader.save(later.id, make_snapshot(8, seed=2), FINGERPRINT, reason="x"),
                lambda: reader.delete(later.id),
                lambda: reader.tag("x", later.id),
                lambda: reader.set_aside(later.id, "x"),
            ):
                with pytest.raises(StoreFailed):
                    change()
            assert all_files(tmp_path / "s") == before
            store.delete(later.id)
            with pytest.raises(SessionGone):
                reader.load(later.id)
    with Store.open(folder, read_only=True) as reader:
        assert same_bits(reader.load(node.id), make_snapshot(5))
