"""Opening a model's experts."""

import logging
from pathlib import Path

import numpy as np
import pytest

from serai.runtime.experts.access import ResidentExperts
from serai.runtime.experts.opening import open_experts, whole_working_sets
from serai.runtime.experts.streamed import StreamedExperts
from tests.runtime.experts.packing import K3, opened, written


def test_experts_are_all_in_memory_unless_slots_are_fewer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(written(tmp_path / "m", K3)) as found:
        counted: list[tuple[int, int]] = []
        for slots in (None, 10, 99):
            experts = open_experts(
                found.config, found.files, found.prefix, slots, progress=lambda *done: counted.append(done)
            )
            assert isinstance(experts, ResidentExperts)
            assert experts.nbytes == 10 * experts.layout.record_bytes
            experts.close()
        assert counted[-1] == (10, 10)
        streamed = open_experts(found.config, found.files, found.prefix, 9, reads_in_flight=3)
        assert isinstance(streamed, StreamedExperts)
        assert (streamed.cache.slots, streamed.reader.threads) == (9, 3)
        streamed.close()
        assert not caplog.records


def test_reads_in_flight_are_measured_unless_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(written(tmp_path / "m", K3)) as found, caplog.at_level(logging.INFO):
        experts = open_experts(found.config, found.files, found.prefix, 2)
        assert isinstance(experts, StreamedExperts)
        assert experts.reader.threads in (1, 2)
        assert "reads in flight (GB/s by number: 2: " in caplog.text
        visit = experts.visit(1, np.array([0, 4], dtype=np.int32), 2)
        while not visit.finished:
            if visit.take() is None:
                visit.wait(30)
        visit.close()
        experts.check()
        experts.close()


def test_a_cache_is_whole_working_sets_where_there_is_one() -> None:
    assert [whole_working_sets(slots, 100) for slots in (7, 99, 100, 250)] == [7, 99, 100, 200]
