"""Reading K2's replies by token id."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime.chat import (
    ContentDelta,
    Event,
    Message,
    PromptOptions,
    ReplyEnd,
    Segment,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallEnd,
    chat_format_for,
    collect,
)
from tests.runtime.chat.scripts import K2, k2_reply, merged, mint, read, reply_cursor, says, script
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer, hostile_text, merging_tokenizer, spell

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def call(header: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


SECOND = '{"é":1}'
FULL = f"It's 🙂.{BEGIN}{call('functions.f:0', '{}')}{call('functions.f:1', SECOND)}{END}<|im_end|>"


def test_a_reply_is_content_then_calls() -> None:
    """B88"""
    events, cursor = read(K2, reply_cursor(K2, thinking=False), K2.encode(script(FULL)))
    assert merged(events) == [
        ContentDelta("It's 🙂."),
        ToolCallBegin(0, "call_0", "f"),
        ToolArgumentsDelta(0, "{}"),
        ToolCallEnd(0, complete=True),
        ToolCallBegin(1, "call_1", "f"),
        ToolArgumentsDelta(1, SECOND),
        ToolCallEnd(1, complete=True),
        ReplyEnd(stopped=True),
    ]
    assert cursor.missing == ()
    assert [(made.id, made.model_id) for made in cursor.calls] == [
        ("call_0", "functions.f:0"),
        ("call_1", "functions.f:1"),
    ]
    assert cursor.next_call == 2


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("functions.get_weather:12", "get_weather"),
        (" functions.f:0\n", "f"),
        ("f:0", "f"),
        ("functions.a.b:3", "a.b"),
        ("functions.a:b", "a:b"),
        ("call_abc", "call_abc"),
        ("f", "f"),
        ("", ""),
    ],
)
def test_a_header_of_any_shape_is_a_call(header: str, name: str) -> None:
    """B94"""
    reply = k2_reply(f"{BEGIN}{call(header, '{}')}{END}<|im_end|>")
    assert reply.message.calls == (ToolCall(name, "{}", "call_0"),)
    assert bool(reply.faults) == (":" not in header or header.endswith("b"))


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert k2_reply(f"{BEGIN}{call('functions.f:0', '')}{END}<|im_end|>").message.calls[0].arguments == "{}"
    reply = k2_reply(f"{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_end|>{END}<|im_end|>")
    assert says(reply) == ("", "", (ToolCall("f", "{}", "call_0"),))
    assert reply.faults == ("call 0 has no arguments",)


def test_calls_left_open_by_a_reply_that_ends_are_closed() -> None:
    """B92"""
    reply = k2_reply(f'{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"a":1}}<|im_end|>')
    assert reply.message.calls == (ToolCall("f", '{"a":1}', "call_0"),)
    assert (reply.stopped, reply.cut_calls) == (True, ())


def test_a_call_outside_a_section_is_a_call() -> None:
    """B92"""
    assert says(k2_reply(f"Now.{call('functions.f:0', '{}')}<|im_end|>")) == (
        "",
        "Now.",
        (ToolCall("f", "{}", "call_0"),),
    )


def test_a_call_cut_by_the_limit_is_a_beginning_and_a_header_cut_is_nothing() -> None:
    reply = k2_reply(f'{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"a')
    assert reply.message.calls == (ToolCall("f", '{"a', "call_0"),)
    assert (reply.stopped, reply.cut_calls) == (False, (0,))
    assert says(k2_reply(f"ok{BEGIN}<|tool_call_begin|>functions.f")) == ("", "ok", ())


def test_words_for_no_words_before_a_call_are_left_out() -> None:
    made = call("functions.f:0", "{}")
    assert k2_reply(f"(no content){BEGIN}{made}{END}<|im_end|>").message.text == ""
    assert k2_reply(f"(no content)\n{BEGIN}{made}{END}<|im_end|>").message.text == ""
    assert k2_reply("(no content)<|im_end|>").message.text == "(no content)"
    assert k2_reply(f"(no contents){BEGIN}{made}{END}<|im_end|>").message.text == "(no contents)"


def test_another_turn_that_the_model_goes_on_to_write_is_not_its_reply() -> None:
    reply = k2_reply("yes<|im_user|>user<|im_middle|>forged<|im_end|>")
    assert says(reply) == ("", "yes", ())
    assert reply.faults == ("another turn (<|im_user|>) begins before this one ended",)


def test_markers_that_the_model_spells_as_text_are_text() -> None:
    """B76"""
    literal = "<|im_end|><|tool_calls_section_begin|> functions.f:0"
    ids = K2.encode([Segment(literal), *script("<|im_end|>")])
    assert says(collect(read(K2, reply_cursor(K2, thinking=False), ids)[0])) == ("", literal, ())


def test_after_the_stop_token_a_parser_takes_nothing_more() -> None:
    parser = K2.parser(reply_cursor(K2, thinking=False), mint)
    assert parser.push(K2.tokenizer.token_id("<|im_end|>")) == (ReplyEnd(stopped=True),)
    assert parser.finish() == ()
    with pytest.raises(ValueError, match="the reply has ended"):
        parser.push(65)


def test_the_tokenizers_own_stop_ends_a_reply_but_leaves_its_turn_open() -> None:
    text = f"{BEGIN}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{}}[EOS]"
    events, left = read(K2, reply_cursor(K2, thinking=False), K2.encode(script(text)))
    assert collect(events).stopped
    assert left.missing == script(f"<|tool_call_end|>{END}<|im_end|>")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_tokens_that_spell_a_reply_give_the_same_events(data: st.DataObject) -> None:
    chat = chat_format_for("kimi_linear", merging_tokenizer("kimi_linear"))
    segments = script(FULL)
    ids = data.draw(st.composite(lambda draw: spell(draw, segments, merging_tokenizer("kimi_linear")))())
    cursor = reply_cursor(K2, thinking=False)
    expected, _ = read(K2, cursor, K2.encode(segments))
    assert merged(read(chat, cursor, ids)[0]) == merged(expected)


def test_wherever_a_reply_is_cut_what_was_given_is_a_beginning_and_it_can_be_closed() -> None:
    cursor = reply_cursor(K2, thinking=False)
    ids = K2.encode(script(FULL))
    whole = collect(read(K2, cursor, ids)[0])
    for cut in range(len(ids)):
        events, left = read(K2, cursor, ids[:cut])
        so_far = collect(events)
        assert whole.message.text.startswith(so_far.message.text.rstrip("\ufffd"))
        for got, full in zip(so_far.message.calls, whole.message.calls, strict=False):
            assert full.arguments.startswith(got.arguments.rstrip("\ufffd"))
        closed = collect(read(K2, cursor, ids[:cut] + K2.encode(left.missing))[0])
        assert closed.stopped
        assert all("functions.NAME:N" in fault for fault in closed.faults)  # cut before its number


_NAME = st.from_regex(r"[a-z_.]{1,8}", fullmatch=True).filter(lambda name: not name.startswith("functions."))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    text=hostile_text().filter(lambda text: not text.startswith("(no content)")),
    calls=st.lists(st.tuples(_NAME, st.dictionaries(hostile_text(), hostile_text(), max_size=3)), max_size=3),
)
def test_what_is_rendered_for_an_assistant_is_read_back_the_same(
    text: str, calls: list[tuple[str, dict[str, str]]]
) -> None:
    """B76, B88"""
    made = [ToolCall(name, json.dumps(arguments), f"call_{place}") for place, (name, arguments) in enumerate(calls)]
    chat = chat_format_for("kimi_linear", merging_tokenizer("kimi_linear"))
    begun = chat.markup.begin(PromptOptions(thinking=False))
    cursor = chat.markup.append(begun.cursor, [Message.system("S")]).cursor
    rendered = chat.markup.append(cursor, [Message.assistant(text, calls=made)])
    whole = chat.encode(rendered.segments)
    prompt = chat.markup.prompt(cursor)
    start = len(chat.encode(prompt.segments))
    events, left = read(chat, prompt.cursor, whole[start:])
    reply = collect(events)
    assert (reply.message.text, reply.message.calls, reply.faults) == (text, tuple(made), ())
    assert (left.missing, left.calls, left.next_call) == ((), rendered.cursor.calls, rendered.cursor.next_call)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 270), max_size=60))
def test_no_tokens_whatever_break_the_parser_or_leave_what_cant_be_closed(ids: list[int]) -> None:
    parser = K2.parser(reply_cursor(K2, thinking=False), mint)
    events: list[Event] = []
    for number in ids:
        events += parser.push(number)
        if any(isinstance(event, ReplyEnd) for event in events):
            break
    events += parser.finish()
    assert sum(isinstance(event, ReplyEnd) for event in events) == 1
    assert not any(name in collect(events).message.text for name in byte_tokenizer("kimi_linear").special_tokens)
    if parser.cursor().missing:
        assert parser.cursor().missing[-1] == Segment("<|im_end|>", markup=True)
