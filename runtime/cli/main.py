"""The `serai` command. Each command is a file of this folder and imports what it needs when it runs.

Exit codes: 0 done; 1 an error of ours, or a check that failed; 2 wrong usage; 130 interrupted.
"""

from importlib.metadata import version
from typing import Annotated

import typer

from serai.runtime.cli.bench import app as bench_app
from serai.runtime.cli.chat import chat
from serai.runtime.cli.eval import evaluate_model
from serai.runtime.cli.info import info
from serai.runtime.cli.monitor import monitor
from serai.runtime.cli.pack import pack
from serai.runtime.cli.plan import plan
from serai.runtime.cli.run import run
from serai.runtime.cli.selfcheck import selfcheck
from serai.runtime.cli.serve import serve
from serai.runtime.cli.sessions import app as sessions_app

app = typer.Typer(
    name="serai",
    help="Run Kimi-class models on one machine, with sessions that fork, pause and resume exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run)
app.command("chat")(chat)
app.command("serve")(serve)
app.command("plan")(plan)
app.command("pack")(pack)
app.command("info")(info)
app.command("monitor")(monitor)
app.command("eval")(evaluate_model)
app.command("selfcheck")(selfcheck)
app.add_typer(bench_app, name="bench")
app.add_typer(sessions_app, name="sessions")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"serai {version('serai')}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options of `serai` itself."""


def main() -> None:
    """The command's entry point."""
    app(prog_name="serai")
