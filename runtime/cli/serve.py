"""`serai serve`: the OpenAI-compatible server."""

import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serai.runtime.cli.monitor import check_terminal
from serai.runtime.cli.options import (
    Budget,
    ExpertsPerToken,
    Latents,
    Precision,
    PrecisionName,
    Threads,
    Trace,
    Trunk,
    WarmStart,
)
from serai.runtime.cli.output import FAILED, Output, reporting
from serai.runtime.cli.run import default_store

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from serai.runtime.runtime import Runtime
    from serai.runtime.server.options import ServerOptions

LEVELS = ("critical", "error", "warning", "info", "debug")
MODEL_OPTIONS = (
    "model",
    "budget",
    "precision",
    "trunk",
    "latents",
    "experts_per_token",
    "threads",
    "warm_start",
    "trace",
    "store",
)
"""What an options file may say of the model, above its table `[server]`."""


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help='"nano", a model folder, or ORG/NAME; or in --config.')
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Where to listen; unix:PATH is a socket of this machine. \\[default: 127.0.0.1]"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one. \\[default: 8080]")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", envvar="SERAI_API_KEY", help="Repeat for several clients.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Any other option of the server, such as keep_hot=16. Repeat for more; a wrong name lists them all.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Options as TOML: the model's at the top, the server's under \\[server]; flags win.",
        ),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where sessions are kept. \\[default: ~/.local/state/serai/sessions]"),
    ] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Keep nothing on disk.")] = False,
    show_monitor: Annotated[
        bool, typer.Option("--monitor", help="Show the session monitor here; leaving it with q leaves the server be.")
    ] = False,
    log_level: Annotated[
        str | None, typer.Option("--log-level", help=f"One of {', '.join(LEVELS)}. \\[default: info]")
    ] = None,
    precision: Precision | None = None,
    trunk: Trunk = None,
    latents: Latents = None,
    experts_per_token: ExpertsPerToken = None,
    budget: Budget = None,
    threads: Threads = None,
    warm_start: WarmStart = False,
    trace: Trace = None,
) -> None:
    """Serve a model to OpenAI's clients: point their base_url at http://HOST:PORT/v1."""
    with reporting(as_json=False) as out:
        import anyio

        from serai.runtime.errors import BadParameter

        try:
            from serai.runtime.server.options import SERVER_TABLE, ServerOptions, parse_setting, read_options_file
            from serai.runtime.server.running import address_of, listen, run_server
        except ModuleNotFoundError as error:
            raise BadParameter(f"serving needs {error.name}; install it with: pip install 'serai[server]'") from None
        from serai.runtime.cli.opening import opening_progress
        from serai.runtime.models.open_model import find_model
        from serai.runtime.opening import open_runtime

        given: dict[str, Any] = {} if config is None else read_options_file(config)
        table = given.pop(SERVER_TABLE, {})
        unknown = [name for name in given if name not in MODEL_OPTIONS]
        if unknown or not isinstance(table, dict):
            wrong = unknown[0] if unknown else SERVER_TABLE
            raise BadParameter(f"{wrong!r} is no option there; above [{SERVER_TABLE}] stand {', '.join(MODEL_OPTIONS)}")
        for setting in settings or ():
            table |= parse_setting(setting)
        flags = {"host": host, "port": port, "api_keys": api_key or None, "log_level": log_level}
        options = ServerOptions.of(table | {name: value for name, value in flags.items() if value is not None})
        if options.log_level not in LEVELS:
            raise BadParameter(f"log_level is {options.log_level!r}; it must be one of {', '.join(LEVELS)}")
        name = model or given.get("model")
        if name is None:
            raise BadParameter("name a model: serai serve MODEL, or model = ... in the options file")
        kept = store or Path(given.get("store") or default_store(os.environ))
        logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if show_monitor:
            check_terminal("leave --monitor out, and watch from elsewhere with serai monitor")
        find_model(name).files.close()  # a wrong one is told before anybody could connect
        bound = listen(options)
        where = address_of(options, bound)

        async def work() -> bool:
            with ExitStack() as shown:
                tell = shown.enter_context(opening_progress())
                async with open_runtime(
                    name,
                    budget=budget or given.get("budget"),
                    store=None if no_store else kept,
                    precision=precision.value if precision else given.get("precision", PrecisionName.FAST.value),
                    trunk=trunk or given.get("trunk"),
                    latents=latents or given.get("latents"),
                    experts_per_token=given.get("experts_per_token")
                    if experts_per_token is None
                    else experts_per_token,
                    threads=threads or given.get("threads"),
                    warm_start=warm_start or given.get("warm_start", False),
                    trace=trace or given.get("trace"),
                    progress=lambda opening: tell(opening.stage, opening.done, opening.total),
                ) as runtime:
                    shown.close()
                    told = f"serving {name} at {where}"
                    if show_monitor:
                        return await serve_with_monitor(runtime, options, bound, out, told)
                    return await run_server(runtime, options, bound, ready=lambda _: out.note(told))
            raise AssertionError("the runtime's block returns")

        with bound:
            if not anyio.run(work):
                raise typer.Exit(FAILED)


async def serve_with_monitor(
    runtime: "Runtime", options: "ServerOptions", bound: socket.socket, out: Output, told: str
) -> bool:
    """As `run_server`, with the monitor on this terminal until it is left or the server ends."""
    import anyio

    from serai.runtime.monitor.embedded import Screen
    from serai.runtime.monitor.in_process import InProcess
    from serai.runtime.server.running import run_server

    screen = Screen()

    def left() -> None:
        out.note(f"the monitor was left; {told}; Ctrl-C ends it")

    async def show(app: "Starlette") -> None:
        service = app.state.service
        source = InProcess(runtime, store=service.sessions.store, cancel=service.runs.cancel_session)
        await screen.show(source, left=left, notice=told)

    async with anyio.create_task_group() as tasks:

        def ready(app: "Starlette") -> None:
            tasks.start_soon(show, app)

        try:
            return await run_server(runtime, options, bound, ready=ready)
        finally:
            await screen.end()
    raise AssertionError("the task group's block returns")
