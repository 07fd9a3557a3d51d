"""`serai bench`: every figure the project states, measured here and now. One command a bench."""

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from serai.runtime.cli.options import Json, Latents
from serai.runtime.cli.output import Output, reporting, table

if TYPE_CHECKING:
    from serai.runtime.bench.report import Report

app = typer.Typer(name="bench", help="Measure the figures the project states.", no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="A smaller honest form, for continuous integration.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--dir", metavar="D", help="Where models and other large files are kept. Default: ~/.cache/serai/bench."
    ),
]

Unused = Annotated[
    Path | None,
    typer.Option("--dir", metavar="D", help="Taken as by every bench; this one keeps no files.", hidden=True),
]


@app.command()
def start(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Process start to first token on a tiny model: kernels compiled on the spot, and compiled before."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.start import bench_start

        _show(out, bench_start(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def server(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """64 clients of a server, half of which come and go: what they leave behind, how even, how fast."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.server import bench_server

        _show(out, bench_server(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def monitor(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """How much of a core `serai monitor` takes while it shows 256 sessions."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.monitor import bench_monitor

        _show(out, bench_monitor(quick=quick, tell=out.note))


@app.command()
def kernels(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """Every kernel in Kimi K3's shapes against what memory and registers give on this machine, in the same run."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.kernels import bench_kernels

        _show(out, bench_kernels(quick=quick, tell=out.note))


@app.command()
def experts(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """A model several times its budget: experts read from disk against what the disk and the processor give."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.experts import bench_experts

        _show(out, bench_experts(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command("k3-slice")
def k3_slice(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Two layers of Kimi K3 at full width, 20 GB, under 6 GiB: memory, step time and bytes read, same tokens."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.k3_slice import bench_k3_slice

        _show(out, bench_k3_slice(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command("experts-per-token")
def experts_per_token(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """What fewer experts a token cost the nano model (KL, likeliest token, recall), and the reading they save."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.fewer_experts import bench_fewer_experts

        _show(out, bench_fewer_experts(quick=quick, tell=out.note))


@app.command()
def trunk(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """What a trunk of 8 or 4 bits costs the nano model (KL, likeliest token, recall), and the bytes it saves."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.smaller_trunks import bench_trunk

        _show(out, bench_trunk(quick=quick, tell=out.note))


@app.command()
def latents(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """What bfloat16 and 8-bit latents cost the nano model (KL, likeliest token, recall), and what a token takes."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.latent_forms import bench_latents

        _show(out, bench_latents(quick=quick, tell=out.note))


@app.command()
def cache(
    trace: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A recorded trace; repeat for several. \\[default: synthetic routing]"),
    ] = None,
    slots: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="A cache size; repeat for several. \\[default: 0.5, 1, 2 and 4 steps' experts]"),
    ] = None,
    quick: Quick = False,
    _folder: Unused = None,
    as_json: Json = False,
) -> None:
    """Hit rates of the expert cache's policies on recorded routing, without a model."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.cache import bench_cache

        made = bench_cache(trace or (), slots or (), quick=quick)
        out.result(made.to_json(), *_hit_rates(made))


@app.command()
def sessions(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Hundreds of sessions under a budget for a few: equal to solo runs, fair, within memory; what waits cost."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.sessions import bench_sessions

        _show(out, bench_sessions(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def tree(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Nothing is read twice: shared beginnings, forks far back, and tokens guessed from what was read before."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.tree import bench_tree

        _show(out, bench_tree(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def model(
    against: Annotated[
        str | None,
        typer.Option(metavar="PEER", help='Run "llama" (llama.cpp, the extra bench) beside, on the same weights.'),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="A context to measure; repeat for several. \\[default: 0, 4096, 32768, 131072]"),
    ] = None,
    sessions: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Sessions at once; repeat for several. \\[default: 1, 4, 8 and 16]"),
    ] = None,
    latents: Latents = None,
    quick: Quick = False,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Tokens a second of a mid-size model in Kimi K3's layout, by sessions at once and by context."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.model import bench_against, bench_model

        where = bench_folder(folder, os.environ)
        only: dict[str, Any] = {"only_contexts": context or (), "only_sessions": sessions or (), "latents": latents}
        if against is None:
            made = bench_model(where, quick=quick, tell=out.note, **only)
            _show(out, made, *_grids(made))
        else:
            _show(out, bench_against(where, against, quick=quick, tell=out.note, **only))


@app.command()
def checkpoints(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Saving and loading states beside raw disk speed, resuming beside reading anew, and what each codec costs."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.checkpoints import bench_checkpoints

        _show(out, bench_checkpoints(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def faults(quick: Quick = False, folder: Folder = None, as_json: Json = False) -> None:
    """Kill and fail a store at every disk call, feed it wrong bytes, and kill sessions at every token boundary."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.faults import bench_faults

        _show(out, bench_faults(bench_folder(folder, os.environ), quick=quick, tell=out.note))


@app.command()
def recall(quick: Quick = False, _folder: Unused = None, as_json: Json = False) -> None:
    """What the nano model remembers of what it read, by task and distance."""
    with reporting(as_json=as_json) as out:
        from serai.runtime.bench.recall import bench_recall

        _show(out, bench_recall(quick=quick, tell=out.note))


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


def _hit_rates(report: "Report") -> list[RenderableType]:
    """A heading and a table for each trace, a line for each size, a column for each policy."""
    shown: list[RenderableType] = []
    for (name, visits), rows in groupby(report.table, key=lambda row: (row["trace"], row["visits"])):
        by_size = {slots: list(of_size) for slots, of_size in groupby(rows, key=lambda row: row["slots"])}
        rates = table("slots", *(str(row["policy"]) for row in next(iter(by_size.values()))))
        for slots, of_size in by_size.items():
            rates.add_row(f"{slots:,}", *(f"{row['hit_rate']:.3f}" for row in of_size))
        shown += [Text(f"{name}: {visits:,} visits", overflow="fold"), rates]
    return shown


def _grids(report: "Report") -> list[RenderableType]:
    """A table for each phase, a line for each number of sessions, a column for each context."""
    shown: list[RenderableType] = []
    for phase in ("prefill", "decode"):
        rows = [row for row in report.table if row["phase"] == phase]
        contexts = list(dict.fromkeys(row["context"] for row in rows))
        headings = (f"{context:,} tokens" for context in contexts)
        grid = table("sessions", *headings, title=f"{phase}, tok/s of all sessions together")
        for sessions in dict.fromkeys(row["sessions"] for row in rows):
            speeds = {row["context"]: row["tok/s"] for row in rows if row["sessions"] == sessions}
            grid.add_row(f"{sessions}", *(_speed_text(speeds[context]) for context in contexts))
        shown.append(grid)
    return shown


def _speed_text(speed: object) -> str:
    return f"{speed:.3g}" if isinstance(speed, float) else str(speed)


def _show(out: Output, report: "Report", *before: RenderableType) -> None:
    shown = table("claim", "value", "unit", "target", "holds")
    for claim in report.claims:
        value = "not measured" if claim.value is None else f"{claim.value:.4g}"
        holds = {True: "yes", False: "NO", None: "-"}[claim.holds]
        shown.add_row(claim.name, value, claim.unit, claim.target or "-", holds)
    details = [f"{claim.name}: {claim.detail}" for claim in report.claims]
    out.result(report.to_json(), *before, shown, *details)
