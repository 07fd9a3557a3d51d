"""Byte-level BPE as Kimi uses it: the vocabulary as a value, its byte alphabet, and how text is split beforehand."""

from dataclasses import dataclass

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Splitter

KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        # a word: at most one leading sign, capitals then small letters (either run may be the empty one), 's and kin
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Where Kimi's tokenizers cut text before merging, in the syntax of Oniguruma (`&&` intersects two classes)."""

PROBE = (
    "Don't we'LL  camelCase HTTPServer naïve 東京tower 漢字かな한국 12345678 x=1;\t// end/\n\r\n"
    "  \n tail  \u00a0\u3000wide 🙂🙂 e\u0301 a\u001cb #[1,2]\r\n   "
)
"""Text on which the known other patterns (GPT-2, cl100k, o200k, Llama 3, Qwen) cut differently from Kimi's."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything that decides which ids a text becomes.

    `tokens` maps ordinary tokens, written in the byte alphabet (see `to_alphabet`), to ids; `merges` are in order of
    priority; `control` maps the names of control tokens to their ids, none of which is in `tokens`. `splitter` is a
    tokenizer of an empty vocabulary that carries the pre-tokenizer, `scheme` says in text how it cuts, and
    `whole_pieces` says that a piece which is a token as a whole needs no merges.
    """

    tokens: dict[str, int]
    merges: list[tuple[str, str]]
    control: dict[str, int]
    splitter: Splitter
    scheme: str
    whole_pieces: bool


def kimi_splitter() -> Splitter:
    """A tokenizer of an empty vocabulary that cuts text where Kimi's do."""
    splitter = Splitter(models.BPE())
    splitter.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return splitter


def splits_like_kimi(splitter: Splitter) -> bool:
    """Whether it cuts `PROBE` as Kimi's pattern does, so that one which is only spelled otherwise passes."""
    if splitter.pre_tokenizer is None or splitter.normalizer is not None:
        return False
    ours = kimi_splitter().pre_tokenizer
    found: bool = splitter.pre_tokenizer.pre_tokenize_str(PROBE) == ours.pre_tokenize_str(PROBE)
    return found


def _alphabet() -> dict[int, str]:
    """GPT-2's way to write bytes as visible characters: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(hidden)}


_TO_ALPHABET = _alphabet()
_FROM_ALPHABET = {ord(char): byte for byte, char in _TO_ALPHABET.items()}

ALPHABET = frozenset(_TO_ALPHABET.values())
"""The 256 characters that stand for the bytes; a vocabulary that lacks one would drop text silently."""


def to_alphabet(token: bytes) -> str:
    """The token written in the byte alphabet."""
    return token.decode("latin-1").translate(_TO_ALPHABET)


def from_alphabet(token: str) -> bytes:
    """The bytes of a token written in the byte alphabet; `ValueError` if it holds another character."""
    return token.translate(_FROM_ALPHABET).encode("latin-1")
