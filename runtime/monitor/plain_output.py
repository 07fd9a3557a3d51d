"""The monitor where no screen can be drawn: tables, a line a second, or JSON."""

import json
from collections.abc import AsyncIterator

import anyio

from serai.runtime.cli.output import bytes_text, counted
from serai.runtime.monitor.budget_page import budget_page
from serai.runtime.monitor.figures import rate_text
from serai.runtime.monitor.model import Model
from serai.runtime.monitor.page import Page
from serai.runtime.monitor.sessions_page import sessions_page
from serai.runtime.monitor.source import Source, SourceUnreachable
from serai.runtime.monitor.text import printable, text_of
from serai.runtime.status import Status

WIDTH = 100


def snapshot_text(status: Status, source: str, width: int = WIDTH) -> str:
    """Sessions and budget as they are on the screen, as plain text."""
    model = Model(source)
    model.saw(status, "")
    lines = [status_line(status), "", *_lines(sessions_page(model, width)), "", *_lines(budget_page(model, width))]
    return "\n".join(printable(text).rstrip() for text in lines)


def _lines(page: Page) -> list[str]:
    margin = "  " if page.keys else ""  # where the cursor is on a screen
    body = (margin + text_of(page.line_at(index)) for index in range(page.count))
    return [*(text_of(one) for one in page.head), *body]


def status_line(status: Status) -> str:
    """The runtime in one line."""
    cold = sum(one.tier == "cold" for one in status.sessions)
    busy = sum(one.doing is not None for one in status.sessions)
    rate = sum(one.tokens_s for one in status.sessions)
    budget, work = status.budget, status.work
    return printable(
        f"{status.model} {status.precision}: {counted(len(status.sessions), 'session')}, {busy:,} busy, {cold:,} cold; "
        f"{rate_text(rate) if rate else '0'} tok/s; {bytes_text(budget.used_bytes)} of "
        f"{bytes_text(budget.budget_bytes)}; {work.waiting_for_memory:,} waiting for memory"
    )


def status_json(status: Status) -> str:
    """One line of JSON, ASCII so that no pipe's encoding can refuse it."""
    return json.dumps(status.to_json(), allow_nan=False)


async def stream(source: Source, *, every_s: float, as_json: bool) -> AsyncIterator[str]:
    """A line for each status, for ever. A lost connection is a line too, and is tried again."""
    while True:
        try:
            status = await source.status()
        except SourceUnreachable as error:
            yield json.dumps({"error": {"kind": "SourceUnreachable", "message": str(error)}}) if as_json else str(error)
        else:
            yield status_json(status) if as_json else status_line(status)
        await anyio.sleep(every_s)
