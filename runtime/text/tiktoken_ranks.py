"""Reading `tiktoken.model`, the rank file that Kimi checkpoints ship, with the names in `tokenizer_config.json`.

The file has one line a token, `base64(bytes) SP rank`; a token's rank is its id and its priority in merging. The ids
after the last rank are 256 reserved slots; `tokenizer_config.json` names those that mean something, and the names
differ between models that share one rank file.
"""

import binascii
import json
import logging
from pathlib import Path
from typing import Any

from serai.runtime.errors import WeightsInvalid
from serai.runtime.text.byte_bpe import KIMI_PATTERN, Vocabulary, kimi_splitter, to_alphabet

RANKS_NAME = "tiktoken.model"
NAMES_NAME = "tokenizer_config.json"
RESERVED_SLOTS = 256

log = logging.getLogger(__name__)


def read_tiktoken(folder: Path, vocab_size: int | None) -> Vocabulary:
    """The vocabulary of the rank file in `folder`; `vocab_size`, where known, ends the reserved slots early.

    Raises `WeightsInvalid` for a damaged file.
    """
    path = folder / RANKS_NAME
    ranks = read_ranks(path)
    first = len(ranks)
    last = first + RESERVED_SLOTS if vocab_size is None else min(first + RESERVED_SLOTS, vocab_size)
    names = {slot: f"<|reserved_token_{slot}|>" for slot in range(first, last)}
    names |= _read_names(folder / NAMES_NAME, first_id=first)
    control = {name: slot for slot, name in sorted(names.items())}
    if len(control) < len(names):
        raise WeightsInvalid(f"{folder / NAMES_NAME} gives one name to two tokens; each name must be used once")
    merges, underivable = derive_merges(ranks)
    if underivable:
        log.warning(
            "%s: %d of %d tokens can't be reached by merges; they are used only where a whole piece is one of them",
            path,
            underivable,
            len(ranks),
        )
    return Vocabulary(
        tokens={to_alphabet(token): rank for token, rank in ranks.items()},
        merges=[(to_alphabet(left), to_alphabet(right)) for left, right in merges],
        control=control,
        splitter=kimi_splitter(),
        scheme=KIMI_PATTERN,
        whole_pieces=True,
    )


def read_ranks(path: Path) -> dict[bytes, int]:
    """Tokens and their ranks, in the order of rank: 0, 1, 2 and so on without a gap, all 256 bytes among them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = binascii.a2b_base64(encoded, strict_mode=True)
            ranks.setdefault(token, int(rank))
        except ValueError as error:  # covers binascii.Error
            raise WeightsInvalid(f"{path} line {number} is not a base64 token, a space and its rank") from error
        if not token or ranks[token] != int(rank):
            raise WeightsInvalid(f"{path} line {number} repeats a token or has an empty one; each must appear once")
    ordered = dict(sorted(ranks.items(), key=lambda item: item[1]))
    if list(ordered.values()) != list(range(len(ordered))):
        raise WeightsInvalid(f"{path} has {len(ordered)} tokens whose ranks are not 0 to {len(ordered) - 1}")
    missing = sum(bytes((byte,)) not in ordered for byte in range(256))
    if missing:
        raise WeightsInvalid(f"{path} lacks {missing} of the 256 single bytes, so some text could not be written")
    return ordered


def derive_merges(ranks: dict[bytes, int]) -> tuple[list[tuple[bytes, bytes]], int]:
    """The merges that merging by lowest rank performs, in order, and how many tokens it can never produce.

    `tokenizers` wants pairs where the file has only results. Merging inside a token's own bytes by lower ranks alone
    ends in the one pair that can ever become the token: before its rank is reached nothing merges across its borders,
    so any text around it goes through the same steps.
    """
    merges = []
    underivable = 0
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = _merge_below(token, ranks, rank)
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
        else:
            underivable += 1
    return merges, underivable


def _merge_below(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """The bytes of `token` merged by lowest rank first, leftmost first, using only ranks below `limit`."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        best, best_at = limit, -1
        for at in range(len(parts) - 1):
            rank = ranks.get(parts[at] + parts[at + 1], limit)
            if rank < best:
                best, best_at = rank, at
        if best_at < 0:
            break
        parts[best_at : best_at + 2] = [parts[best_at] + parts[best_at + 1]]
    return parts


def _read_names(path: Path, *, first_id: int) -> dict[int, str]:
    """The named control tokens by id."""
    if not path.is_file():
        log.warning("%s is missing: control tokens keep their reserved names, and no chat format will fit", path)
        return {}
    try:
        entries: dict[str, Any] = json.loads(path.read_bytes()).get("added_tokens_decoder", {})
        names = {int(slot): str(entry["content"]) for slot, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightsInvalid(
            f"{path} has no readable added_tokens_decoder; it maps ids to objects with `content`"
        ) from error
    for slot, name in names.items():
        if slot < first_id:
            raise WeightsInvalid(
                f"{path} names id {slot} {name!r}, but {RANKS_NAME} beside it uses the ids below {first_id} for text; "
                "the two files belong to different models"
            )
    return names
