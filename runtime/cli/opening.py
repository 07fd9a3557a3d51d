"""Opening a model from the command line: progress on stderr, and a model without sessions for checks."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from serai.runtime.models.open_model import FoundModel, LoadedModel

LABELS = {
    "kernels": "preparing kernels (the first run compiles them)",
    "weights": "reading weights",
    "experts": "reading the experts used most",
}
"""What each stage of opening is called."""

QUIET_S = 2.0
"""Where nothing can be redrawn, only an opening that takes longer than this is worth lines of its own."""

Tell = Callable[[str, int, int], None]
"""`tell(stage, done, total)`; may be called from any thread."""


@contextmanager
def opening_progress() -> Iterator[Tell]:
    """Show how far opening has come: a bar on a terminal, else a line for each tenth once it takes long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines().tell
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(LABELS.get(stage, stage), total=total, count="")
            progress.update(tasks[stage], total=total, completed=done, count=f"{done} of {total}")

        # The first kernel takes the longest, and nothing is told before it is done: a bar of unknown length till then.
        tasks["kernels"] = progress.add_task(LABELS["kernels"], total=None, count="")
        yield tell


class _Lines:
    """Progress as plain lines on stderr."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._told: tuple[str, int] | None = None

    def tell(self, stage: str, done: int, total: int) -> None:
        step = stage, 10 * done // max(total, 1)
        if step != self._told and time.monotonic() - self._start_s > QUIET_S:
            self._told = step
            typer.echo(f"{LABELS.get(stage, stage)}: {done} of {total}", err=True)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model in memory, and how much of the budget it leaves for states."""

    found: "FoundModel"
    loaded: "LoadedModel"
    state_limit_bytes: int


@contextmanager
def open_model(
    name: str,
    *,
    precision: str,
    trunk: str | None,
    latents: str | None,
    experts_per_token: int | None,
    budget: str | None,
    threads: int | None,
) -> Iterator[OpenedModel]:
    """A loaded model, ready kernels and no sessions. Refuses a budget that is too small before anything is loaded."""
    from serai.kernels import compile as kernels
    from serai.kernels.threads import set_threads
    from serai.runtime.models.layout import latent_type
    from serai.runtime.models.open_model import Precision, find_model, load_model
    from serai.runtime.models.trunk import Trunk
    from serai.runtime.opening import chosen_budget, expert_room
    from serai.runtime.scheduler import Limits

    chosen, held = Precision.parse(precision), Trunk.parse(trunk)
    kept = latent_type(latents, fast=chosen is Precision.FAST)
    budget_bytes = chosen_budget(budget)
    found = find_model(name, experts_per_token=experts_per_token)
    try:
        if threads is not None:
            set_threads(threads)  # before the plan: each thread has memory of its own
        room = expert_room(found, chosen, budget_bytes, held, kept)
        with opening_progress() as tell:
            kernels.warm(lambda step: tell("kernels", step.done, step.total))
            loaded = load_model(
                found,
                chosen,
                max_rows=Limits().step_rows,
                trunk=held,
                latents=kept,
                expert_slots=room.slots,
                wide_rows=room.wide_rows,
                progress=lambda done, total: tell("weights", done, total),
            )
        try:
            yield OpenedModel(found, loaded, budget_bytes - loaded.model.bytes)
        finally:
            loaded.model.close()
    finally:
        found.files.close()
