"""What a line typed into `serai chat` means. A pure function; `chat_loop.py` acts on what it gives."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from serai.runtime.errors import BadParameter

MARK: Final = "/"


class Verb(Enum):
    """The commands, by what is typed after the mark."""

    FORK = "fork"
    PAUSE = "pause"
    RESUME = "resume"
    SESSIONS = "sessions"
    HELP = "help"
    QUIT = "quit"


@dataclass(frozen=True, slots=True)
class Say:
    """A message to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Something to do; `argument` is empty where none was given."""

    verb: Verb
    argument: str = ""


HELP: Final = """\
/fork [label]   go on in a copy of this conversation; the original stays open
/pause          put this conversation away; the next message begins a new one
/resume ID      go on with a conversation, open or put away
/sessions       list them
/help           show this
/quit           put everything away and leave, as the end of input does
//text          say "/text" to the model
Ctrl-C stops an answer and keeps what was said; twice, it puts everything away and leaves."""


def read_line(line: str) -> Say | Command | None:
    """What the line asks for; None for a blank one. Raises `BadParameter` for a command that can't be meant."""
    text = line.rstrip("\r\n")
    if not text.strip():
        return None
    if not text.startswith(MARK):
        return Say(text)
    if text.startswith(MARK * 2):
        return Say(text.removeprefix(MARK))
    name, _, argument = text.removeprefix(MARK).partition(" ")
    argument = argument.strip()
    try:
        verb = Verb(name.strip())
    except ValueError:
        known = ", ".join(MARK + verb.value for verb in Verb)
        raise BadParameter(f"there is no command {MARK + name!r}; there are {known}, and // begins a message") from None
    if verb is Verb.RESUME and not argument:
        raise BadParameter("/resume needs the id of a conversation; /sessions lists them")
    if argument and verb not in (Verb.FORK, Verb.RESUME):
        raise BadParameter(f"{MARK}{verb.value} takes nothing after it, and there is {argument!r}")
    return Command(verb, argument)
