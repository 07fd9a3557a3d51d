"""Passages of a session as lines: whose words they are stands in a margin, and reasoning is folded."""

from collections.abc import Sequence

from serai.runtime.cli.output import counted
from serai.runtime.monitor.text import Line, Span, Tone, line, wrapped
from serai.runtime.monitor.transcript import Passage, Voice

MARGIN = 10

_NAMES = {
    Voice.SYSTEM: "system",
    Voice.USER: "user",
    Voice.TOOL: "tool",
    Voice.REASONING: "thought",
    Voice.ANSWER: "answer",
    Voice.CALL: "calls",
    Voice.TEXT: "text",
}
_TONES = {Voice.USER: Tone.STRONG, Voice.REASONING: Tone.DIM, Voice.SYSTEM: Tone.DIM, Voice.TOOL: Tone.DIM}
_FOLDED = (Voice.REASONING, Voice.SYSTEM)
CURSOR = Span("▌", Tone.GRAPH)
"""Stands where the next token will."""


def passage_lines(passages: Sequence[Passage], width: int, *, thoughts_shown: bool, growing: bool) -> list[Line]:
    """All passages in order; `growing` says that the last one is being written."""
    lines: list[Line] = []
    for passage in passages:
        lines.extend(_folded(passage) if passage.voice in _FOLDED and not thoughts_shown else _whole(passage, width))
    if growing:
        lines[-1:] = [(*lines[-1], CURSOR)] if lines else [line(" " * MARGIN, CURSOR)]
    return lines


def _folded(passage: Passage) -> list[Line]:
    words = counted(len(passage.text.split()), "word")
    more = "more than " if passage.is_cut else ""
    return [line(Span(f"{_NAMES[passage.voice]:>8}  ", Tone.GRAPH), Span(f"▸ {more}{words}, z unfolds", Tone.DIM))]


def _whole(passage: Passage, width: int) -> list[Line]:
    text = ("…" if passage.is_cut else "") + passage.text.strip("\n")
    tone = _TONES.get(passage.voice, Tone.NORMAL)
    return [
        line(Span(f"{'' if number else _NAMES[passage.voice]:>8}  ", Tone.GRAPH), Span(row, tone))
        for number, row in enumerate(wrapped(text, width - MARGIN - 1))
    ]
