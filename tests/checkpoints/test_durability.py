"""Saves are whole or absent, on disks that are full, failing, slow, short of bytes or switched off."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from serai.checkpoints import NodeRecord, Packing, SaveReport, Store
from serai.checkpoints.errors import (
    SnapshotCorrupt,
    StoreBusy,
    StoreClosed,
    StoreFailed,
    StoreFull,
)
from serai.checkpoints.upkeep.fsck import fsck
from tests.checkpoints.disks import FailingDisk, ShortDisk, TracingDisk, WaitingDisk, eventually
from tests.checkpoints.samples import FINGERPRINT, all_files, make_node, make_snapshot, same_bits, saved


def test_success_is_told_after_write_fsync_rename_and_folder_fsync(tmp_path: Path) -> None:
    """B62: that order for every file, and the manifest last."""
    disk = TracingDisk()
    with Store.open(str(tmp_path / "s"), disk=disk) as store:
        node = make_node(9)
        store.record(node)
        disk.calls.clear()
        store.save(node.id, make_snapshot(9), FINGERPRINT, reason="pause")
    renames = [(place, target) for place, (call, target) in enumerate(disk.calls) if call == "rename"]
    assert len(renames) == 1 + 3 + 1 + 1
    for place, target in renames:
        temporary, final = target.split(" -> ")
        before = [call for call, name in disk.calls[:place] if name == temporary]
        assert before[0] == "create"
        assert before[-1] == "fsync"
        assert "write" in before
        assert ("fsync", final.split("/")[0]) in disk.calls[place:]
    named, _ = renames[-1]
    part_folders = {target.split(" -> ")[1].split("/")[0] for _, target in renames} - {"manifests"}
    for folder in {*part_folders, "parts"}:
        assert max(place for place, call in enumerate(disk.calls) if call == ("fsync", folder)) < named
    assert disk.calls[-1] == ("fsync", "manifests")


def test_a_manifest_settles_with_the_parts(tmp_path: Path) -> None:
    """A flush of the disk is most of what a small save takes, and one more after that of the parts is one too many."""
    disk = TracingDisk()
    with Store.open(str(tmp_path / "s"), disk=disk) as store:
        node = make_node(9)
        store.record(node)
        disk.calls.clear()
        store.save(node.id, make_snapshot(9), FINGERPRINT, reason="pause")
    folders = {name.split(" -> ")[1].split("/")[0] for call, name in disk.calls if call == "rename"} | {"parts"}
    synced = [place for place, call in enumerate(disk.calls) if call[0] == "fsync"]
    first_folder = next(place for place in synced if disk.calls[place][1] in folders)
    temporary = [disk.calls[place][1] for place in synced if disk.calls[place][1] not in folders]
    assert len(temporary) == 3 + 1 + 1 + 1
    assert all(disk.calls.index(("fsync", name)) < first_folder for name in temporary)


@pytest.mark.parametrize("packing", Packing)
def test_short_writes_and_reads_are_continued(tmp_path: Path, packing: Packing) -> None:
    """B64, B123: a disk that moves 100 bytes at a time is slow, nothing else."""
    with Store.open(str(tmp_path / "s"), disk=ShortDisk(100)) as store:
        node = make_node(9)
        store.record(node)
        store.save(node.id, make_snapshot(9, smooth=True), FINGERPRINT, reason="pause", packing=packing)
        assert same_bits(store.load(node.id), make_snapshot(9, smooth=True))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_failed_save_leaves_what_was_there(tmp_path: Path, call: str, code: int, after: int) -> None:
    """B61, B64, B73: no space, a bad or a read-only disk: a clear error, no file left, the former snapshot whole."""
    disk = FailingDisk(call, code, after=after)
    disk.broken = False
    folder = tmp_path / "s"
    with Store.open(str(folder), disk=disk) as store:
        former, other = make_snapshot(9), make_snapshot(9, seed=5)
        node = saved(store, former)
        before = all_files(folder)
        disk.broken = True
        expected = StoreFull if code in (errno.ENOSPC, errno.EDQUOT) else StoreFailed
        with pytest.raises(expected, match="is intact"):
            store.save(node.id, other, FINGERPRINT, reason="pause")
        disk.broken = False
        assert all_files(folder) == before
        assert store.sizes().snapshots == 1
        assert same_bits(store.load(node.id), former)
        store.save(node.id, other, FINGERPRINT, reason="pause")
        assert same_bits(store.load(node.id), other)


@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
def test_a_node_that_could_not_be_recorded_is_not_there(tmp_path: Path, call: str) -> None:
    disk = FailingDisk(call)
    disk.broken = False
    with Store.open(str(tmp_path / "s"), disk=disk) as store:
        disk.broken = True
        node = make_node(3)
        with pytest.raises(StoreFull):
            store.record(node)
        disk.broken = False
        assert all_files(tmp_path / "s") == set()
        assert store.sessions() == []
        store.record(node)
        assert store.tokens(node.id).tolist() == [0, 1, 2]


def test_a_full_disk_is_an_error_and_room_is_enough_to_go_on(tmp_path: Path) -> None:
    """B61: on a real file system of 1 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]).returncode:
        pytest.skip("needs the right to mount a 1 MiB tmpfs; the same is tested with injected ENOSPC")
    try:
        with Store.open(str(mount / "s")) as store:
            small = make_snapshot(9)
            node = saved(store, small)
            ballast = mount / "ballast"
            ballast.write_bytes(bytes((mount.stat().st_blksize * os.statvfs(mount).f_bavail) - 65536))
            later = make_node(400, node)
            store.record(later)
            before = all_files(mount / "s")
            with pytest.raises(StoreFull):
                store.save(later.id, make_snapshot(409), FINGERPRINT, reason="pause")
            assert all_files(mount / "s") == before
            assert same_bits(store.load(node.id), small)
            ballast.unlink()
            store.save(later.id, make_snapshot(409), FINGERPRINT, reason="pause")
            assert same_bits(store.load(later.id), make_snapshot(409))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_reading_errors_are_no_damage(tmp_path: Path) -> None:
    """A disk that fails to read is told as that, and the snapshot is used again when it has recovered."""
    disk = FailingDisk("read", errno.EIO)
    disk.broken = False
    with Store.open(str(tmp_path / "s"), disk=disk) as store:
        node = saved(store, make_snapshot(5))
        disk.broken = True
        with pytest.raises(StoreFailed, match="loading node"):
            store.load(node.id)
        disk.broken = False
        assert same_bits(store.load(node.id), make_snapshot(5))


def test_a_snapshot_being_written_is_not_seen(tmp_path: Path) -> None:
    """B66: while a save hangs, readers get the former snapshot, whole."""
    disk = WaitingDisk()
    with Store.open(str(tmp_path / "s"), disk=disk) as store:
        former, later = make_snapshot(6), make_snapshot(6, seed=4)
        node = saved(store, former)
        reports: list[SaveReport] = []
        disk.armed = True
        saver = threading.Thread(target=lambda: reports.append(store.save(node.id, later, FINGERPRINT, reason="pause")))
        saver.start()

        def meanwhile() -> None:
            try:
                assert disk.reached.wait(30)
                assert same_bits(store.load(node.id), former)
            finally:
                disk.armed = False
                disk.go.set()

        eventually(saver, meanwhile)
        assert len(reports) == 1
        assert same_bits(store.load(node.id), later)


def test_closing_waits_for_what_is_running(tmp_path: Path) -> None:
    disk = WaitingDisk()
    store = Store.open(str(tmp_path / "s"), disk=disk)
    node = make_node(6)
    store.record(node)
    disk.armed = True
    reports: list[SaveReport] = []
    saver = threading.Thread(
        target=lambda: reports.append(store.save(node.id, make_snapshot(6), FINGERPRINT, reason="pause"))
    )
    saver.start()
    assert disk.reached.wait(30)
    closer = threading.Thread(target=store.close)
    closer.start()

    def meanwhile() -> None:
        try:
            closer.join(0.05)
            assert closer.is_alive()
            with pytest.raises(StoreClosed):
                store.record(make_node(3))
        finally:
            disk.go.set()

    eventually(saver, meanwhile)
    closer.join(30)
    assert len(reports) == 1
    with Store.open(str(tmp_path / "s")) as again:
        assert same_bits(again.load(node.id), make_snapshot(6))


@pytest.mark.parametrize("files_before", [0, 1], ids=["before the pages", "after the pages"])
def test_pages_a_save_counts_on_survive_a_deletion(tmp_path: Path, files_before: int) -> None:
    """The only snapshot with some pages is erased while another that shares them is being written."""
    disk = WaitingDisk(files_before)
    with Store.open(str(tmp_path / "s"), disk=disk, threads=1) as store:
        state = make_snapshot(8)
        node = saved(store, state)
        other = make_node(8)
        store.record(other)
        sharing = replace(make_snapshot(8, seed=3), pages=state.pages)
        disk.armed = True
        saver = threading.Thread(target=lambda: store.save(other.id, sharing, FINGERPRINT, reason="pause"))
        saver.start()

        def meanwhile() -> None:
            try:
                assert disk.reached.wait(30)
                store.delete(node.id)
            finally:
                disk.armed = False
                disk.go.set()

        eventually(saver, meanwhile)
        assert same_bits(store.load(other.id), sharing)
        assert store.sizes().file_bytes == sum(
            (tmp_path / "s" / name).stat().st_size for name in all_files(tmp_path / "s")
        )


@pytest.mark.parametrize("packing", [Packing.AUTO, Packing.SMALL])
def test_what_another_namespace_is_writing_at_the_moment_is_written_once_more(tmp_path: Path, packing: Packing) -> None:
    """A save tells its tenant the same, whatever others do meanwhile, and each has what it saved when the other's is
    erased."""
    with Store.open(str(tmp_path / "alone")) as store:
        alone = make_node(8)
        store.record(alone)
        told = store.save(alone.id, make_snapshot(8), FINGERPRINT, reason="pause", packing=packing)
    disk = WaitingDisk(told.parts_new - 1)
    with Store.open(str(tmp_path / "s"), disk=disk, threads=3) as store:
        nodes = [replace(make_node(8), namespace=name) for name in ("a", "b")]
        store.record(*nodes)
        reports: dict[str, SaveReport] = {}

        def save(node: NodeRecord) -> None:
            state = make_snapshot(8)
            reports[node.namespace] = store.save(node.id, state, FINGERPRINT, reason="pause", packing=packing)

        savers = [threading.Thread(target=save, args=(node,)) for node in nodes]
        disk.armed = True
        savers[0].start()
        assert disk.reached.wait(30)
        disk.armed = False
        savers[1].start()
        deadline = time.monotonic() + 30
        while not any(part.namespace == "b" for part in store._pins.written.values()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        disk.go.set()
        for saver in savers:
            saver.join(30)
        for name in ("a", "b"):
            assert (reports[name].parts_new, reports[name].parts_shared) == (told.parts_new, 0)
            assert reports[name].new_raw_bytes == told.new_raw_bytes
        store.delete(nodes[0].id)
        assert same_bits(store.load(nodes[1].id), make_snapshot(8))
        report = fsck(store)
        assert report.clean
        assert report.orphans == ()


SAVER = """
import sys
from tests.checkpoints.samples import FINGERPRINT, all_files, make_snapshot
from serai.checkpoints import Store
store = Store.open(sys.argv[1])
print("open", flush=True)
seed = 1
while True:
    store.save(sys.argv[2], make_snapshot(40, seed=seed), FINGERPRINT, reason="pause")
    seed += 1
    print(seed, flush=True)
"""


def test_a_killed_process_leaves_one_whole_snapshot_and_no_lock(disk_path: Path) -> None:
    """B60: kill -9 at odd moments of saving over a snapshot; one of them loads, rests are swept, the lock is free."""
    folder = disk_path / "s"
    with Store.open(str(folder)) as store:
        node = saved(store, make_snapshot(40))
    for round_number in range(3):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, str(folder), node.id], stdout=subprocess.PIPE, text=True)
        assert saver.stdout is not None
        with saver.stdout:
            for _ in range(2 + round_number):
                assert saver.stdout.readline()
            with pytest.raises(StoreBusy, match=f"process {saver.pid};"):
                Store.open(str(folder))
            saver.send_signal(signal.SIGKILL)
            saver.wait()
        (folder / "tmp" / "left-over.tmp").write_bytes(b"x")
        with Store.open(str(folder)) as store:
            found = store.load(node.id)
            assert any(same_bits(found, make_snapshot(40, seed=seed)) for seed in range(8 + round_number))
            assert list((folder / "tmp").iterdir()) == []


def test_many_threads_save_and_load_at_once(tmp_path: Path) -> None:
    """B70: two hundred rounds in all; no compressor is shared, no file is mixed up."""
    failures: list[BaseException] = []
    with Store.open(str(tmp_path / "s"), threads=8) as store:

        def work(seed: int) -> None:
            try:
                state = make_snapshot(6, seed=seed, smooth=True)
                node = saved(store, state)
                for number in range(25):
                    assert same_bits(store.load(node.id), state)
                    state = make_snapshot(6, seed=seed + 8 * number, smooth=True)
                    store.save(node.id, state, FINGERPRINT, reason="pause", packing=Packing.SMALL)
            except BaseException as error:  # noqa: BLE001 - handed to the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert store.sizes().snapshots == 8


def test_damage_is_told_even_when_it_cannot_be_noted(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with Store.open(str(folder)) as store:
        node = saved(store, make_snapshot(5))
    file = next(file for file in (folder / "parts").rglob("*") if file.is_file())
    file.write_bytes(bytes(file.stat().st_size))
    with Store.open(str(folder), read_only=True) as reader, pytest.raises(SnapshotCorrupt):
        reader.load(node.id)
