"""What is kept, when asked for, of how a model's experts were used: for its next start, and for the simulator."""

import logging
from collections.abc import Callable
from pathlib import Path

from serai.runtime.errors import BadParameter
from serai.runtime.experts.access import Experts
from serai.runtime.experts.streamed import StreamedExperts
from serai.runtime.experts.trace import TracedExperts, TraceRecorder
from serai.runtime.experts.usage import load_usage, save_usage
from serai.runtime.models.config import ModelConfig
from serai.runtime.models.tensor_table import expert_layers

log = logging.getLogger(__name__)


class ExpertNotes:
    """`warm_start`: which experts were used most, in the model's folder (`usage.py`). `trace`: a file that gets what
    every step wanted (`trace.py`). Used from the engine thread, but for making it."""

    def __init__(self, folder: Path, config: ModelConfig, *, warm_start: bool, trace: Path | None) -> None:
        """Raises `BadParameter` for what can't be recorded or written."""
        self._folder = folder
        self._warm_start = warm_start
        self._trace = trace
        self.recorder: TraceRecorder | None = None
        if trace is None:
            return
        if config.moe is None:
            raise BadParameter("trace is given, but this model has no routed experts to record; leave it out")
        if trace.is_dir() or not trace.absolute().parent.is_dir():
            raise BadParameter(f"trace is {trace}, which is a folder or lies in one that doesn't exist; name a file")
        self.recorder = TraceRecorder(expert_layers(config), config.moe.experts)

    def begin(self, experts: Experts | None, progress: Callable[[int, int], None]) -> None:
        """Read the experts that were used most before, as many as there are slots; `progress(done, total)` counts."""
        streamed = streamed_in(experts)
        if not self._warm_start or streamed is None:
            return
        usage = load_usage(self._folder, streamed.cache.layers, streamed.cache.experts)
        if usage is not None:
            streamed.warm(usage, progress)

    def end(self, experts: Experts | None) -> None:
        """Write what is to be kept. A file that can't be written is a warning: the sessions are what matters."""
        streamed = streamed_in(experts)
        if self._warm_start and streamed is not None:
            save_usage(self._folder, streamed.cache.layers, streamed.cache.usage())
        if self.recorder is not None and self._trace is not None:
            try:
                self.recorder.trace().save(self._trace)
            except OSError as error:
                log.warning("the routing can't be written to %s (%s)", self._trace, error.strerror)


def streamed_in(experts: Experts | None) -> StreamedExperts | None:
    """The streamed experts behind what a model was given; None where all are in memory, or there are none."""
    inner = experts.recorded if isinstance(experts, TracedExperts) else experts
    return inner if isinstance(inner, StreamedExperts) else None
