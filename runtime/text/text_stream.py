"""The visible text of one turn's generation, token by token: characters never split, stop strings never shown."""

from collections.abc import Iterable, Sequence

from serai.runtime.text.detokenizer import Detokenizer
from serai.runtime.text.stops import StopMatcher
from serai.runtime.text.tokenizer import Tokenizer


class TextStream:
    """Text of the tokens of a generation, each piece as soon as it may be shown.

    `replay` brings it to where an earlier generate of the same turn stopped, so that a stop string may span the two.
    Without a tokenizer there is no text and so nothing to stop at.
    """

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._stops = stops
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been completed."""
        return self._matcher.stopped_by is not None

    def replay(self, ids: Iterable[int]) -> None:
        """Take tokens of the turn that are over: what they held back has been shown, a stop they completed is past."""
        for token in ids:
            self.push(token)
            if self.stopped:
                self._matcher = StopMatcher(self._stops)
        self._matcher.finish()

    def twin(self) -> "TextStream":
        """A second stream of the same text so far, to see what would become of it."""
        twin = TextStream(None, self._stops)
        twin._detokenizer = None if self._detokenizer is None else self._detokenizer.twin()
        twin._matcher = self._matcher.twin()
        return twin

    def push(self, token: int) -> str:
        """The text that the token makes visible."""
        if self._detokenizer is None:
            return ""
        visible, _ = self._matcher.push(self._detokenizer.push(token))
        return visible

    def finish(self) -> str:
        """The text still held back, when nothing follows."""
        if self._detokenizer is None or self.stopped:
            return ""
        visible, stopped = self._matcher.push(self._detokenizer.finish())
        return visible if stopped else visible + self._matcher.finish()
