"""A small byte-level BPE tokenizer in Kimi's form: ranks from 0, then 256 slots for control tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import trainers

from serai.runtime.bench.tiny_text import TINY_TEXT
from serai.runtime.models.config import ModelFamily
from serai.runtime.text.byte_bpe import ALPHABET, kimi_splitter
from serai.runtime.text.tokenizer_json import JSON_NAME

CONTROL_SLOTS = 256
LEAST_VOCABULARY = 256 + CONTROL_SLOTS
"""The byte tokens and the control tokens; whatever a vocabulary has beyond them is trained."""

BOS_SLOT = 0
STOP_SLOT = 2
"""Counted from the first control token, like every number below; the names are those the families' prompts need."""

_SHARED_NAMES = {0: "[BOS]", 1: "[EOS]", 9: "[EOT]", 254: "[UNK]", 255: "[PAD]"}
_NAMES = {
    ModelFamily.KIMI_K3: {
        2: "<|end_of_msg|>",
        3: "<|open|>",
        4: "<|close|>",
        5: "<|sep|>",
        18: "<|media_begin|>",
        19: "<|media_content|>",
        20: "<|media_end|>",
        21: "<|media_pad|>",
    },
    ModelFamily.KIMI_LINEAR: {
        2: "<|im_end|>",
        3: "<|im_user|>",
        4: "<|im_assistant|>",
        10: "<|im_system|>",
        11: "<|tool_calls_section_begin|>",
        12: "<|tool_calls_section_end|>",
        13: "<|tool_call_begin|>",
        14: "<|tool_call_argument_begin|>",
        15: "<|tool_call_end|>",
        17: "<|im_middle|>",
    },
}
_NOT_SPECIAL = frozenset(("<|open|>", "<|close|>", "<|sep|>"))
"""K3's markup tokens are added tokens without the `special` flag."""


def first_control_id(vocab_size: int) -> int:
    """Where the control tokens begin; they are the last of the vocabulary."""
    return vocab_size - CONTROL_SLOTS


def write_tiny_tokenizer(folder: Path, family: ModelFamily, vocab_size: int) -> None:
    """Train on `TINY_TEXT` and write `tokenizer.json` for a vocabulary of at least `LEAST_VOCABULARY` ids."""
    if vocab_size < LEAST_VOCABULARY:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {LEAST_VOCABULARY} byte and control tokens")
    first = first_control_id(vocab_size)
    splitter = kimi_splitter()
    splitter.train_from_iterator(
        [TINY_TEXT],
        trainers.BpeTrainer(vocab_size=first, initial_alphabet=sorted(ALPHABET), show_progress=False),
    )
    described: dict[str, Any] = json.loads(splitter.to_str())
    described["model"]["ignore_merges"] = True
    described["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    described["added_tokens"] = _control_tokens(family, first)
    (folder / JSON_NAME).write_text(json.dumps(described, ensure_ascii=False) + "\n", encoding="utf-8")


def _control_tokens(family: ModelFamily, first: int) -> list[dict[str, object]]:
    names = _SHARED_NAMES | _NAMES[family]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": first + slot, "content": name, **flags, "special": name not in _NOT_SPECIAL}
        for slot in range(CONTROL_SLOTS)
        for name in (names.get(slot, f"<|reserved_token_{first + slot}|>"),)
    ]
