"""Prompts and replies: conversations become segments and token ids, token ids of a reply become events.

Pure functions and values; nothing here waits, reads or writes. See `formats.chat_format_for` for the way in.
"""

from serai.runtime.chat.conversation import (
    NO_NOTES,
    Cursor,
    Markup,
    Notes,
    PromptOptions,
    Rendered,
    ReplyParser,
    render,
)
from serai.runtime.chat.errors import ChatFormatMismatch, PromptInvalid
from serai.runtime.chat.formats import ChatFormat, chat_format_for, chat_format_id
from serai.runtime.chat.grammars import Held
from serai.runtime.chat.messages import ImagePart, Message, TextPart, ToolCall, read_messages, read_tools
from serai.runtime.chat.reply import (
    ContentDelta,
    Event,
    ReasoningDelta,
    Reply,
    ReplyEnd,
    ToolArgumentsDelta,
    ToolCallBegin,
    ToolCallEnd,
    collect,
)
from serai.runtime.chat.segments import Segment, encode

__all__ = [
    "NO_NOTES",
    "ChatFormat",
    "ChatFormatMismatch",
    "ContentDelta",
    "Cursor",
    "Event",
    "Held",
    "ImagePart",
    "Markup",
    "Message",
    "Notes",
    "PromptInvalid",
    "PromptOptions",
    "ReasoningDelta",
    "Rendered",
    "Reply",
    "ReplyEnd",
    "ReplyParser",
    "Segment",
    "TextPart",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallBegin",
    "ToolCallEnd",
    "chat_format_for",
    "chat_format_id",
    "collect",
    "encode",
    "read_messages",
    "read_tools",
    "render",
]
