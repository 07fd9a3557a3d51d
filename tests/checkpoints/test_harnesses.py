"""The harnesses that break stores on purpose find nothing, and would find something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serai.checkpoints import Store
from serai.checkpoints.harness import fuzzing
from serai.checkpoints.harness.power import Unsynced

ENVIRONMENT = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process that forks should have no other threads


def faults(folder: Path, *arguments: str, before: str = "") -> dict[str, object]:
    script = f"{before}\nimport sys; from serai.checkpoints.harness import faults; sys.exit(faults.main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "--dir", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert done.stdout, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert done.returncode == int(found["faults_lost"] != 0)
    return found


def test_no_fault_loses_anything(tmp_path: Path) -> None:
    """B60, B61, B62, B64: a sample of all calls and faults; run as a module the harness tries them all."""
    found = faults(tmp_path, "--every", "53")
    assert found["problems"] == []
    assert isinstance(found["faults_injected"], int)
    assert found["faults_injected"] > 30


@pytest.mark.parametrize(
    ("mistake", "work", "every"),
    [
        (
            "from serai.checkpoints.files.parts import PartFiles; PartFiles.sync = lambda self, hashes: None",
            "save",
            "23",
        ),
        (
            "from serai.checkpoints.store_folder import StoreFolder; StoreFolder._sweep = lambda self: None",
            "save",
            "23",
        ),
    ],
    ids=["no folder fsync", "no unlinking"],
)
def test_a_store_with_a_mistake_is_caught(tmp_path: Path, mistake: str, work: str, every: str) -> None:
    assert faults(tmp_path, "--only", work, "--every", every, before=mistake)["faults_lost"] != 0


def test_no_change_to_a_file_escapes(tmp_path: Path) -> None:
    """B58, B67, B69: a sample; `python -m serai.checkpoints.harness.fuzzing` goes on for 20,000 files."""
    report = fuzzing.run(tmp_path, files=400, seed=3)
    assert report.escapes == ()
    assert report.refused > 200


def test_a_reader_without_hashes_would_be_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "same_bits", lambda one, other: False)
    assert len(fuzzing.run(tmp_path, files=300, seed=3).escapes) > 0


def test_a_power_cut_takes_back_what_was_not_synced(tmp_path: Path) -> None:
    unsynced = Unsynced()
    (tmp_path / "kept").write_bytes(b"1")
    (tmp_path / "gone").write_bytes(b"2")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        unsynced.unlinking("gone", folder)
        (tmp_path / "gone").unlink()
        with (tmp_path / "new").open("wb", buffering=0) as file:
            file.write(b"3")
            unsynced.wrote(file.fileno())
        unsynced.renaming("new", "renamed", folder, folder)
        (tmp_path / "new").rename(tmp_path / "renamed")
        (tmp_path / "other").write_bytes(b"4")
        unsynced.renaming("other", "kept", folder, folder)
        (tmp_path / "other").rename(tmp_path / "kept")
        unsynced.cut_power()
    finally:
        os.close(folder)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"kept": b"1", "gone": b"2"}


def test_the_harnesses_leave_no_store_behind(tmp_path: Path) -> None:
    assert fuzzing.main(["--files", "5", "--dir", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []
    Store.open(str(tmp_path / "s")).close()
