"""Replies as scripts: shorthand for token ids, and parsing them."""

import re
from collections.abc import Iterable, Sequence

from serai.runtime.chat import (
    ChatFormat,
    ContentDelta,
    Cursor,
    Event,
    Message,
    PromptOptions,
    ReasoningDelta,
    Reply,
    Segment,
    ToolArgumentsDelta,
    ToolCall,
    chat_format_for,
    collect,
)
from tests.runtime.chat.tokenizers_for_tests import byte_tokenizer

K3 = chat_format_for("kimi_k3", byte_tokenizer("kimi_k3"))
K2 = chat_format_for("kimi_linear", byte_tokenizer("kimi_linear"))

_MARKUP = re.compile(r"(<\|[a-z_]+\|>|\[EOS\]|\[EOT\])")


def script(text: str) -> tuple[Segment, ...]:
    """Segments of a script in which every control token's name is markup."""
    pieces = enumerate(_MARKUP.split(text))
    return tuple(Segment(piece, markup=bool(place % 2)) for place, piece in pieces if piece)


def tags(text: str) -> tuple[Segment, ...]:
    """A K3 script in shorthand: <name key="value">, </name>, and ! for the end of the message."""
    text = re.sub(r"<(/?)([a-z]+[^<>]*)>", lambda tag: f"<|{'close' if tag[1] else 'open'}|>{tag[2]}<|sep|>", text)
    return script(text.replace("!", "<|end_of_msg|>"))


def reply_cursor(chat: ChatFormat, *, thinking: bool = True, messages: Sequence[Message] = ()) -> Cursor:
    """The cursor where a reply begins, after `messages`."""
    begun = chat.markup.begin(PromptOptions(thinking=thinking))
    return chat.markup.prompt(chat.markup.append(begun.cursor, messages).cursor).cursor


def mint(index: int) -> str:
    return f"call_{index}"


def read(chat: ChatFormat, cursor: Cursor, ids: Iterable[int]) -> tuple[list[Event], Cursor]:
    """All events of a reply, pushed a token at a time and finished, and where it leaves the conversation."""
    parser = chat.parser(cursor, mint)
    events = [event for number in ids for event in parser.push(number)]
    events += parser.finish()
    return events, parser.cursor()


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbouring pieces of one text joined."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match last, event:
            case ReasoningDelta(before), ReasoningDelta(text):
                result[-1] = ReasoningDelta(before + text)
            case ContentDelta(before), ContentDelta(text):
                result[-1] = ContentDelta(before + text)
            case ToolArgumentsDelta(index, before), ToolArgumentsDelta(_, text):
                result[-1] = ToolArgumentsDelta(index, before + text)
            case _:
                result.append(event)
    return result


def k3_reply(text: str, *, thinking: bool = True) -> Reply:
    events, _ = read(K3, reply_cursor(K3, thinking=thinking), K3.encode(tags(text)))
    return collect(events)


def k2_reply(text: str) -> Reply:
    events, _ = read(K2, reply_cursor(K2, thinking=False), K2.encode(script(text)))
    return collect(events)


def says(reply: Reply) -> tuple[str, str, tuple[ToolCall, ...]]:
    return reply.message.reasoning, reply.message.text, reply.message.calls
