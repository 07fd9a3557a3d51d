"""How a reply looks: the answer plain, everything else marked, and always whole lines."""

import pytest

from serai.runtime.chat import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ReplyEnd,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
)
from serai.runtime.cli.reply_writer import ReplyWriter

END = ReplyEnd(stopped=True)


def shown(*events: Event, terminal: bool = False, dim: bool = False) -> str:
    pieces: list[str] = []
    writer = ReplyWriter(pieces.append, terminal=terminal, dim=dim)
    for event in events:
        writer.take(event)
    writer.finish()
    return "".join(pieces)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ((ContentDelta("Good "), ContentDelta("day."), END), "Good day.\n"),
        ((ContentDelta("Good day.\n"), END), "Good day.\n"),
        ((END,), "\n"),
        ((), ""),
        ((ReasoningDelta("a\nb"), ReasoningDelta("c\n"), ContentDelta("d"), END), "| a\n| bc\nd\n"),
        ((ReasoningDelta("a"), ContentDelta("d"), END), "| a\nd\n"),
        ((ReasoningDelta("a\n\n"), ReasoningDelta("b"), END), "| a\n| \n| b\n"),
        (
            (
                ContentDelta("Let me see."),
                ToolCallBegin(0, "x", "look"),
                ToolArgumentsDelta(0, '{"at": '),
                ToolArgumentsDelta(0, "1}"),
                ToolCallEnd(0, complete=True),
                ToolCallBegin(1, "y", "stop"),
                END,
            ),
            'Let me see.\n| calls look {"at": 1}\n| calls stop \n',
        ),
    ],
)
def test_what_is_not_the_answer_stands_on_marked_lines(events: tuple[Event, ...], text: str) -> None:
    assert shown(*events) == text


def test_marked_lines_are_dim_where_that_shows() -> None:
    text = shown(ReasoningDelta("a\n"), ReasoningDelta("b"), ContentDelta("c"), END, terminal=True, dim=True)
    assert text == "\x1b[2m| a\n\x1b[22m\x1b[2m| b\x1b[22m\nc\n"


def test_a_terminal_gets_no_control_characters_of_the_model_and_a_pipe_gets_the_text_as_it_is() -> None:
    events = ReasoningDelta("a\x1b[2J"), ContentDelta("b\x9b\r\x07\tc\n\x1b"), END
    assert shown(*events, terminal=True) == "| a[2J\nb\tc\n"
    assert shown(*events) == "| a\x1b[2J\nb\x9b\r\x07\tc\n\x1b\n"
