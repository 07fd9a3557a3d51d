"""`serai selfcheck`: the determinism contract on the user's own model and machine."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from serai.runtime.cli.options import (
    Budget,
    ExpertsPerToken,
    Json,
    Latents,
    Model,
    Precision,
    PrecisionName,
    Threads,
    Trunk,
)
from serai.runtime.cli.output import FAILED, reporting, table

if TYPE_CHECKING:
    from serai.runtime.checks.selfcheck import Promise


def selfcheck(
    model: Model,
    precision: Precision = PrecisionName.EXACT,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    budget: Budget = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check that a session's bits depend on its tokens alone. Prints a list of {promise, cases, held}; fails if one
    promise was not kept in all of its cases."""
    with reporting(as_json=as_json) as out:
        from serai.kernels.threads import threads as usual
        from serai.runtime.checks.selfcheck import selfcheck as check
        from serai.runtime.cli.opening import open_model

        # One of the promises compares one thread with several, also where there is a single core.
        at_least_two = max(2, threads or usual())
        with (
            open_model(
                model,
                precision=precision.value,
                trunk=trunk,
                latents=latents,
                experts_per_token=experts_per_token,
                budget=budget,
                threads=at_least_two,
            ) as opened,
            tempfile.TemporaryDirectory(prefix="serai-selfcheck-") as folder,
            Console(stderr=True).status("checking") as status,
        ):
            promises: list[Promise] = []
            for promise in check(opened.loaded, store=Path(folder) / "store", limit_bytes=opened.state_limit_bytes):
                promises.append(promise)
                status.update(f"checking: {len(promises)} promises done")
        shown = table("promise", "cases", "held")
        for promise in promises:
            shown.add_row(promise.promise, str(promise.cases), str(promise.held))
        out.result([promise.to_json() for promise in promises], shown)
        broken = [promise for promise in promises if not promise.kept]
        if broken:
            out.note(f"serai: {len(broken)} of {len(promises)} promises were broken; first: {broken[0].promise}")
            raise typer.Exit(FAILED)
