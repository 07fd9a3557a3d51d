"""Make `small_tokenizer/`: a byte-level BPE of a few hundred tokens in both of the formats that are read.

    python tests/data/make_small_tokenizer.py

It has Kimi K3's layout in small: ranks from 0, then 256 reserved slots of which some are named. Training is plain
Python with every tie decided, so that the files come out the same everywhere.
"""

import base64
import itertools
import json
from collections import Counter
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from serai.runtime.text.byte_bpe import KIMI_PATTERN, to_alphabet

FOLDER = Path(__file__).parent / "small_tokenizer"
TOKENS = 640
NAMED = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Names of reserved slots, counted from the first one, as Kimi K3 names them."""
NOT_SPECIAL = ("<|open|>", "<|close|>", "<|sep|>")

CORPUS = """
A caravanserai is where long journeys rest. The travellers unload, water the animals, and tell each other what the
road ahead is like; in the morning the caravan goes on, exactly as it came, and for almost nothing. Don't we'll I'm
they've it's he'd. The message is a response; think, then open the door and close it. system user assistant tool name
type value index argument message response think call tools index="1" role="user" type="string" key="city"

def resume(session, node):
    if node is None:
        return session.root
    for token in session.tokens[node.start : node.end]:
        session.append(token)
    return {"id": node.id, "text": "hello", "items": [1, 2, 3], "done": true}

一个商队旅馆是漫长旅途休息的地方。旅人们卸下行李，给牲口喂水。世界你好，世界很大。東京は大きい都市です。
Привет, мир! Караван идёт дальше, и привет всем. Ein Gasthaus für müde Reisende, naïve café façade über.
🙂🚀🙂🚀🙂 12345 67 890 1234567 2024-01-01 0.125 1,000,000

\tTabs\tand  double  spaces and    more    than    that
\r\nlines\r\n\r\n
"""


def train(corpus: str, tokens: int) -> dict[bytes, int]:
    """Ranks of `tokens` tokens: the 256 bytes, then the most frequent pair again and again, the smallest on ties."""
    split = pre_tokenizers.Split(Regex(KIMI_PATTERN), behavior="isolated", invert=False)
    pieces = Counter(piece.encode() for piece, _ in split.pre_tokenize_str(corpus))
    words = [([bytes((byte,)) for byte in piece], times) for piece, times in sorted(pieces.items())]
    ranks = {bytes((byte,)): byte for byte in range(256)}
    while len(ranks) < tokens:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, times in words:
            for pair in itertools.pairwise(parts):
                pairs[pair] += times
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.setdefault(left + right, len(ranks))
        for parts, _ in words:
            at = 0
            while at < len(parts) - 1:
                if parts[at] == left and parts[at + 1] == right:
                    parts[at : at + 2] = [left + right]
                at += 1
    return ranks


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """For each token, the two parts that merging its bytes by lower ranks ends in: slow, and by the definition."""
    merges = []
    for token, rank in ranks.items():
        parts = [bytes((byte,)) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in itertools.pairwise(parts)]
            at = joined.index(min(joined))
            if joined[at] >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def describe(ranks: dict[bytes, int]) -> dict[str, object]:
    """The same tokenizer as `tokenizer.json` has it."""
    first = len(ranks)
    names = {slot: f"<|reserved_token_{first + slot}|>" for slot in range(256)} | {n: name for name, n in NAMED.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first + slot, "content": name, **flags, "special": name not in NOT_SPECIAL}
            for slot, name in sorted(names.items())
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": KIMI_PATTERN}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "ignore_merges": True,
            "vocab": {to_alphabet(token): rank for token, rank in ranks.items()},
            "merges": [[to_alphabet(left), to_alphabet(right)] for left, right in merges_of(ranks)],
        },
    }


def main() -> None:
    ranks = train(CORPUS, TOKENS)
    FOLDER.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (FOLDER / "tiktoken.model").write_text("".join(lines))
    named = {
        str(len(ranks) + slot): {"content": name, "special": name not in NOT_SPECIAL} for name, slot in NAMED.items()
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}, indent=1) + "\n")
    (FOLDER / "tokenizer.json").write_text(json.dumps(describe(ranks), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
