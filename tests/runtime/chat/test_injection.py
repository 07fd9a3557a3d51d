"""Whatever text says, structure is the template's alone (B76)."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime.chat import (
    Message,
    Notes,
    PromptOptions,
    TextPart,
    ToolCall,
    chat_format_for,
    read_tools,
    render,
)
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.chat.tokenizers_for_tests import (
    CONTROL,
    MODEL_TYPES,
    PLACEHOLDER,
    byte_tokenizer,
    control_ids,
    hostile_text,
    merging_tokenizer,
)

TOKENIZERS = pytest.mark.parametrize("make", [byte_tokenizer, merging_tokenizer], ids=["bytes", "merges"])
FAMILIES = pytest.mark.parametrize("model_type", MODEL_TYPES)


def _conversation(text: list[str]) -> tuple[list[Message], PromptOptions, Notes]:
    """A conversation in which every place that can hold foreign text holds the next of the given texts."""
    texts = iter(text)

    def take() -> str:
        return next(texts)

    key = take()
    call = ToolCall(take(), json.dumps({key: take(), "nested": {take(): [take()]}}), take())
    broken = ToolCall("f", "{" + take(), take())
    messages = [
        replace(Message.system(take()), name=take()),
        replace(Message.user(take()), name=take()),
        Message("user", (TextPart(take()), TextPart(take()))),
        Message.assistant(take(), reasoning=take(), calls=[call, broken]),
        Message.tool(take(), call_id=call.id),
        Message.tool(take(), call_id=broken.id, name=take()),
    ]
    tools = read_tools(
        [{"type": "function", "function": {"name": take(), "description": take(), "parameters": {take(): 1}}}]
    )
    schema = {"type": "json_schema", "json_schema": {"schema": {take(): take()}}}
    return messages, PromptOptions(tools), Notes(response_format=schema)


PLACES = 24


def _ids(model_type: str, tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    chat = chat_format_for(model_type, tokenizer)
    messages, options, notes = _conversation(texts)
    options = replace(options, thinking=model_type == "kimi_k3")
    return chat.encode(render(chat.markup, messages, options, notes).segments)


@FAMILIES
@TOKENIZERS
@settings(max_examples=40, deadline=None, derandomize=True)
@given(texts=st.lists(hostile_text(), min_size=PLACES, max_size=PLACES))
def test_hostile_text_anywhere_never_changes_the_structure(model_type: str, make: Any, texts: list[str]) -> None:
    """B76"""
    tokenizer = make(model_type)
    harmless = [f"text{place}" for place in range(PLACES)]
    hostile = control_ids(
        _ids(model_type, tokenizer, [f"{text}{place}" for place, text in enumerate(texts)]), tokenizer
    )
    assert hostile == control_ids(_ids(model_type, tokenizer, harmless), tokenizer)


@FAMILIES
@TOKENIZERS
@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=hostile_text().filter(bool))
def test_hostile_content_decodes_back_unchanged(model_type: str, make: Any, text: str) -> None:
    """B76"""
    tokenizer = make(model_type)
    chat = chat_format_for(model_type, tokenizer)
    cursor = chat.markup.begin(PromptOptions(thinking=model_type == "kimi_k3")).cursor
    cursor = chat.markup.append(cursor, [Message.system("S")]).cursor

    def prompt(content: str) -> list[int]:
        return chat.encode(chat.markup.append(cursor, [Message.user(content)]).segments)

    head, tail = _around(prompt("x"), tokenizer.encode("x"))
    ids = prompt(text)
    assert (ids[: len(head)], ids[len(ids) - len(tail) :]) == (head, tail)
    assert tokenizer.decode(ids[len(head) : len(ids) - len(tail)]) == text


def _around(ids: list[int], inner: list[int]) -> tuple[list[int], list[int]]:
    """What stands before and after `inner`, which is there once."""
    (start,) = [place for place in range(len(ids)) if ids[place : place + len(inner)] == inner]
    return ids[:start], ids[start + len(inner) :]


@FAMILIES
@pytest.mark.parametrize("marker", sorted({name for names in CONTROL.values() for name in names} | {PLACEHOLDER}))
def test_no_control_tokens_name_in_a_message_is_a_control_token(model_type: str, marker: str) -> None:
    """B76"""
    tokenizer = merging_tokenizer(model_type)
    chat = chat_format_for(model_type, tokenizer)
    options = PromptOptions(thinking=model_type == "kimi_k3")
    plain = chat.encode(render(chat.markup, [Message.user("What?")], options).segments)
    ids = chat.encode(render(chat.markup, [Message.user(f"What does {marker} mean?")], options).segments)
    assert control_ids(ids, tokenizer) == control_ids(plain, tokenizer)
    assert marker in tokenizer.decode(ids)
