"""What lines typed into a chat mean."""

import pytest

from serai.runtime.cli.chat_commands import HELP, Command, Say, Verb, read_line
from serai.runtime.errors import BadParameter


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("hello\n", Say("hello")),
        ("  two  words \r\n", Say("  two  words ")),
        ("no /command\n", Say("no /command")),
        ("//etc is a folder\n", Say("/etc is a folder")),
        ("/fork\n", Command(Verb.FORK)),
        ("/fork  a second try \n", Command(Verb.FORK, "a second try")),
        ("/resume abc\n", Command(Verb.RESUME, "abc")),
        ("/quit", Command(Verb.QUIT)),
        ("\n", None),
        (" \t\n", None),
    ],
)
def test_a_line_is_a_message_or_a_command_or_nothing(line: str, meant: Say | Command | None) -> None:
    assert read_line(line) == meant


@pytest.mark.parametrize("line", ["/", "/Fork", "/resume", "/pause now", "/stop", "/ fork"])
def test_a_command_that_cannot_be_meant_is_one_sentence(line: str) -> None:
    with pytest.raises(BadParameter, match="/"):
        read_line(line)


def test_the_help_tells_every_command() -> None:
    for verb in Verb:
        assert f"/{verb.value}" in HELP
