"""Token ids to text, one at a time, never splitting a character."""

import codecs
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs of a tokenizer."""

    def token_bytes(self, token: int, *, control: bool = False) -> bytes: ...


class Detokenizer:
    """Turns the tokens of one text into pieces whose concatenation is the UTF-8 text of all their bytes.

    Bytes that can't be text become U+FFFD exactly as `bytes.decode("utf-8", "replace")` would do for the whole, however
    they were cut into tokens. At most three bytes wait: the beginning of a character that may still be completed.
    Control tokens have no text, unless `control` is true: then their names are written.
    """

    __slots__ = ("_control", "_decoder", "_tokenizer")

    def __init__(self, tokenizer: TokenBytes, *, control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def held_bytes(self) -> int:
        """How many bytes wait for the rest of their character, 0 to 3."""
        return len(self._decoder.getstate()[0])

    def twin(self) -> "Detokenizer":
        """A second one of the same text so far."""
        twin = Detokenizer(self._tokenizer, control=self._control)
        twin._decoder.setstate(self._decoder.getstate())
        return twin

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none. Raises `BadParameter` for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(token, control=self._control))

    def finish(self) -> str:
        """The text ends here: a character left incomplete becomes one U+FFFD. The next push begins a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
