"""`serai bench`: every figure the project states, measured here and now. One command a bench."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import Output, reporting, table

if TYPE_CHECKING:
    from serai.runtime.bench.report import Report

app = typer.Typer(name="bench", help="Measure the figures the project states.", no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="A smaller honest form, for continuous integration.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="D", help="Where models and other large files are kept. [default: ~/.cache/serai/bench]"
    ),
]


@app.command()
def start(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Process start to first token on a tiny model: kernels compiled on the spot, and compiled before."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.start import bench_start

        _show(out, bench_start(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def monitor(quick: Quick = False, as_json: Json = False) -> None:
    """How much of a core `serai monitor` takes while it shows 256 sessions."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.monitor import bench_monitor

        _show(out, bench_monitor(quick=quick, tell=out.note))


def bench_folder(given: Path | None, environ: Mapping[str, str]) -> Path:
    """Where benches keep what they make: as given, else below `$XDG_CACHE_HOME`, else below `~/.cache`."""
    from serai.runtime.errors import BadParameter

    base = environ.get("XDG_CACHE_HOME")
    folder = given or (Path(base) if base else Path.home() / ".cache") / "serai" / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadParameter(f"--dir is {folder}, which can't be made ({error.strerror}); name another") from None
    return folder


def _show(out: Output, report: "Report") -> None:
    shown = table("claim", "value", "unit", "target", "holds")
    for claim in report.claims:
        value = "not measured" if claim.value is None else f"{claim.value:.4g}"
        holds = {True: "yes", False: "NO", None: "-"}[claim.holds]
        shown.add_row(claim.name, value, claim.unit, claim.target or "-", holds)
    details = [f"{claim.name}: {claim.detail}" for claim in report.claims]
    out.result(report.to_json(), shown, *details)
