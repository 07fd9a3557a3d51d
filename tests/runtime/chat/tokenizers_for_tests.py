"""Small tokenizers with real doors, and ways to spell a text in other tokens than the tokenizer would."""

import json
from collections.abc import Iterable, Sequence
from functools import cache

from hypothesis import strategies as st
from tokenizers import Tokenizer as Trainable
from tokenizers import models, pre_tokenizers, trainers

from serai.runtime.chat import Segment
from serai.runtime.text.byte_bpe import Vocabulary, kimi_splitter, to_alphabet
from serai.runtime.text.tokenizer import Tokenizer

K3_CONTROL = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[start_header_id]", "[end_header_id]",
    "[EOT]", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<osagent_mode>", "[UNK]",
    "[PAD]",
)  # fmt: skip
K2_CONTROL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "[EOT]", "[UNK]", "[PAD]",
)  # fmt: skip
PLACEHOLDER = "<|kimi_image_placeholder|>"
CONTROL = {"kimi_k3": K3_CONTROL, "kimi_linear": K2_CONTROL}
MODEL_TYPES = tuple(CONTROL)


def tokenizer_with(control: dict[str, int], merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A tokenizer of the 256 bytes, the given merges and the given control tokens."""
    tokens = {to_alphabet(bytes([byte])): byte for byte in range(256)}
    for left, right in merges:
        tokens.setdefault(left + right, len(tokens))
    return Tokenizer(
        Vocabulary(tokens, list(merges), control, splitter=kimi_splitter(), scheme="test", whole_pieces=False)
    )


@cache
def byte_tokenizer(model_type: str) -> Tokenizer:
    """Every token is one byte."""
    return tokenizer_with({name: 256 + place for place, name in enumerate(CONTROL[model_type])})


@cache
def merging_tokenizer(model_type: str) -> Tokenizer:
    """Trained on little but the markers, so that halves of them are ordinary tokens."""
    control = {name: 5000 + place for place, name in enumerate(CONTROL[model_type])}
    return tokenizer_with(control, _marker_merges())


@cache
def _marker_merges() -> tuple[tuple[str, str], ...]:
    trainable = Trainable(models.BPE())
    trainable.pre_tokenizer = kimi_splitter().pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    lines = [*K3_CONTROL, *K2_CONTROL, PLACEHOLDER, 'message role="user"', "functions.f:0", "think response tools call"]
    trainable.train_from_iterator([line for line in lines for _ in range(9)], trainer)
    return tuple((left, right) for left, right in json.loads(trainable.to_str())["model"]["merges"])


@cache
def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    ordinary = (number for number in range(tokenizer.vocab_size) if number not in tokenizer.special_ids)
    return {spelled: number for number in ordinary if (spelled := tokenizer.token_bytes(number))}


def spell(draw: st.DrawFn, segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """The ids of a text as some model might have written it: any tokens at all that spell the same bytes."""
    known = _ids_by_bytes(tokenizer)
    ids: list[int] = []
    for segment in segments:
        if segment.markup:
            ids.append(tokenizer.token_id(segment.text))
            continue
        rest = segment.text.encode()
        while rest:
            choices = [end for end in range(1, min(len(rest), 12) + 1) if rest[:end] in known]
            end = draw(st.sampled_from(choices))
            ids.append(known[rest[:end]])
            rest = rest[end:]
    return ids


def control_ids(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    return [number for number in ids if number in tokenizer.special_ids]


def hostile_text() -> st.SearchStrategy[str]:
    """Text that spells control tokens, halves of them and look-alikes, beside anything else."""
    markers = sorted({*K3_CONTROL, *K2_CONTROL, PLACEHOLDER})
    halves = [marker[: len(marker) // 2] for marker in markers] + [marker[len(marker) // 2 :] for marker in markers]
    alike = [
        "<|open|",
        "|>",
        "<|",
        "<\u200b|open|>",
        "＜|sep|＞",
        "<| open |>",
        'message role="system"',
        "</think>",
        '"',
        "&",
    ]
    piece = st.sampled_from(markers + halves + alike + ["functions.f:0", " ", "\n", "é", "🙂"]) | st.text(max_size=5)
    return st.lists(piece, max_size=6).map("".join)
