"""Reading `tokenizer.json`, the file of the `tokenizers` library, as a byte-level BPE vocabulary."""

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Splitter

from serai.runtime.errors import WeightsInvalid
from serai.runtime.text.byte_bpe import ALPHABET, Vocabulary, splits_like_kimi

JSON_NAME = "tokenizer.json"

log = logging.getLogger(__name__)


def read_tokenizer_json(folder: Path) -> Vocabulary:
    """The vocabulary of the file in `folder`.

    The file's own pre-tokenizer is kept, for the model was trained with it; one that cuts text otherwise than Kimi's
    is a warning, since conversions are known to put a generic pattern there. Every added token becomes a control token
    and leaves the text vocabulary, with the merges that lead to it. Raises `WeightsInvalid` for a file that isn't
    byte-level BPE.
    """
    path = folder / JSON_NAME
    try:
        described: dict[str, Any] = json.loads(path.read_bytes())
        model: dict[str, Any] = described["model"]
        vocab: dict[str, int] = dict(model["vocab"])
        control = {str(added["content"]): int(added["id"]) for added in described.get("added_tokens") or ()}
        merges = [_pair(merge) for merge in model["merges"]]
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsInvalid(f"{path} is not a tokenizer with a BPE model: {error}") from error
    if len(set(control.values())) < len(described.get("added_tokens") or ()):
        raise WeightsInvalid(f"{path} gives two added tokens one id or one name; each must be used once")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise WeightsInvalid(f"{path} has a BPE model with {option}={model[option]!r}; only plain BPE can be run")

    control_ids = set(control.values())
    tokens = {token: number for token, number in vocab.items() if number not in control_ids}
    if len(set(tokens.values())) < len(tokens) or any(number < 0 for number in tokens.values()):
        raise WeightsInvalid(f"{path} gives two tokens one id, or a negative one; ids must be distinct and from 0")
    missing = len(ALPHABET - tokens.keys())
    if missing:
        raise WeightsInvalid(f"{path} lacks {missing} of the 256 byte tokens; serai reads byte-level BPE only")
    foreign = next((token for token in tokens if not ALPHABET.issuperset(token)), None)
    if foreign is not None:
        raise WeightsInvalid(f"{path} has the token {foreign!r}, which is not written in the byte alphabet")

    splitter = _splitter(path, described)
    if not splits_like_kimi(splitter):
        log.warning("%s does not split text as Kimi's tokenizers do; ids may differ from those the model knows", path)
    return Vocabulary(
        tokens=tokens,
        merges=[pair for pair in merges if _usable(pair, tokens)],
        control=control,
        splitter=splitter,
        scheme=json.dumps([described.get("normalizer"), described.get("pre_tokenizer")], sort_keys=True),
        whole_pieces=bool(model.get("ignore_merges")),
    )


def _pair(merge: Any) -> tuple[str, str]:
    """A merge is written as two strings or, in older files, as one with a space between them."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return str(left), str(right)


def _usable(pair: tuple[str, str], tokens: dict[str, int]) -> bool:
    left, right = pair
    return left in tokens and right in tokens and left + right in tokens


def _splitter(path: Path, described: dict[str, Any]) -> Splitter:
    bare = {
        "version": described.get("version", "1.0"),
        "added_tokens": [],
        "normalizer": described.get("normalizer"),
        "pre_tokenizer": described.get("pre_tokenizer"),
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        return Splitter.from_str(json.dumps(bare))
    except Exception as error:  # the library raises bare Exception for whatever it can't read
        raise WeightsInvalid(f"{path} has a normalizer or pre_tokenizer that can't be read: {error}") from error
