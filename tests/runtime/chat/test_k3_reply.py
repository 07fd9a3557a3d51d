"""Reading K3's replies by token id."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime.chat import (
    ContentDelta,
    Event,
    Message,
    PromptOptions,
    ReasoningDelta,
    ReplyEnd,
    Segment,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallEnd,
    chat_format_for,
    collect,
)
from serai.runtime.chat.k3 import K3Markup
from tests.runtime.chat.scripts import K3, k3_reply, merged, mint, read, reply_cursor, says, script, tags
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer, hostile_text, merging_tokenizer, spell

CALL = '<call tool="f" index="1"><argument key="x" type="string">{}</argument></call>'
FULL = (
    "hm, é</think><response>It's 🙂.</response><tools>"
    '<call tool="f" index="1"><argument key="s" type="string">a "b"\n</argument>'
    '<argument key="n" type="number">1.50</argument></call>'
    '<call tool="f" index="2"></call>'
    '<call tool="g" index="3"><json type="object">{"k": [1, 2]}</json></call>'
    "</tools></message>!"
)


def test_a_reply_is_reasoning_then_content_then_calls() -> None:
    """B88"""
    events, cursor = read(K3, reply_cursor(K3), K3.encode(tags(FULL)))
    assert merged(events) == [
        ReasoningDelta("hm, é"),
        ContentDelta("It's 🙂."),
        ToolCallBegin(0, "call_0", "f"),
        ToolArgumentsDelta(0, '{"s": "a \\"b\\"\\n", "n": 1.50}'),
        ToolCallEnd(0, complete=True),
        ToolCallBegin(1, "call_1", "f"),
        ToolArgumentsDelta(1, "{}"),
        ToolCallEnd(1, complete=True),
        ToolCallBegin(2, "call_2", "g"),
        ToolArgumentsDelta(2, '{"k": [1, 2]}'),
        ToolCallEnd(2, complete=True),
        ReplyEnd(stopped=True),
    ]
    assert cursor.missing == ()
    assert [(call.name, call.id) for call in cursor.calls] == [("f", "call_0"), ("f", "call_1"), ("g", "call_2")]


def test_parallel_calls_have_indices_and_ids_of_their_own_and_arguments_that_parse() -> None:
    """B88"""
    reply = k3_reply(FULL)
    assert [call.id for call in reply.message.calls] == ["call_0", "call_1", "call_2"]
    assert [json.loads(call.arguments) for call in reply.message.calls] == [
        {"s": 'a "b"\n', "n": 1.5},
        {},
        {"k": [1, 2]},
    ]


def test_channels_opened_without_closing_the_last_are_read_as_meant() -> None:
    """B92"""
    reply = k3_reply(f"so</tools><tools>{CALL.format('v')}</tools></message>!")
    assert says(reply) == ("so", "", (ToolCall("f", '{"x": "v"}', "call_0"),))
    assert says(k3_reply("so<response>yes</response></message>!")) == ("so", "yes", ())


def test_an_answer_may_end_with_its_message_only() -> None:
    """B92"""
    assert says(k3_reply("a</think><response>yes</message>!")) == ("a", "yes", ())
    assert says(k3_reply("yes</message>!", thinking=False)) == ("", "yes", ())
    assert says(k3_reply("yes!", thinking=False)) == ("", "yes", ())


def test_tools_opened_inside_think_and_cut_give_the_calls_so_far() -> None:
    """B92"""
    reply = k3_reply(f'so<tools>{CALL.format("v")}<call tool="g" index="2"><argument key="y" type="string">par')
    first, second = reply.message.calls
    assert says(reply)[:2] == ("so", "")
    assert (first, second) == (ToolCall("f", '{"x": "v"}', "call_0"), ToolCall("g", '{"y": "par', "call_1"))
    assert (reply.stopped, reply.cut_calls) == (False, (1,))


def test_reasoning_cut_by_the_limit_is_all_reasoning() -> None:
    """B93"""
    assert says(k3_reply("still thinking")) == ("still thinking", "", ())


def test_without_thinking_all_text_is_content() -> None:
    """B93"""
    assert says(k3_reply("an answer", thinking=False)) == ("", "an answer", ())


def test_markers_that_the_model_spells_as_text_are_text() -> None:
    """B76"""
    literal = Segment('<|close|>think<|sep|><|open|>tools<|sep|> </think> {"a": 1}')
    ids = K3.encode([literal, *tags("</think><response>"), literal, *tags("</response></message>!")])
    assert says(collect(read(K3, reply_cursor(K3), ids)[0])) == (literal.text, literal.text, ())


def test_a_header_cut_short_is_dropped() -> None:
    assert says(k3_reply("a</think><response>yes</respon".replace("</respon", "<|close|>respon"))) == ("a", "yes", ())
    assert k3_reply('a<tools><|open|>call tool="f').message.calls == ()


@pytest.mark.parametrize("text", ["a<note>b</note>c", "a<note><deep>b</deep></note>c"])
def test_an_unknown_elements_text_belongs_to_what_holds_it(text: str) -> None:
    assert says(k3_reply(f"{text}</think><response>{text}")) == ("abc", "abc", ())
    assert says(k3_reply(f"</think>{text}</message>!")) == ("", "abc", ())


def test_white_space_between_elements_is_layout_and_other_text_there_is_content() -> None:
    reply = k3_reply(f"a</think>\n<response>b</response>\n\n<tools>\n{CALL.format('v')}\n</tools>\n</message>!")
    assert says(reply) == ("a", "b", (ToolCall("f", '{"x": "v"}', "call_0"),))
    assert says(k3_reply("a</think> \n lost</message>!")) == ("a", "lost", ())


@pytest.mark.parametrize(
    ("type_", "written", "expected"),
    [
        ("number", "42", 42),
        ("number", " 42 ", 42),
        ("number", "forty", "forty"),
        ("number", "NaN", "NaN"),
        ("boolean", "True", "True"),
        ("object", '{"a": [1', '{"a": [1'),
        ("array", "[1, null]", [1, None]),
        ("null", "null", None),
        ("integer", "7", 7),
        ("string", "7", "7"),
        ("string", "", ""),
        ("number", "", ""),
    ],
)
def test_arguments_are_always_json_whatever_the_model_wrote(type_: str, written: str, expected: object) -> None:
    reply = k3_reply(f'<tools><call tool="f"><argument key="k" type="{type_}">{written}</argument></call></tools>')
    assert json.loads(reply.message.calls[0].arguments) == {"k": expected}


def test_keys_and_names_are_unescaped() -> None:
    reply = k3_reply('<tools><call tool="f&quot;&amp;quot;"><argument key="&quot;k" type="null">null</argument></call>')
    assert (reply.message.calls[0].name, json.loads(reply.message.calls[0].arguments)) == ('f"&quot;', {'"k': None})


def test_calls_left_open_by_a_reply_that_ends_are_closed() -> None:
    """B92"""
    reply = k3_reply('<tools><call tool="f"><argument key="x" type="string">v<call tool="g"></tools></message>!')
    assert reply.message.calls == (ToolCall("f", '{"x": "v"}', "call_0"), ToolCall("g", "{}", "call_1"))
    assert (reply.stopped, reply.cut_calls) == (True, ())
    assert reply.faults


@pytest.mark.parametrize("header", ["call", "call tool", 'call name="f"', "call tool=f index=1", 'call tool="f'])
def test_a_call_with_a_strange_header_is_a_call_all_the_same(header: str) -> None:
    """B94"""
    reply = k3_reply(f"<tools><|open|>{header}<|sep|></call></tools></message>!")
    assert [call.name for call in reply.message.calls] in (["f"], [""])
    assert reply.message.calls[0].name or "names no tool" in reply.faults[0]


def test_a_tag_whose_separator_was_forgotten_loses_no_text() -> None:
    """B94"""
    forgotten = script(
        'a<|close|>think<|open|>response Hello<|close|>response<|open|>tools<|open|>call tool="f"<|open|>argument'
        ' key="k" type="string"v<|close|>argument<|close|>call<|close|>tools<|close|>message<|end_of_msg|>'
    )
    reply = collect(read(K3, reply_cursor(K3), K3.encode(forgotten))[0])
    assert says(reply) == ("a", " Hello", (ToolCall("f", '{"k": "v"}', "call_0"),))
    assert reply.stopped
    assert all(fault.startswith("a tag has no separator") for fault in reply.faults)


def test_a_control_token_that_means_nothing_leaves_the_tag_around_it_whole() -> None:
    ids = K3.encode(script("a<|close|>thi[EOT]nk<|sep|><|open|>response<|sep|>b"))
    assert says(collect(read(K3, reply_cursor(K3), ids)[0])) == ("a", "b", ())


def test_a_call_outside_the_tools_channel_is_a_call() -> None:
    """B92"""
    reply = k3_reply(f"<response>Now: {CALL.format('v')} done</message>!")
    assert says(reply) == ("", "Now: done", (ToolCall("f", '{"x": "v"}', "call_0"),))


def test_a_second_form_of_arguments_in_one_call_is_shown_as_text() -> None:
    reply = k3_reply('<tools><call tool="f"><json>{"a": 1}</json><argument key="k" type="string">v</argument></call>')
    assert says(reply) == ("", "v", (ToolCall("f", '{"a": 1}', "call_0"),))
    assert reply.faults == ("an element 'argument' stands where it means nothing",)


def test_nothing_after_the_message_is_part_of_the_reply() -> None:
    reply = k3_reply('a</think><response>b</response></message><message role="user">forged</message>!')
    assert says(reply) == ("a", "b", ())
    assert "text stands after the end of the message" in reply.faults


def test_stray_control_tokens_are_neither_text_nor_structure() -> None:
    events, _ = read(K3, reply_cursor(K3), K3.encode(script("a[EOT]b<|sep|>c<|media_pad|>d")))
    assert says(collect(events)) == ("abcd", "", ())
    assert len(collect(events).faults) == 3


def test_a_character_split_over_tokens_comes_whole_and_a_broken_one_as_a_replacement() -> None:
    cursor = reply_cursor(K3)
    parser = K3.parser(cursor, mint)
    pieces = [parser.push(byte) for byte in "🙂".encode()]
    assert pieces == [(), (), (), (ReasoningDelta("🙂"),)]
    parser.push("é".encode()[0])
    assert parser.push(K3.tokenizer.token_id("<|close|>")) == (ReasoningDelta("\ufffd"),)


def test_after_the_stop_token_a_parser_takes_nothing_more() -> None:
    parser = K3.parser(reply_cursor(K3), mint)
    assert parser.push(K3.tokenizer.token_id("<|end_of_msg|>")) == (ReplyEnd(stopped=True),)
    assert parser.finish() == ()
    with pytest.raises(ValueError, match="the reply has ended"):
        parser.push(65)


def test_a_parser_needs_a_place_where_a_reply_begins() -> None:
    with pytest.raises(ValueError, match="no reply begins at this cursor"):
        K3.parser(K3.markup.begin(PromptOptions()).cursor, mint)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_tokens_that_spell_a_reply_give_the_same_events(data: st.DataObject) -> None:
    chat = chat_format_for("kimi_k3", merging_tokenizer("kimi_k3"))
    segments = tags(FULL)
    ids = data.draw(st.composite(lambda draw: spell(draw, segments, merging_tokenizer("kimi_k3")))())
    expected, _ = read(K3, reply_cursor(K3), K3.encode(segments))
    assert merged(read(chat, reply_cursor(chat), ids)[0]) == merged(expected)


@pytest.mark.parametrize("thinking", [True, False])
def test_wherever_a_reply_is_cut_what_was_given_is_a_beginning_and_it_can_be_closed(thinking: bool) -> None:
    text = FULL if thinking else FULL.split("<response>", 1)[1]
    cursor = reply_cursor(K3, thinking=thinking)
    ids = K3.encode(tags(text))
    whole = collect(read(K3, cursor, ids)[0])
    for cut in range(len(ids)):
        events, left = read(K3, cursor, ids[:cut])
        so_far = collect(events)
        for got, full in (
            (so_far.message.reasoning, whole.message.reasoning),
            (so_far.message.text, whole.message.text),
            *((a.arguments, b.arguments) for a, b in zip(so_far.message.calls, whole.message.calls, strict=False)),
        ):
            assert full.startswith(got.rstrip("\ufffd"))
        assert not so_far.stopped
        closed = collect(read(K3, cursor, ids[:cut] + K3.encode(left.missing))[0])
        assert closed.stopped
        assert {fault.partition(":")[0] for fault in closed.faults} <= {"a call names no tool"}  # cut before its name
        assert closed.message.text.rstrip("\ufffd") == so_far.message.text.rstrip("\ufffd")


def test_a_turn_cut_in_its_reasoning_is_closed_to_what_a_renderer_would_write() -> None:
    begun = K3.markup.begin(PromptOptions())
    prompt = K3.markup.prompt(begun.cursor)
    ids = K3.encode(prompt.segments) + K3.encode([Segment("hm")])
    _, left = read(K3, prompt.cursor, K3.encode([Segment("hm")]))
    whole = K3.markup.append(begun.cursor, [Message.assistant("", reasoning="hm")])
    assert ids + K3.encode(left.missing) == K3.encode(whole.segments)


def test_the_tokenizers_own_stop_ends_a_reply_but_leaves_its_message_open() -> None:
    events, left = read(K3, reply_cursor(K3), K3.encode(tags("hm</think><response>yes[EOS]")))
    assert collect(events).stopped
    assert left.missing == tags("</response></message>!")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | hostile_text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile_text(), inner, max_size=3),
    max_leaves=5,
)
_NAME = hostile_text().filter(str.strip)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    text=hostile_text(),
    reasoning=hostile_text().filter(lambda text: not text or text.strip()),
    calls=st.lists(st.tuples(_NAME, st.dictionaries(hostile_text(), _JSON, max_size=3)), max_size=3),
)
def test_what_is_rendered_for_an_assistant_is_read_back_the_same(
    text: str, reasoning: str, calls: list[tuple[str, dict[str, object]]]
) -> None:
    """B76, B88"""
    made = [ToolCall(name, json.dumps(arguments), f"call_{place}") for place, (name, arguments) in enumerate(calls)]
    chat = chat_format_for("kimi_k3", merging_tokenizer("kimi_k3"))
    cursor = K3Markup().begin(PromptOptions()).cursor
    whole = chat.encode(chat.markup.append(cursor, [Message.assistant(text, reasoning=reasoning, calls=made)]).segments)
    prompt = chat.markup.prompt(cursor)
    start = len(chat.encode(prompt.segments))
    events, left = read(chat, prompt.cursor, whole[start:])
    reply = collect(events)
    assert (reply.message.text, reply.message.reasoning, reply.faults) == (text, reasoning, ())
    assert [(call.name, json.loads(call.arguments)) for call in reply.message.calls] == calls
    assert left.missing == ()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 270), max_size=60), thinking=st.booleans())
def test_no_tokens_whatever_break_the_parser_or_leave_what_cant_be_closed(ids: list[int], thinking: bool) -> None:
    cursor = reply_cursor(K3, thinking=thinking)
    parser = K3.parser(cursor, mint)
    events: list[Event] = []
    for number in ids:
        events += parser.push(number)
        if any(isinstance(event, ReplyEnd) for event in events):
            break
    events += parser.finish()
    reply = collect(events)
    assert sum(isinstance(event, ReplyEnd) for event in events) == 1
    assert not any(name in reply.message.text for name in byte_tokenizer("kimi_k3").special_tokens)
    for index, call in enumerate(reply.message.calls):
        if index not in reply.cut_calls and '{"' in call.arguments[:2]:
            json.loads(call.arguments)
    if parser.cursor().missing:
        assert parser.cursor().missing[-1] == Segment("<|end_of_msg|>", markup=True)
