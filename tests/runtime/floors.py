"""Between which budgets a model's experts are streamed."""

from pathlib import Path

from serai.runtime.memory.plan import plan_memory
from serai.runtime.models.open_model import find_model
from serai.runtime.models.scratch import kernel_scratch_bytes
from serai.runtime.opening import LEAST_CONTEXT_TOKENS
from serai.runtime.scheduler import Limits


def floors(model: Path) -> tuple[int, int]:
    """The budgets under which nothing runs, and under which experts must be streamed."""
    found = find_model(model)
    plan = plan_memory(
        found.config,
        found.files,
        context_tokens=LEAST_CONTEXT_TOKENS,
        step_rows=Limits().step_rows,
        kernel_scratch_bytes=kernel_scratch_bytes(found.config, Limits().step_rows, fast=True),
    )
    found.files.close()
    return plan.streaming_floor_bytes.bfloat16, plan.floor_bytes.bfloat16
