"""Appending to a conversation whose past is never rendered again."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serai.runtime.chat import (
    Cursor,
    ImagePart,
    Markup,
    Message,
    Notes,
    PromptInvalid,
    PromptOptions,
    Segment,
    ToolCall,
    read_tools,
    render,
)
from serai.runtime.chat.k2 import K2Markup
from serai.runtime.chat.k3 import K3Markup
from tests.runtime.chat.scripts import K2, K3, read, reply_cursor, script, tags

K3M, K2M = K3Markup(), K2Markup()
SEP = "<|sep|>"
MESSAGE_END = f"<|close|>message{SEP}<|end_of_msg|>"
RESPONSE_END = f"<|close|>response{SEP}{MESSAGE_END}"
TOOLS = read_tools([{"type": "function", "function": {"name": "f"}}])
BOTH = pytest.mark.parametrize("markup", [K3M, K2M], ids=["k3", "k2"])


def spelled(segments: tuple[Segment, ...]) -> str:
    return "".join(segment.text for segment in segments)


_MESSAGE = st.sampled_from(
    [
        Message.user("u"),
        Message.system("s"),
        Message.assistant("a", reasoning="r"),
        Message.assistant("b", calls=[ToolCall("f", "{}", "c1"), ToolCall("g", '{"x": 1}', "c2")]),
        Message.tool("t", name="f"),
    ]
)


@BOTH
@settings(max_examples=50, deadline=None, derandomize=True)
@given(messages=st.lists(_MESSAGE, max_size=6), cut=st.integers(0, 6))
def test_two_appends_are_one(markup: Markup, messages: list[Message], cut: int) -> None:
    options = PromptOptions(TOOLS, thinking=markup is K3M)
    begun = markup.begin(options)
    first = markup.append(begun.cursor, messages[:cut])
    second = markup.append(first.cursor, messages[cut:])
    whole = render(markup, messages, options, add_generation_prompt=False)
    assert begun.segments + first.segments + second.segments == whole.segments
    assert second.cursor == whole.cursor


@BOTH
def test_a_finished_reply_and_then_a_message_are_what_the_whole_conversation_renders(markup: Markup) -> None:
    chat = K3 if markup is K3M else K2
    options = PromptOptions(TOOLS, thinking=markup is K3M)
    question, later = Message.user("q"), Message.user("and?")
    answer = Message.assistant(
        "so", reasoning="hm" if markup is K3M else "", calls=[ToolCall("f", '{"x": 1}', "call_0")]
    )
    result = Message.tool("r", call_id="call_0")
    ids = chat.encode(render(markup, [question, answer, result, later], options).segments)

    prompt = render(markup, [question], options)
    written = (
        tags('hm</think><response>so</response><tools><call tool="f" index="1">'
             '<argument key="x" type="number">1</argument></call></tools></message>!')
        if markup is K3M
        else script('so<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}'
                    "<|tool_call_end|><|tool_calls_section_end|><|im_end|>")
    )  # fmt: skip
    _, left = read(chat, prompt.cursor, chat.encode(written))
    more = markup.append(left, [result, later])
    then = markup.prompt(more.cursor)
    pieces = [prompt.segments, written, more.segments, then.segments]
    assert [number for segments in pieces for number in chat.encode(segments)] == ids


def test_a_k3_reply_cut_anywhere_is_closed_by_the_next_append() -> None:
    cuts = {
        "hm": "</think><response></response></message>!",
        "hm</think>": "<response></response></message>!",
        "hm</think><response>": "</response></message>!",
        "hm</think><response>so</response>": "</message>!",
        "hm</think><response>so</response></message>": "!",
        "hm<tools>": "</tools></message>!",
        '<tools><call tool="f"><argument key="x" type="string">ab': "</argument></call></tools></message>!",
        '<tools><call tool="f"><json>{': "</json></call></tools></message>!",
    }
    for written, closing in cuts.items():
        _, left = read(K3, reply_cursor(K3), K3.encode(tags(written)))
        assert left.missing == tags(closing), written
        more = K3M.append(left, [Message.user("go on")])
        assert more.segments == tags(closing) + K3M.append(Cursor(), [Message.user("go on")]).segments
        assert more.cursor.missing == ()


@pytest.mark.parametrize(
    ("written", "closing"),
    [
        ("hm<|open|>", f"response{SEP}{RESPONSE_END}"),
        ("hm<|close|>", f"think{SEP}<|open|>response{SEP}{RESPONSE_END}"),
        ("hm<|close|>thi", f"nk{SEP}<|open|>response{SEP}{RESPONSE_END}"),
        ("hm<|open|>to", f"ols{SEP}<|close|>tools{SEP}{MESSAGE_END}"),
        (f"<|open|>tools{SEP}<|open|>call tool=\"f", f"\"{SEP}<|close|>call{SEP}<|close|>tools{SEP}{MESSAGE_END}"),
        (f"<|open|>note a{SEP}b<|open|>deep", f"{SEP}<|close|>deep{SEP}<|close|>note{SEP}<|close|>think{SEP}"
         f"<|open|>response{SEP}{RESPONSE_END}"),
    ],
)  # fmt: skip
def test_a_k3_tag_cut_short_is_completed_first(written: str, closing: str) -> None:
    _, left = read(K3, reply_cursor(K3), K3.encode(script(written)))
    assert spelled(left.missing) == closing


@pytest.mark.parametrize(
    ("written", "closing"),
    [
        ("so", "<|im_end|>"),
        ("so<|tool_calls_section_begin|>", "<|tool_calls_section_end|><|im_end|>"),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
            "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        ),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0",
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        ),
        ("<|tool_calls_section_begin|><|tool_calls_section_end|>", "<|im_end|>"),
    ],
)
def test_a_k2_reply_cut_anywhere_is_closed_by_the_next_append(written: str, closing: str) -> None:
    _, left = read(K2, reply_cursor(K2, thinking=False), K2.encode(script(written)))
    assert left.missing == script(closing)
    assert K2M.append(left, [Message.user("go on")]).segments[: len(left.missing)] == left.missing


@BOTH
def test_a_generation_prompt_that_nothing_followed_can_be_closed_too(markup: Markup) -> None:
    chat = K3 if markup is K3M else K2
    begun = markup.begin(PromptOptions(thinking=markup is K3M))
    asked = markup.append(begun.cursor, [Message.user("q")])
    prompt = markup.prompt(asked.cursor)
    more = markup.append(prompt.cursor, [Message.user("never mind")])
    whole = markup.append(asked.cursor, [Message.assistant(""), Message.user("never mind")])
    assert chat.encode(prompt.segments + more.segments) == chat.encode(whole.segments)


@BOTH
def test_a_cursor_survives_being_written_as_json(markup: Markup) -> None:
    prompt = render(markup, [Message.user("q")], PromptOptions(TOOLS, thinking=markup is K3M))
    calls = Message.assistant("", calls=[ToolCall("f", "{}", "c1")])
    for cursor in (prompt.cursor, markup.append(prompt.cursor, [calls, Message.tool("r", call_id="c1")]).cursor):
        assert Cursor.from_json(json.loads(json.dumps(cursor.to_json()))) == cursor


def test_results_that_come_one_append_at_a_time_are_counted_on() -> None:
    calls = Message.assistant("", calls=[ToolCall("f", "", "c1"), ToolCall("g", "", "c2")])
    cursor = K3M.append(Cursor(), [calls]).cursor
    first = K3M.append(cursor, [Message.tool("two", call_id="c2")])
    second = K3M.append(first.cursor, [Message.tool("one", call_id="c1")])
    assert 'tool="g" index="1"' in spelled(first.segments)
    assert 'tool="f" index="2"' in spelled(second.segments)


def test_calls_that_share_an_id_each_get_a_result() -> None:
    calls = Message.assistant("", calls=[ToolCall("f", "", "same"), ToolCall("g", "", "same")])
    cursor = K3M.append(Cursor(), [calls]).cursor
    results = K3M.append(cursor, [Message.tool("1", call_id="same"), Message.tool("2", call_id="same")])
    assert 'tool="f" index="1"' in spelled(results.segments)
    assert 'tool="g" index="2"' in spelled(results.segments)


@BOTH
def test_a_result_that_answers_nothing_is_refused_by_its_index(markup: Markup) -> None:
    begun = markup.begin(PromptOptions(thinking=markup is K3M))
    with pytest.raises(PromptInvalid, match=r"^message 1: this tool result .*answers no call") as caught:
        markup.append(begun.cursor, [Message.user("q"), Message.tool("r")])
    assert caught.value.message_index == 1


@BOTH
def test_of_several_results_the_one_at_fault_is_named(markup: Markup) -> None:
    """Though they are rendered together, and in the order of the calls."""
    begun = markup.begin(PromptOptions(thinking=markup is K3M))
    calls = [ToolCall("f", "", "a"), ToolCall("g", "", "b")]
    asked = [Message.user("q"), Message.assistant("", calls=calls)]
    answered = [Message.tool("1", call_id="a"), Message.tool("2", call_id="b"), Message.tool("3")]
    with pytest.raises(PromptInvalid, match=r"^message 4: this tool result .*answers no call"):
        markup.append(begun.cursor, [*asked, *answered])
    seen = Message("tool", (ImagePart("http://x"),), call_id="a")
    with pytest.raises(PromptInvalid, match=r"^message 3: the image 'http://x' can't be read"):
        markup.append(begun.cursor, [*asked, Message.tool("2", call_id="b"), seen])


@BOTH
def test_arguments_that_are_no_object_are_refused_by_the_messages_index(markup: Markup) -> None:
    """B89"""
    begun = markup.begin(PromptOptions(thinking=markup is K3M))
    halves = [Message.assistant("prose"), Message.assistant("", calls=[ToolCall("f", "{}")])]
    with pytest.raises(PromptInvalid, match=r"^message 3: the arguments of 'g' are a list") as caught:
        markup.append(
            begun.cursor, [*halves, Message.user("u"), Message.assistant("", calls=[ToolCall("g", "[1]", "c")])]
        )
    assert caught.value.message_index == 3


@BOTH
def test_an_image_whose_pixels_are_not_known_is_refused(markup: Markup) -> None:
    begun = markup.begin(PromptOptions(thinking=markup is K3M))
    with pytest.raises(PromptInvalid, match=r"^message 0: the image 'http://x' can't be read"):
        markup.append(begun.cursor, [Message("user", (ImagePart("http://x"),))])


def test_k3_thinks_with_the_greatest_effort_unless_told_otherwise() -> None:
    assert K3M.options() == PromptOptions(thinking=True, thinking_effort="max")
    assert K3M.options(thinking=False) == PromptOptions(thinking=False)
    assert K3M.options(thinking_effort="low").thinking_effort == "low"
    assert PromptOptions().thinking_effort is None
    assert "thinking_effort=max" in spelled(K3M.begin(K3M.options()).segments)
    assert K3M.begin(PromptOptions()).segments == ()


@pytest.mark.parametrize("effort", ["medium", "none", "", "HIGH"])
def test_an_effort_that_isnt_one_is_refused_with_those_that_are(effort: str) -> None:
    with pytest.raises(PromptInvalid, match="must be one of low, high, max"):
        PromptOptions(thinking_effort=effort)
    with pytest.raises(PromptInvalid, match="must be one of low, high, max"):
        K3M.options(thinking_effort=effort)


def test_k2_refuses_what_it_has_no_channel_for() -> None:
    assert K2M.options() == PromptOptions(thinking=False)
    with pytest.raises(PromptInvalid, match="this model has no thinking channel; set thinking=False"):
        K2M.options(thinking=True)
    with pytest.raises(PromptInvalid, match="this model has no thinking channel; set thinking=False"):
        K2M.prompt(Cursor(), thinking=True)
    with pytest.raises(PromptInvalid, match="thinking_effort is set, but this model has no thinking channel"):
        K2M.options(thinking_effort="low")
    with pytest.raises(PromptInvalid, match=r"^message 1: this model reads tools at the start only"):
        K2M.append(Cursor(), [Message.user("u"), Message("system", tools=TOOLS)])


def test_thinking_can_be_turned_off_for_one_reply() -> None:
    cursor = K3M.begin(PromptOptions()).cursor
    assert K3M.prompt(cursor, thinking=False).segments[-2] == Segment("response")
    assert K3M.prompt(cursor, thinking=False).cursor.thinking


def test_notes_stand_before_the_reply_and_nowhere_in_the_cursor() -> None:
    cursor = K3M.begin(PromptOptions(TOOLS)).cursor
    noted = K3M.prompt(cursor, Notes("required", {"type": "json_object"}))
    plain = K3M.prompt(cursor)
    assert noted.segments[-len(plain.segments) :] == plain.segments
    assert noted.cursor == plain.cursor


@BOTH
def test_tools_that_must_be_called_must_exist(markup: Markup) -> None:
    cursor = replace(Cursor(), thinking=markup is K3M)
    with pytest.raises(PromptInvalid, match="tool_choice is required, but the conversation declares no tools"):
        markup.prompt(cursor, Notes("required"))
    assert markup.prompt(cursor, Notes("none")).segments == markup.prompt(cursor).segments
    named = Notes({"type": "function", "function": {"name": "f"}}, {"type": "text"})
    assert markup.prompt(cursor, named).segments == markup.prompt(cursor).segments


@pytest.mark.parametrize(
    ("notes", "sentence"),
    [
        ({"tool_choice": "maybe"}, "tool_choice is 'maybe'"),
        ({"response_format": {"type": "xml"}}, "response_format is of type 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "has no json_schema.schema object"),
    ],
)
def test_notes_that_arent_any_are_refused(notes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PromptInvalid, match=sentence):
        Notes(**notes)  # type: ignore[arg-type]


def test_k2_calls_are_numbered_through_the_conversation_whatever_ids_a_client_sends() -> None:
    """B94"""
    ids = ["call_abc", "functions.f:0", "functions.f:7"]
    made = [Message.assistant("", calls=[ToolCall("f", "{}", id_)]) for id_ in ids]
    begun = K2M.begin(PromptOptions(TOOLS, thinking=False))
    history = [Message.user("q")]
    for message, id_ in zip(made, ids, strict=True):
        history += [message, Message.tool(f"result of {id_}", call_id=id_)]
    prompt = K2M.prompt(K2M.append(begun.cursor, history).cursor)
    assert prompt.cursor.next_call == 8
    whole = spelled(K2M.append(begun.cursor, history).segments)
    for number, id_ in zip((0, 1, 7), ids, strict=True):
        assert f"## Return of functions.f:{number}\nresult of {id_}" in whole

    written = script("<|tool_calls_section_begin|><|tool_call_begin|>functions.f:8<|tool_call_argument_begin|>{}"
                     "<|tool_call_end|><|tool_calls_section_end|><|im_end|>")  # fmt: skip
    _, left = read(K2, prompt.cursor, K2.encode(written))
    assert left.calls[0].id not in ids
    answered = K2M.append(left, [Message.tool("eight", call_id=left.calls[0].id)])
    assert "## Return of functions.f:8\neight" in spelled(answered.segments)
