"""How many reads are kept in flight."""

import os
from pathlib import Path

import pytest

from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.calibrate import Calibration, calibrate, choose
from serai.runtime.experts.disk import ReadMode
from serai.runtime.experts.errors import FileEnded
from tests.runtime.experts.records import LAYOUT, RecordFile


def test_the_smallest_number_that_is_nearly_best_is_chosen() -> None:
    assert choose([(1, 1.0), (2, 1.9), (4, 2.0), (8, 1.99)]) == 2
    assert choose([(1, 1.0), (2, 1.5), (4, 2.0)]) == 4
    assert choose([(1, 5.0), (2, 4.0)]) == 1


def test_what_was_tried_is_told() -> None:
    found = Calibration(2, ((1, 1.5e9), (2, 2.9e9)), ReadMode.DIRECT)
    assert str(found) == "2 direct reads in flight (GB/s by number: 1: 1.50, 2: 2.90)"
    assert found.bytes_per_s == 2.9e9


def test_no_more_threads_are_tried_than_there_is_memory_for(tmp_path: Path) -> None:
    source = RecordFile(tmp_path)
    found = calibrate(source, [aligned_bytes(LAYOUT.record_bytes) for _ in range(10)], try_s=0.005)
    assert [count for count, _ in found.tried] == [8, 10]
    assert found.bytes_per_s > 0
    assert found.mode is source.mode
    source.close()


def test_a_disk_that_fails_is_not_a_slow_one(tmp_path: Path) -> None:
    source = RecordFile(tmp_path)
    os.truncate(source.file, 0)
    with pytest.raises(FileEnded):
        calibrate(source, [aligned_bytes(LAYOUT.record_bytes)], try_s=0.005)
    source.close()
