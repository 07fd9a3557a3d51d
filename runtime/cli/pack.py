"""`serai pack`: a model's experts as one aligned record each, for reading them while the model runs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from serai.runtime.cli.opening import QUIET_S
from serai.runtime.cli.options import Json, Model
from serai.runtime.cli.output import bytes_text, pairs, reporting

if TYPE_CHECKING:
    from serai.runtime.experts.pack import PackProgress

LABELS = {"pack": "packing", "verify": "reading back"}


class ExpertForm(StrEnum):
    """The forms experts can be packed in, known without loading the engine."""

    AS_STORED = "as-stored"
    MXFP4 = "mxfp4"


def pack(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that is new, empty, or of an earlier run.")],
    experts: Annotated[
        ExpertForm, typer.Option(help="Keep the numbers as they are, or quantise BF16 and F32 experts to 4 bits.")
    ] = ExpertForm.AS_STORED,
    verify: Annotated[bool, typer.Option("--verify", help="Read every record back and compare its checksum.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads to make records with.")] = 2,
    as_json: Json = False,
) -> None:
    """Pack a model into a folder that runs like the model itself. What was stopped goes on when called again; the
    model is only ever read."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.experts.pack import pack_model
        from serai.runtime.experts.packed_format import AS_STORED, MXFP4
        from serai.runtime.models.open_model import find_model

        form = {ExpertForm.AS_STORED: AS_STORED, ExpertForm.MXFP4: MXFP4}[experts]
        found = find_model(model)
        try:
            with pack_progress() as tell:
                made = pack_model(
                    found.config,
                    found.files,
                    found.prefix,
                    folder,
                    experts=form,
                    verify=verify,
                    threads=threads,
                    progress=tell,
                )
        finally:
            found.files.close()
        changed = made.relative_error
        out.result(
            {
                "model": model,
                "out": str(made.folder),
                "experts": experts.value,
                "written_bytes": made.written_bytes,
                "kept_files": made.kept_files,
                "relative_error": changed,
                "verified_records": made.verified_records if verify else None,
                "seconds": made.seconds,
            },
            pairs(
                [
                    ("Packed", f"{made.folder}"),
                    ("Experts", experts.value),
                    ("Written", f"{bytes_text(made.written_bytes)} in {made.seconds:.1f} s"),
                    ("Kept", f"{made.kept_files:,} files of an earlier run"),
                    ("Quantising changed", "nothing" if changed is None else f"{changed:.3%} of the weights (RMS)"),
                    ("Read back", f"{made.verified_records:,} records, all as written" if verify else "no (--verify)"),
                ]
            ),
        )


@contextmanager
def pack_progress() -> "Iterator[Callable[[PackProgress], None]]":
    """Show how far packing has come: a bar on a terminal, else a line for each tenth once it takes long."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as progress:
        tasks = {stage: progress.add_task(label, total=None, visible=False) for stage, label in LABELS.items()}

        def tell(step: "PackProgress") -> None:
            progress.update(tasks[step.stage], total=step.total_bytes, completed=step.done_bytes, visible=True)

        yield tell


def _lines() -> "Callable[[PackProgress], None]":
    began_s = time.monotonic()
    told: set[tuple[str, int]] = set()

    def tell(step: "PackProgress") -> None:
        tenth = step.stage, 10 * step.done_bytes // max(step.total_bytes, 1)
        if tenth not in told and time.monotonic() - began_s > QUIET_S:
            told.add(tenth)
            done, total = bytes_text(step.done_bytes), bytes_text(step.total_bytes)
            typer.echo(f"{LABELS[step.stage]}: {done} of {total}", err=True)

    return tell
