"""How every command speaks: results, and errors as one sentence.

The rule: with `--json` stdout holds exactly one JSON object, the result or `{"error": {"kind", "message"}}`; without it
stdout is for people. An error's sentence goes to stderr either way, and the exit code is 1. Wrong usage (exit code 2)
is explained on stderr only.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

FAILED = 1
INTERRUPTED = 130

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


class Output:
    """Where a command's result goes: an object for programs, or tables for people."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, values: Mapping[str, object] | Sequence[object], *for_people: RenderableType) -> None:
        """Print the result in the form that was asked for."""
        if self.as_json:
            # ASCII, so that no terminal's or pipe's encoding can refuse it; NaN is no JSON.
            typer.echo(json.dumps(values, allow_nan=False))
        else:
            console = Console(highlight=False)
            for part in for_people:
                console.print(part)

    def note(self, sentence: str) -> None:
        """A line for people that is no part of the result."""
        typer.echo(sentence, err=True)


@contextmanager
def reporting(*, as_json: bool) -> Iterator[Output]:
    """Run a command's body; errors of ours end the command with their sentence instead of a traceback."""
    try:
        yield Output(as_json=as_json)
    except KeyboardInterrupt:
        typer.echo("\nserai: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        ours = _expected(error)
        if ours is None:
            raise
        if as_json:
            typer.echo(json.dumps({"error": {"kind": type(ours).__name__, "message": str(ours)}}))
        typer.echo(f"serai: {ours}", err=True)
        raise typer.Exit(FAILED) from None


def _expected(error: BaseException) -> BaseException | None:
    """The error to tell a person about; None for one nobody foresaw. Task groups wrap even a single error."""
    from serai.checkpoints.errors import SeraiError  # not before: `--help` needs nothing of what comes with it

    if isinstance(error, BaseExceptionGroup):
        found = [_expected(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    cpu = sys.modules.get("serai.kernels.cpu")  # its errors can't have happened unless it was loaded
    if isinstance(error, SeraiError) or (cpu is not None and isinstance(error, cpu.SimdPathUnavailable)):
        return error
    return None


def table(*headings: str, title: str | None = None) -> Table:
    """A table with names on the left and numbers, right-aligned, in the other columns."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="none", pad_edge=False, box=None)
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="left" if number == 0 else "right", overflow="fold")
    return made


def pairs(rows: Iterable[tuple[str | Text, str | Text]], *, title: str | None = None) -> Table:
    """Names and what they are, both left-aligned."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False, pad_edge=False, box=None)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def counted(number: int, noun: str) -> str:
    """ "1 session", "2 sessions"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def bytes_text(size: int) -> str:
    """A size for people, in powers of 1000: "465 MB", "55.3 kB"."""
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{size} bytes" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"
