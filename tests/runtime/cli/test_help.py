"""Help says all that was written: rich takes what stands in brackets for a style unless told that it is none."""

from collections.abc import Iterator
from typing import Any

import typer.main
from rich.text import Text

from serai.runtime.cli.main import app


def helps(command: Any) -> Iterator[str]:
    """Every help text of a command and of those under it."""
    for one in (command, *command.params):
        if getattr(one, "help", None):
            yield one.help
    for inner in getattr(command, "commands", {}).values():
        yield from helps(inner)


def test_nothing_in_brackets_is_lost() -> None:
    texts = list(helps(typer.main.get_command(app)))
    assert len(texts) > 100
    assert sum("[default: " in text for text in texts) > 10
    for text in texts:
        assert Text.from_markup(text).plain == text.replace("\\[", "[")
