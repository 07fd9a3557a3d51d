"""What a caller gives to be read, text or token ids, as token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from serai.runtime.errors import BadParameter
from serai.runtime.text.tokenizer import Tokenizer

ENCODE_INLINE_CHARACTERS = 2_000
"""Longer texts are tokenised on a worker thread: at about 1 µs a character this bounds what the loop pays to 2 ms."""


@dataclass(frozen=True, slots=True)
class Appended:
    """What an append did: how many tokens it added, how many of them were computed and how many taken from a state
    that was known already, and the position reached."""

    tokens: int
    prefilled: int
    reused: int
    position: int


def need(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer; raises `BadParameter` when the model has none."""
    if tokenizer is None:
        raise BadParameter("this model's folder has no tokenizer, so text can't be read; give token ids instead")
    return tokenizer


async def token_ids(
    content: str | Sequence[int] | NDArray[np.integer], tokenizer: Tokenizer | None, vocab_size: int
) -> NDArray[np.int32]:
    """The content as int32 `[n]`. Raises `BadParameter` for what is neither text nor ids of this vocabulary."""
    if isinstance(content, str):
        encode = need(tokenizer).encode
        if len(content) <= ENCODE_INLINE_CHARACTERS:
            return np.array(encode(content), dtype=np.int32)
        return np.array(await anyio.to_thread.run_sync(encode, content), dtype=np.int32)
    ids = np.asarray(content)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise BadParameter(
            f"append takes text or one row of integer token ids, not an array of {ids.dtype} with shape {ids.shape}"
        )
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise BadParameter(f"token id {wrong} is outside this model's vocabulary of 0 to {vocab_size - 1}")
    return ids.astype(np.int32)
