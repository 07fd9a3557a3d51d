"""Opens a model's experts: all in memory when they fit, streamed otherwise."""

import logging
from collections.abc import Callable

from serai.runtime.experts.access import Experts, ResidentExperts
from serai.runtime.experts.cache import aligned_records
from serai.runtime.experts.calibrate import TRIED, calibrate
from serai.runtime.experts.source import open_source
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.memory.plan import READING_RECORDS
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.safetensors_files import CheckpointFiles

LOADING_READS = 4
"""Reads in flight while all experts are loaded into memory: laying out what was read is then most of the work."""

log = logging.getLogger(__name__)


def open_experts(
    config: ModelConfig,
    files: CheckpointFiles,
    prefix: str,
    slots: int | None = None,
    *,
    reads_in_flight: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Experts:
    """The experts of a checked model. With no `slots`, or enough for all, every expert is read into memory now;
    `progress(done, total)` counts them. Otherwise `slots` of them are held at a time, and how many reads are kept in
    flight is measured, unless told.

    Raises `WeightsInvalid` or `ExpertUnreadable`.
    """
    source = open_source(config, files, prefix)
    try:
        if slots is None or slots >= len(source.layers) * source.experts:
            resident = ResidentExperts.load(source, reads_in_flight or LOADING_READS, progress)
            source.close()
            return resident
        if reads_in_flight is None:
            memory = aligned_records(min(max(TRIED), slots), source.record_bytes)
            found = calibrate(source, list(memory))
            log.info("experts are streamed with %s", found)
            # Each read in flight has memory of its own beside the cache, and the plan has counted so much for all.
            affordable = READING_RECORDS * source.record_bytes // max(source.scratch_bytes, 1)
            reads_in_flight = max(1, min(found.reads_in_flight, affordable))
            del memory
        return StreamedExperts(source, slots, reads_in_flight)
    except BaseException:
        source.close()
        raise


def whole_working_sets(slots: int, working_set: int) -> int:
    """As many slots as make whole working sets (the experts one token visits in all layers), where there is one at
    all: between two multiples, memory does more for sessions than for experts."""
    return slots // working_set * working_set if slots >= working_set else slots
