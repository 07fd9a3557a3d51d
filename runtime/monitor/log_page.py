"""What happened, oldest first; the page stays at its end until it is scrolled."""

from serai.runtime.monitor.model import LogEntry, Model
from serai.runtime.monitor.page import Page
from serai.runtime.monitor.text import Line, Span, Tone, fit, line

_TONES = {
    "failed": Tone.BAD,
    "missed": Tone.BAD,
    "connection lost": Tone.BAD,
    "refused": Tone.BAD,
    "connected again": Tone.GOOD,
    "server restarted": Tone.WARN,
    "paused": Tone.WARN,
}


def log_page(model: Model, width: int) -> Page:
    """One line an event."""
    entries = tuple(model.log)
    head = (line(Span(fit(f" {'time':9} {'event':17} {'session':20} detail", width), Tone.HEAD)),)
    if not entries:
        return Page(head, 1, lambda index: line(Span(" nothing has happened yet", Tone.DIM)), follows_end=True)
    return Page(head, len(entries), lambda index: _line(entries[index], width), follows_end=True)


def _line(entry: LogEntry, width: int) -> Line:
    name = entry.label or entry.session_id[:8]
    return line(
        f" {entry.time:9} ",
        Span(fit(entry.what, 17), _TONES.get(entry.what, Tone.NORMAL)),
        f" {fit(name, 20)} ",
        Span(fit(entry.detail, max(width - 51, 1)), Tone.DIM),
    )
