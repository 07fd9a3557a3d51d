"""Text of a reply between two control tokens."""

from collections.abc import Iterable

from serai.runtime.chat.segments import Tokenizer
from serai.runtime.text.detokenizer import Detokenizer


class TextRun:
    """Turns ordinary tokens into text, a run at a time; a character cut by a control token becomes U+FFFD.

    A `stray` run, one that stands where no text belongs, loses its leading white space: that is layout, not an answer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._begun = False

    def push(self, token: int, *, stray: bool = False) -> str:
        return self._take(self._detokenizer.push(token), stray)

    def end(self, *, stray: bool = False) -> str:
        """The run ends; the next push begins another."""
        text = self._take(self._detokenizer.finish(), stray)
        self._begun = False
        return text

    def _take(self, text: str, stray: bool) -> str:
        if stray and not self._begun:
            text = text.lstrip()
        self._begun = self._begun or bool(text)
        return text


class Faults:
    """Sentences on markup that was not as it should be, each once however often a reply repeats it."""

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}

    def add(self, sentence: str) -> None:
        self._sentences[sentence] = None

    def all(self) -> tuple[str, ...]:
        return tuple(self._sentences)


def header_text(tokens: Iterable[int], tokenizer: Tokenizer) -> str:
    """The text of a header's tokens."""
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode("utf-8", "replace")
