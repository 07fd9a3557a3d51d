"""A chat in a fork: what was said so far, and how it reads. No terminal and no waiting in here."""

from dataclasses import dataclass, field

from serai.runtime.monitor.page import Page, page_of
from serai.runtime.monitor.passages import passage_lines
from serai.runtime.monitor.text import rule
from serai.runtime.monitor.transcript import Passage, Voice


@dataclass(slots=True)
class Conversation:
    """A chat. `earlier` is what the session said before it was forked; `is_replying` while a reply is streamed."""

    label: str
    session_id: str
    earlier: tuple[Passage, ...] = ()
    said: list[Passage] = field(default_factory=list)
    is_replying: bool = False
    thoughts_shown: bool = False
    notice: str = ""

    def asks(self, text: str) -> None:
        """A message was sent."""
        self.said.append(Passage(Voice.USER, text))
        self.is_replying, self.notice = True, ""

    def hears(self, piece: Passage) -> None:
        """A piece of the reply came; it goes on where the last piece of the same voice ended."""
        last = self.said[-1] if self.said else None
        if last is not None and last.voice is piece.voice:
            self.said[-1] = Passage(last.voice, last.text + piece.text, last.is_cut)
        else:
            self.said.append(piece)

    def ended(self, notice: str = "") -> None:
        """The reply is over, for whatever reason."""
        self.is_replying, self.notice = False, notice


def chat_page(chat: Conversation, width: int) -> Page:
    """All of it; the page stays at its end."""
    shown = chat.thoughts_shown
    return page_of(
        (),
        [
            *passage_lines(chat.earlier, width, thoughts_shown=shown, growing=False),
            rule("forked here: the session itself hears nothing of what follows", width - 1),
            *passage_lines(chat.said, width, thoughts_shown=shown, growing=chat.is_replying),
        ],
        follows_end=True,
    )
