"""Text to token ids and back, with two doors.

`encode` is the door for text: whatever the text says, it becomes ordinary tokens, so nobody can write a control token
into a prompt. `token_id` is the door for markup: it gives the id of a control token by its exact name, and only code
that builds prompts calls it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

from blake3 import blake3
from tokenizers import models

from serai.runtime.errors import BadParameter, WeightsInvalid
from serai.runtime.text.byte_bpe import Vocabulary, from_alphabet
from serai.runtime.text.tiktoken_ranks import RANKS_NAME, read_tiktoken
from serai.runtime.text.tokenizer_json import JSON_NAME, read_tokenizer_json

PIECE_CHARS = 400_000
RUN_CHARS = 25_000
"""Kimi's own tokenizer cuts its input every `PIECE_CHARS` characters, and every `RUN_CHARS` inside a run of characters
that all are, or all aren't, white space. Tokens never cross a cut, so the ids of huge texts depend on these two."""

_SHORT_CHARS = 256
"""Up to here the plain call is quicker (9 µs against 90 for five characters). Longer texts go through the batch call,
which lets go of the interpreter lock while it works: an event loop must not stand still for a megabyte of prompt."""

_RUN = re.compile(r"\s+|\S+")  # for str, \s is what str.isspace says


class Tokenizer:
    """A model's vocabulary. Immutable, and safe to use from several threads."""

    __slots__ = ("_bpe", "_bytes", "_control_names", "_fingerprint", "_special_ids", "_special_tokens")

    def __init__(self, vocabulary: Vocabulary, vocab_size: int | None = None) -> None:
        """`vocab_size` is the model's: ids past the last token are then legal and mean no text."""
        known = 1 + max(max(vocabulary.tokens.values()), max(vocabulary.control.values(), default=0))
        size = known if vocab_size is None else vocab_size
        if known > size:
            raise WeightsInvalid(
                f"the tokenizer has ids up to {known - 1}, but the model's vocabulary ends at {size - 1}"
            )
        self._bytes = [b""] * size
        for token, number in vocabulary.tokens.items():
            self._bytes[number] = from_alphabet(token)
        self._special_tokens = MappingProxyType(dict(vocabulary.control))
        self._special_ids = frozenset(vocabulary.control.values())
        self._control_names = {number: name.encode() for name, number in vocabulary.control.items()}
        self._fingerprint = _fingerprint(vocabulary)
        self._bpe = vocabulary.splitter
        self._bpe.model = models.BPE(
            vocab=vocabulary.tokens, merges=vocabulary.merges, ignore_merges=vocabulary.whole_pieces
        )

    @staticmethod
    def present(folder: Path) -> bool:
        """Whether the folder has a tokenizer to load; a model without one can still be run on token ids."""
        return any((folder / name).is_file() for name in (JSON_NAME, RANKS_NAME))

    @classmethod
    def load(cls, folder: Path, vocab_size: int | None = None) -> "Tokenizer":
        """Read `tokenizer.json` if the folder has one, else `tiktoken.model` with `tokenizer_config.json`.

        Raises `WeightsInvalid` if there is neither, if a file is damaged, or if it has ids past the model's
        `vocab_size`.
        """
        if (folder / JSON_NAME).is_file():
            return cls(read_tokenizer_json(folder), vocab_size)
        if (folder / RANKS_NAME).is_file():
            return cls(read_tiktoken(folder, vocab_size), vocab_size)
        raise WeightsInvalid(
            f"{folder} has no tokenizer ({JSON_NAME} or {RANKS_NAME}); add the one of this model, or use token ids"
        )

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to this, exclusive."""
        return len(self._bytes)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the control tokens by their exact names, reserved slots included."""
        return self._special_tokens

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the control tokens; the text door never gives one of them."""
        return self._special_ids

    def fingerprint(self) -> str:
        """Blake3 (64 hex digits) of all that decides ids: tokens, merges, control tokens, and how text is split."""
        return self._fingerprint

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, of ordinary tokens only, even where the text spells a control token's name.

        Raises `BadParameter` for a lone surrogate, which no UTF-8 can carry.
        """
        if not isinstance(text, str):
            raise BadParameter(f"text must be a str, and is {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadParameter(
                f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which is "
                "half of a character and can't be encoded; send whole characters"
            ) from error
        if len(text) <= _SHORT_CHARS:
            ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
            return ids
        return [
            token
            for piece in chop(text)
            for token in self._bpe.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        ]

    def token_id(self, name: str) -> int:
        """The id of the control token with that exact name; `BadParameter` if there is none."""
        try:
            return self._special_tokens[name]
        except KeyError:
            raise BadParameter(
                f"this tokenizer has no control token {name!r}; the model's tokenizer files may belong to another model"
            ) from None

    def token_bytes(self, token: int, *, control: bool = False) -> bytes:
        """The bytes of one token, which may be part of a character only.

        Control tokens, and ids the model has but the tokenizer doesn't use, have none; with `control`, control tokens
        have their names. Raises `BadParameter` for an id outside the vocabulary.
        """
        if not 0 <= token < len(self._bytes):
            raise BadParameter(f"token ids run from 0 to {len(self._bytes) - 1}, and {token} is not one")
        if control and token in self._control_names:
            return self._control_names[token]
        return self._bytes[token]

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        """The text of all the tokens' bytes together; bytes that aren't UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(token, control=control) for token in ids).decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} ids, {len(self._special_ids)} of them control tokens>"


def chop(text: str) -> Iterator[str]:
    """The pieces that are encoded on their own, in order; most texts are one piece (see `PIECE_CHARS`)."""
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        if _may_have_long_run(piece):
            yield from _cut_long_runs(piece)
        else:
            yield piece


def _may_have_long_run(text: str) -> bool:
    """False only if no run is longer than `RUN_CHARS`: such a run would cover some whole block of half its length."""
    half = RUN_CHARS // 2
    for start in range(0, len(text) - half, half):
        run = _RUN.match(text, start)
        if run is not None and run.end() > start + half:
            return True
    return False


def _cut_long_runs(text: str) -> Iterator[str]:
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _fingerprint(vocabulary: Vocabulary) -> str:
    """Neither blanks nor line ends occur in the byte alphabet, so they separate without ambiguity."""
    by_id = sorted(vocabulary.tokens.items(), key=itemgetter(1))
    rules = [vocabulary.scheme, vocabulary.whole_pieces, sorted(vocabulary.control.items())]
    digest = blake3(json.dumps(rules).encode())
    digest.update("\n".join(f"{number} {token}" for token, number in by_id).encode())
    digest.update(b"\n\n")
    digest.update("\n".join(f"{left} {right}" for left, right in vocabulary.merges).encode())
    return digest.hexdigest()
