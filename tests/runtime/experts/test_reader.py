"""The threads that read experts."""

import os
from pathlib import Path

import numpy as np
import pytest

from serai.runtime.experts.cache import aligned_bytes
from serai.runtime.experts.disk import DiskCalls
from serai.runtime.experts.errors import ExpertUnreadable
from serai.runtime.experts.reader import Ended, ExpertReader, Rank, Read
from tests.runtime.experts.faults import FailingReads, GatedReads, ShortReads
from tests.runtime.experts.records import LAYOUT, RecordFile, expected_record


def read_of(layer: int, expert: int, slot: int) -> Read:
    return Read(layer, expert, slot, aligned_bytes(LAYOUT.record_bytes))


def collect(reader: ExpertReader, count: int) -> list[Ended]:
    ended: list[Ended] = []
    while len(ended) < count:
        assert reader.wait(30)
        ended += reader.collect()
    assert len(ended) == count
    return ended


@pytest.mark.parametrize("calls", [DiskCalls(), ShortReads(1000)], ids=["whole", "short"])
def test_records_arrive_as_they_are_in_the_file(tmp_path: Path, calls: DiskCalls) -> None:
    reader = ExpertReader(RecordFile(tmp_path, calls), 3)
    reader.post([read_of(layer, expert, 10 * layer + expert) for layer in (1, 2) for expert in range(8)])
    for ended in collect(reader, 16):
        assert ended.error is None
        assert np.array_equal(ended.read.record, expected_record(ended.read.layer, ended.read.expert))
    counters = reader.counters
    assert (counters.reads, counters.read_bytes, counters.failed) == (16, 16 * LAYOUT.record_bytes, 0)
    assert counters.reading_s > 0
    reader.close()


def test_nothing_to_collect_is_no_error(tmp_path: Path) -> None:
    reader = ExpertReader(RecordFile(tmp_path), 1)
    assert reader.collect() == []
    assert reader.wait(0.0) is False
    reader.close()


def test_a_read_that_fails_once_is_made_again(tmp_path: Path) -> None:
    calls = FailingReads(lambda number: number == 0)
    reader = ExpertReader(RecordFile(tmp_path, calls), 1)
    calls.armed = True
    reader.post([read_of(1, 3, 0)])
    (ended,) = collect(reader, 1)
    assert ended.error is None
    assert np.array_equal(ended.read.record, expected_record(1, 3))
    assert (reader.counters.retries, reader.counters.failed) == (1, 0)
    reader.close()


def test_a_read_that_fails_twice_names_file_layer_and_expert(tmp_path: Path) -> None:
    calls = FailingReads(lambda number: number < 2)
    reader = ExpertReader(RecordFile(tmp_path, calls), 1)
    calls.armed = True
    reader.post([read_of(2, 5, 0), read_of(2, 6, 1)])
    failed, after = collect(reader, 2)
    assert isinstance(failed.error, ExpertUnreadable)
    assert str(failed.error) == (
        f"expert 5 of layer 2 can't be read: {tmp_path / 'records'} failed with Input/output error, twice; restore the "
        "file, then resume the session"
    )
    assert (failed.error.layer, failed.error.expert, failed.error.path) == (2, 5, tmp_path / "records")
    assert isinstance(failed.error.__cause__, OSError)
    assert after.error is None
    reader.close()


def test_a_cut_file_is_not_read_twice(tmp_path: Path) -> None:
    """B25."""
    source = RecordFile(tmp_path)
    os.truncate(source.file, LAYOUT.record_bytes)
    reader = ExpertReader(source, 1)
    reader.post([read_of(1, 0, 0), read_of(2, 0, 1)])
    good, cut = collect(reader, 2)
    assert good.error is None
    assert isinstance(cut.error, ExpertUnreadable)
    assert f"ended at {LAYOUT.record_bytes:,} of {9 * LAYOUT.record_bytes:,} bytes" in str(cut.error)
    assert reader.counters.retries == 0
    reader.close()


def test_wanted_reads_go_before_later_ones_and_guesses_and_promoted_ones_in_between(tmp_path: Path) -> None:
    calls = GatedReads()
    reader = ExpertReader(RecordFile(tmp_path, calls), 1)
    calls.armed = True
    reader.post([read_of(1, 0, 0)])
    assert calls.waiting.acquire(timeout=30)  # the only reader is busy now
    reader.post([read_of(1, expert, expert) for expert in (1, 2, 3)], Rank.GUESSED)
    reader.post([read_of(1, 4, 4), read_of(1, 5, 5)], Rank.LATER)
    reader.post([read_of(1, 6, 6)])
    reader.promote([2, 5, 99])
    reader.promote([2, 3], Rank.LATER)
    calls.gate.set()
    assert [ended.read.slot for ended in collect(reader, 7)] == [0, 6, 2, 5, 4, 3, 1]
    reader.close()


def test_only_reads_not_begun_can_be_cancelled(tmp_path: Path) -> None:
    calls = GatedReads()
    reader = ExpertReader(RecordFile(tmp_path, calls), 1)
    calls.armed = True
    reader.post([read_of(1, 0, 0)])
    assert calls.waiting.acquire(timeout=30)
    reader.post([read_of(1, 1, 1)], Rank.GUESSED)
    reader.post([read_of(1, 2, 2)])
    assert sorted(reader.cancel([0, 1, 2, 7])) == [1, 2]
    calls.gate.set()
    assert [ended.read.slot for ended in collect(reader, 1)] == [0]
    reader.close()


def test_as_many_reads_are_in_flight_as_there_are_threads(tmp_path: Path) -> None:
    calls = GatedReads()
    reader = ExpertReader(RecordFile(tmp_path, calls), 3)
    calls.armed = True
    reader.post([read_of(1, expert, expert) for expert in range(5)])
    for _ in range(3):
        assert calls.waiting.acquire(timeout=30)
    assert not calls.waiting.acquire(blocking=False)
    calls.gate.set()
    collect(reader, 5)
    reader.close()


def test_closing_drops_what_waits_and_ends_the_threads(tmp_path: Path) -> None:
    reader = ExpertReader(RecordFile(tmp_path), 2)
    reader.post([read_of(1, expert, expert) for expert in range(8)])
    reader.close()
    assert all(not thread.is_alive() for thread in reader._threads)


def test_a_mistake_of_ours_is_handed_over_as_it_is(tmp_path: Path) -> None:
    reader = ExpertReader(RecordFile(tmp_path), 1)
    reader.post([Read(1, 0, 0, np.empty(10, np.uint8))])
    (ended,) = collect(reader, 1)
    assert isinstance(ended.error, ValueError)
    reader.close()
