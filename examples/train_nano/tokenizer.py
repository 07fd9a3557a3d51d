"""Byte-level BPE of the nano model: K3's pre-tokenizer pattern, 2,048 entries, K3's special tokens at the end.

`python -m examples.train_nano.tokenizer OUT` trains it on the nano language and writes OUT/tokenizer.json and
OUT/tokenizer_config.json.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .markup import SPECIAL_TOKENS, render

VOCAB_SIZE = 2048
NOT_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")  # declared special:false in the release

# The release's splitting rule (eight alternatives, in this order).
_NOT_HAN = "&&[^\\p{Han}]]"
_UPPER = "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}" + _NOT_HAN
_LOWER = "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}" + _NOT_HAN
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LEAD = "[^\\r\\n\\p{L}\\p{N}]?"
PATTERN = "|".join(
    (
        "[\\p{Han}]+",
        _LEAD + _UPPER + "*" + _LOWER + "+" + _SUFFIX,
        _LEAD + _UPPER + "+" + _LOWER + "*" + _SUFFIX,
        "\\p{N}{1,3}",
        " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*",
        "\\s*[\\r\\n]+",
        "\\s+(?!\\S)",
        "\\s+",
    )
)


class NanoTokenizer:
    """The trained tokenizer, with text and control tokens reached by different doors."""

    def __init__(self, folder: Path) -> None:
        self.full = Tokenizer.from_file(str(folder / "tokenizer.json"))
        bare = json.loads((folder / "tokenizer.json").read_text())
        bare["added_tokens"] = []
        self._bare = Tokenizer.from_str(json.dumps(bare))
        self._special = {token: self.full.token_to_id(token) for token in SPECIAL_TOKENS}
        self._short = lru_cache(maxsize=65536)(self._encode)

    def _encode(self, text: str) -> list[int]:
        return list(self._bare.encode(text, add_special_tokens=False).ids)

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text; nothing in it can become a control token."""
        return self._short(text) if len(text) < 64 else self._encode(text)

    def text_ids_and_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._bare.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def special_id(self, token: str) -> int:
        return self._special[token]

    def decode(self, ids: list[int]) -> str:
        return str(self.full.decode(ids, skip_special_tokens=False))


def corpus(seed: int, sentences: int) -> list[str]:
    """Text to learn merges from: the language, plus each word alone so that rare names become one token too."""
    from serai.runtime.bench import recall_facts as facts
    from serai.runtime.bench import recall_words as words

    from . import data

    rng = Random(seed)
    lines: list[str] = []
    for _ in range(sentences):
        fact = facts.random_fact(rng, set())
        lines += [facts.told(rng, fact), facts.question(rng, *fact.key), fact.answer(), facts.corrected(rng, fact)]
        lines += [facts.filler(rng), facts.count_question(rng, "Anna")]
    lines += [text for text in data.SYSTEMS + data.READ + data.NOTED + data.NOTEBOOK_OPENINGS for _ in range(100)]
    lines += [text for pair in data.SMALL_TALK for text in pair for _ in range(100)]
    alone = words.NAMES + words.CITIES + words.JOBS + words.ANIMALS + words.FOODS + words.COLOURS + words.OBJECTS
    alone += words.ROOMS + words.SECRETS + words.MONTHS
    lines += [" " + word for word in alone for _ in range(400)]
    plain = ["message", "think", "response", "user", "assistant", "system", "tool", "tools", "call", "argument", "json"]
    plain += [" role", " type", " tool", " index", " key", '="', '"', "string", "lookup", "what", "of", "list", "coins"]
    plain += [
        "tool-declare",
        "thinking-effort",
        "object",
        "number",
        "low",
        "high",
        "max",
        "medium",
        "Correction",
        "Noted",
    ]
    plain += [
        " The user asks for the",
        " The user corrects the notebook.",
        " I need the tool. The tool gave me the answer.",
    ]
    plain += [
        " The user gave me a notebook. The user wants me to repeat the words. The user makes small talk.",
        "Repeat: Again: the",
    ]
    plain += render([], thinking=True, thinking_effort="max")[9].text, render([], tools=[data.LOOKUP_TOOL])[9].text
    for text in plain:
        lines += [text] * 1000
    # Two-digit pieces only: a thousand three-digit entries would each be seen too rarely to be learned.
    lines = ["".join(" " if c.isdigit() else c for c in line) for line in lines]
    lines += [f"{number:02d}" for number in range(100) for _ in range(1000)]
    return lines


def train(folder: Path, seed: int = 1) -> None:
    model = models.BPE(ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, 20000), trainer)
    for token in SPECIAL_TOKENS:
        added = AddedToken(token, special=token not in NOT_SPECIAL, normalized=False)
        tokenizer.add_special_tokens([added]) if token not in NOT_SPECIAL else tokenizer.add_tokens([added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    decoder = {
        str(ids[token]): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": token not in NOT_SPECIAL,
        }
        for token in SPECIAL_TOKENS
    }  # fmt: skip
    config = {
        "added_tokens_decoder": decoder,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    train(Path(sys.argv[1]))
