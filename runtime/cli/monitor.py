"""`serai monitor`: sessions, memory and events of a running server in the terminal, and keys to act on them."""

import os
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from serai.runtime.cli.options import Json
from serai.runtime.cli.output import FAILED, reporting

if TYPE_CHECKING:
    from serai.runtime.cli.output import Output
    from serai.runtime.monitor.source import Source

CANNOT_DRAW = 2
DEFAULT_TARGET = "http://127.0.0.1:8080"


def monitor(
    target: Annotated[
        str,
        typer.Argument(metavar="[URL|SOCKET]", help="Where the server is: its address, or the path of its socket."),
    ] = DEFAULT_TARGET,
    demo: Annotated[bool, typer.Option("--demo", help="Watch a simulation instead of a server.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once and leave.")] = False,
    key: Annotated[
        str | None, typer.Option(envvar="SERAI_API_KEY", help="The server's key; acting on sessions needs it.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 1.0,
    light: Annotated[bool, typer.Option("--light", help="For terminals with a light background.")] = False,
    as_json: Json = False,
) -> None:
    """Watch sessions and memory, and fork, pause or resume with a key. Where stdout is no terminal it prints a line a
    second; --once prints one table, --once --json one object."""
    with reporting(as_json=as_json) as out:
        import anyio

        if once:
            anyio.run(_print_once, target, key, demo, out)
        elif as_json or not sys.stdout.isatty():
            anyio.run(_print_always, target, key, demo, every, as_json)
        else:
            _draw(target, key, demo, every, light)


def open_source(target: str, key: str | None, demo: bool) -> "Source":
    """What is to be watched; raises `BadParameter` for a target that is no address, or when a package is missing."""
    from serai.runtime.errors import BadParameter

    if demo:
        from serai.runtime.monitor.demo import Demo

        return Demo()
    try:
        from serai.runtime.monitor.http_source import HttpSource
    except ModuleNotFoundError as error:
        raise BadParameter(_missing(error)) from None
    return HttpSource(target, key=key)


def _missing(error: ModuleNotFoundError) -> str:
    return f"the monitor needs the package {error.name}; install it with: pip install 'serai[monitor]'"


async def _print_once(target: str, key: str | None, demo: bool, out: "Output") -> None:
    from serai.runtime.monitor.plain_output import snapshot_text

    async with AsyncExitStack() as stack:
        source = open_source(target, key, demo)
        stack.push_async_callback(source.close)
        status = await source.status()
    if out.as_json:
        out.result(status.to_json())
    else:
        typer.echo(snapshot_text(status, source.name))


async def _print_always(target: str, key: str | None, demo: bool, every_s: float, as_json: bool) -> None:
    from serai.runtime.monitor.plain_output import stream

    async with AsyncExitStack() as stack:
        source = open_source(target, key, demo)
        stack.push_async_callback(source.close)
        async for text in stream(source, every_s=every_s, as_json=as_json):
            try:
                typer.echo(text)
            except BrokenPipeError:
                # Whoever read the lines has enough. What is still buffered must not fail at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return


def check_terminal(hint: str | None = None) -> None:
    """Refuse where no screen can be drawn, saying why and what to do instead; raises `BadParameter` when a package is
    missing."""
    from serai.runtime.errors import BadParameter
    from serai.runtime.monitor.terminal import INSTEAD, why_not

    reason = why_not(os.environ, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr, hint=hint or INSTEAD)
    if reason is not None:
        typer.echo(f"serai: {reason}", err=True)
        raise typer.Exit(CANNOT_DRAW)
    try:
        import serai.runtime.monitor.app  # noqa: F401  # whether it can be imported
    except ModuleNotFoundError as error:
        raise BadParameter(_missing(error)) from None


def _draw(target: str, key: str | None, demo: bool, every_s: float, light: bool) -> None:
    check_terminal()
    from serai.runtime.monitor.app import Monitor
    from serai.runtime.monitor.terminal import watch_for_hangup

    watch_for_hangup()
    app = Monitor(open_source(target, key, demo), every_s=every_s, light=light)
    app.run()
    if app.return_code:
        raise typer.Exit(FAILED)
