"""`serai info --io`: what is measured, within which bounds, and what is left behind."""

import errno
import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from serai.runtime.errors import BadParameter
from serai.runtime.experts.cache import PAGE_BYTES
from serai.runtime.experts.calibrate import TRIED, rate_of
from serai.runtime.experts.disk import DiskCalls, ReadMode
from serai.runtime.experts.disk_speed import BLOCK_BYTES, SEQUENTIAL_TRIED, measure_disk
from tests.runtime.experts.faults import NoDirect

MB = 1 << 20
runner = CliRunner()


class Counting(DiskCalls):
    """Notes where reads begin and how long they are."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []

    def read(self, descriptor: int, out: memoryview, offset: int) -> int:
        self.reads.append((offset, len(out)))
        return super().read(descriptor, out, offset)


def test_blocks_are_read_in_order_and_records_at_random_and_the_file_is_gone(tmp_path: Path) -> None:
    calls, told = Counting(), list[str]()
    found = measure_disk(tmp_path, record_bytes=MB + 1, probe_bytes=40 * MB, try_s=0.01, tell=told.append, calls=calls)
    assert list(tmp_path.iterdir()) == []
    assert found.record_bytes == MB + PAGE_BYTES
    assert found.file_bytes == 39 * found.record_bytes <= 40 * MB
    assert [count for count, _ in found.sequential] == list(SEQUENTIAL_TRIED)
    assert [count for count, _ in found.random.tried] == list(TRIED)
    assert min(rate for _, rate in (*found.sequential, *found.random.tried)) > 0
    assert found.write_bytes_per_s > 0
    assert len(told) == 3
    blocks = [offset for offset, nbytes in calls.reads if nbytes == BLOCK_BYTES]
    assert blocks[0] == 0
    assert sorted(set(blocks))[:3] == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
    records = [offset for offset, nbytes in calls.reads if nbytes == found.record_bytes]
    assert len(records) >= sum(TRIED)  # one each in flight, however slow the disk
    assert all(offset % found.record_bytes == 0 for offset in records)
    assert records != sorted(records)
    json.dumps(found.to_json(), allow_nan=False)


def test_buffered_reads_are_measured_as_such(tmp_path: Path) -> None:
    calls = NoDirect(at_open=True)
    assert (
        measure_disk(tmp_path, record_bytes=MB, probe_bytes=8 * MB, try_s=0.01, calls=calls).mode is ReadMode.BUFFERED
    )
    assert calls.forgotten


def test_a_folder_that_can_not_be_measured_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="name a folder that exists"):
        measure_disk(tmp_path / "nowhere")
    with pytest.raises(BadParameter, match="two reads of 8,388,608 are needed; name another folder"):
        measure_disk(tmp_path, record_bytes=8 * MB, probe_bytes=9 * MB)
    with pytest.raises(BadParameter, match="at least 1 byte, not 0"):
        measure_disk(tmp_path, record_bytes=0)

    class Broken(DiskCalls):
        def read(self, descriptor: int, out: memoryview, offset: int) -> int:
            if len(out) == MB:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(descriptor, out, offset)

    with pytest.raises(BadParameter, match="Input/output error"):
        measure_disk(tmp_path, record_bytes=MB, probe_bytes=8 * MB, try_s=0.01, calls=Broken())
    assert list(tmp_path.iterdir()) == []


def test_every_reader_is_called_and_what_one_raises_is_raised() -> None:
    called: list[int] = []

    def reader(number: int) -> int:
        called.append(number)
        return 5

    assert rate_of([lambda: reader(1), lambda: reader(2)], 0.0) > 0
    assert sorted(called) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        rate_of([lambda: reader(1), lambda: 1 // 0], 0.0)


def test_the_command_prints_it_and_says_what_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(measure_disk, probe_bytes=8 * MB, try_s=0.01)
    monkeypatch.setattr("serai.runtime.experts.disk_speed.measure_disk", small)
    arguments = ["info", "--io", "--dir", str(tmp_path), "--io-size", "2MiB"]
    result = runner.invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    disk = json.loads(result.stdout)["io"]
    assert disk["record_bytes"] == 2 * MB
    assert disk["bytes_per_s"] in [one["bytes_per_s"] for one in disk["random"]]
    assert "io" not in json.loads(runner.invoke(app, ["info", "--json"]).stdout)
    refused = runner.invoke(app, ["info", "--io", "--dir", str(tmp_path / "nowhere")])
    assert refused.exit_code == 1
    assert "name a folder that exists" in refused.stderr
