"""What the commands over a store on disk share: where it is, what a NAME means, and how stored things are shown."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from serai.runtime.cli.run import default_store

if TYPE_CHECKING:
    from serai.checkpoints.store import Store

StoreFolder = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Where sessions are kept. \\[default: ~/.local/state/serai/sessions]"),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The id of a session (its last node) or node, or a tag.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def store_folder(given: Path | None) -> Path:
    """The folder as given, or the one that `serai run` uses."""
    return given or default_store(os.environ)


def open_to_look(given: Path | None) -> "Store":
    """The store for reading, possibly beside the process that has it open."""
    from serai.checkpoints.store import Store

    return Store.open(str(store_folder(given)), read_only=True)


def open_to_change(given: Path | None, *, create: bool = False) -> "Store":
    """The store for this process alone; `StoreBusy` while another has it."""
    from serai.checkpoints.store import Store

    return Store.open(str(store_folder(given)), create=create)


def when(unix_s: float) -> str:
    """A time for people, in their zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def words(text: str) -> Text:
    """A label or tag, which a stranger may have chosen: no markup, no control characters."""
    from serai.runtime.monitor.text import printable

    return Text(printable(text))


def ask(question: str, *, yes: bool) -> None:
    """Go on only if a person agrees; the question goes to stderr. Without an answer the command is aborted."""
    if not yes:
        typer.confirm(question, abort=True, err=True)
