"""What token ids say: whose words, in order, however little of the end is looked at."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serai.runtime.monitor.transcript import Passage, Voice, transcript
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer, tokenizer_with

K3 = byte_tokenizer("kimi_k3")
K2 = byte_tokenizer("kimi_linear")
TALK = (
    '<|open|>message role="user"<|sep|>What is 6·7?<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Six sevens.<|close|>think<|sep|>'
    "<|open|>response<|sep|>It is 42 🎉.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call name="add"<|sep|>{"a": 1}<|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>"
    '<|open|>message role="tool"<|sep|>two<|close|>message<|sep|><|end_of_msg|>'
)
SAID = (
    Passage(Voice.USER, "What is 6·7?"),
    Passage(Voice.REASONING, "Six sevens."),
    Passage(Voice.ANSWER, "It is 42 🎉."),
    Passage(Voice.CALL, '{"a": 1}'),
    Passage(Voice.TOOL, "two"),
)


def spelled(text: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Token ids of a text in which control tokens stand by name."""
    ids: list[int] = []
    while text:
        name = next((one for one in tokenizer.special_tokens if text.startswith(one)), None)
        if name is not None:
            ids.append(tokenizer.token_id(name))
            text = text[len(name) :]
        else:
            ids.extend(tokenizer.encode(text[0]))
            text = text[1:]
    return np.array(ids, np.int32)


IDS = spelled(TALK, K3)


def test_a_conversation_is_told_apart_by_its_tags() -> None:
    assert transcript(IDS, K3) == SAID


@given(st.integers(1, len(IDS)))
def test_the_end_reads_the_same_however_little_is_looked_at(window: int) -> None:
    shown = transcript(IDS, K3, window=window)
    whole = SAID[len(SAID) - len(shown) :]
    assert [one.voice for one in shown] == [one.voice for one in whole]
    assert shown[1:] == whole[1:]
    if shown:
        assert whole[0].text.endswith(shown[0].text)
        assert shown[0].is_cut or shown[0] == whole[0]


@given(st.integers(0, len(IDS)))
def test_a_reply_under_way_is_read_as_far_as_it_goes(end: int) -> None:
    shown = transcript(IDS[:end], K3)
    assert [one.voice for one in shown] == [one.voice for one in SAID[: len(shown)]]
    for one, whole in zip(shown, SAID, strict=False):
        assert whole.text.startswith(one.text)


@given(st.lists(st.integers(0, K3.vocab_size - 1), max_size=60), st.integers(1, 80))
def test_no_tokens_whatever_are_too_much(ids: list[int], window: int) -> None:
    shown = transcript(np.array(ids, np.int32), K3, window=window)
    assert all(one.text.strip() for one in shown)


def test_kimi_linears_roles_are_told_apart_too() -> None:
    talk = "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>ho"
    assert transcript(spelled(talk, K2), K2) == (Passage(Voice.USER, "hi"), Passage(Voice.ANSWER, "ho"))


@pytest.mark.parametrize(
    ("window", "expected"), [(9, Passage(Voice.TEXT, "abc")), (2, Passage(Voice.TEXT, "bc", True))]
)
def test_a_session_without_messages_is_one_text(window: int, expected: Passage) -> None:
    plain = tokenizer_with({})
    ids = np.array(plain.encode("abc"), np.int32)
    assert transcript(ids, plain, window=window) == (expected,)
    assert transcript(ids[:0], plain) == ()


@pytest.mark.parametrize(("tokenizer", "tag"), [(K3, "<|open|>"), (K2, "<|im_user|>")])
def test_a_tag_that_never_ends_is_not_read_from(tokenizer: Tokenizer, tag: str) -> None:
    """What is read, and what it costs, is bounded however long ago the last tag began."""
    ids = np.full(1_000_000, ord("a"), np.int32)
    ids[5] = tokenizer.token_id(tag)
    (shown,) = transcript(ids, tokenizer, window=100)
    assert shown.text == "a" * 100
    assert shown.is_cut
