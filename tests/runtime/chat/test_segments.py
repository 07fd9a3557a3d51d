"""The two doors."""

import pytest

from serai.runtime.chat import PromptInvalid, Segment, encode
from serai.runtime.chat.segments import SegmentWriter
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer, merging_tokenizer, tokenizer_with

K3 = byte_tokenizer("kimi_k3")


def test_text_that_spells_a_marker_is_text_and_markup_is_the_control_token() -> None:
    """B76"""
    text, markup = Segment("<|open|>"), Segment("<|open|>", markup=True)
    assert encode([text], K3) == list(b"<|open|>")
    assert encode([markup], K3) == [K3.token_id("<|open|>")]


def test_each_segment_is_encoded_on_its_own() -> None:
    tokenizer = tokenizer_with({}, [("a", "b")])
    assert len(encode([Segment("ab")], tokenizer)) == 1
    assert len(encode([Segment("a"), Segment("b")], tokenizer)) == 2


def test_two_halves_of_a_marker_in_neighbouring_segments_stay_text() -> None:
    """B76"""
    tokenizer = merging_tokenizer("kimi_k3")
    ids = encode([Segment("<|op"), Segment("en|>")], tokenizer)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == "<|open|>"


def test_an_image_slot_is_one_segment_of_four_control_tokens_and_a_size() -> None:
    slot = Segment("<|media_begin|>image 64x48<|media_content|><|media_pad|><|media_end|>", markup=True)
    begin, content, pad, end = (K3.token_id(f"<|media_{name}|>") for name in ("begin", "content", "pad", "end"))
    assert encode([slot], K3) == [begin, *b"image 64x48", content, pad, end]


def test_a_writer_leaves_no_segment_for_empty_text_and_refuses_half_a_character() -> None:
    writer = SegmentWriter()
    writer.text("")
    assert writer.finish() == ()
    with pytest.raises(PromptInvalid, match="lone surrogate"):
        writer.text("a\udfff")
