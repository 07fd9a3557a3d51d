"""Which format a model has, and that a tokenizer which doesn't spell it is refused."""

import pytest

from serai.runtime.chat import ChatFormatMismatch, PromptOptions, chat_format_for, chat_format_id
from serai.runtime.chat.formats import K2_RELEASE_IDS, K3_RELEASE_IDS
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.chat.tokenizers_for_tests import K2_CONTROL, byte_tokenizer, tokenizer_with


class _OneDoor:
    """A tokenizer whose text door knows the control tokens too."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_tokens = tokenizer.special_tokens
        self.special_ids = tokenizer.special_ids
        self.token_id = tokenizer.token_id
        self.token_bytes = tokenizer.token_bytes

    def encode(self, text: str) -> list[int]:
        return [self.special_tokens[text]] if text in self.special_tokens else self._tokenizer.encode(text)


def test_a_model_has_the_format_of_its_family() -> None:
    k3 = chat_format_for("kimi_k3", byte_tokenizer("kimi_k3"))
    assert (k3.id, chat_format_id("kimi_k3")) == ("kimi-k3/1", "kimi-k3/1")
    assert k3.stop_ids == {k3.tokenizer.token_id("<|end_of_msg|>"), k3.tokenizer.token_id("[EOS]")}
    k2 = chat_format_for("kimi_linear", byte_tokenizer("kimi_linear"))
    assert (k2.id, chat_format_id("kimi_linear")) == ("kimi-k2/1", "kimi-k2/1")
    assert k2.stop_ids == {k2.tokenizer.token_id("<|im_end|>"), k2.tokenizer.token_id("[EOS]")}


def test_a_model_of_another_family_has_none() -> None:
    assert chat_format_id("llama") is None
    with pytest.raises(ChatFormatMismatch, match="model_type 'llama', only for kimi_k3, kimi_linear"):
        chat_format_for("llama", byte_tokenizer("kimi_k3"))


def test_the_tokenizer_config_of_the_other_family_is_told_apart() -> None:
    """B76"""
    with pytest.raises(ChatFormatMismatch, match=r"no control token <\|open\|> or .* those of kimi_linear"):
        chat_format_for("kimi_k3", byte_tokenizer("kimi_linear"))
    with pytest.raises(ChatFormatMismatch, match=r"no control token <\|im_user\|> or .* those of kimi_k3"):
        chat_format_for("kimi_linear", byte_tokenizer("kimi_k3"))


@pytest.mark.parametrize(("model_type", "release"), [("kimi_k3", K3_RELEASE_IDS), ("kimi_linear", K2_RELEASE_IDS)])
def test_markers_numbered_like_the_release_must_be_so_throughout(model_type: str, release: dict[str, int]) -> None:
    assert chat_format_for(model_type, tokenizer_with(dict(release)))
    for name in release:
        moved = {**release, name: 163700}
        with pytest.raises(ChatFormatMismatch):
            chat_format_for(model_type, tokenizer_with(moved))


def test_a_tokenizer_without_tool_markers_still_chats_but_half_of_them_is_a_mistake() -> None:
    turns = {name: 300 + place for place, name in enumerate(K2_CONTROL) if "tool" not in name}
    assert chat_format_for("kimi_linear", tokenizer_with(turns))
    with pytest.raises(ChatFormatMismatch, match="tool_calls_section_begin"):
        chat_format_for("kimi_linear", tokenizer_with({**turns, "<|tool_call_begin|>": 290}))


def test_a_text_door_that_knows_markers_is_refused() -> None:
    """B76"""
    with pytest.raises(ChatFormatMismatch, match="any user could forge a turn"):
        chat_format_for("kimi_k3", _OneDoor(byte_tokenizer("kimi_k3")))


def test_a_format_encodes_what_its_markup_renders() -> None:
    chat = chat_format_for("kimi_k3", byte_tokenizer("kimi_k3"))
    begun = chat.markup.begin(PromptOptions())
    ids = chat.encode(chat.markup.prompt(begun.cursor).segments)
    assert chat.tokenizer.token_bytes(ids[1]) == b"m"
    assert ids[-1] == chat.tokenizer.token_id("<|sep|>")
