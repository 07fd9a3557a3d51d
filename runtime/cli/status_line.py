"""One line on a terminal that is rewritten while text streams past it."""

import os
import time
from types import TracebackType
from typing import TextIO

SHOWN_EVERY_S = 0.1

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CLEAR_LINE = "\x1b[2K"


class StatusLine:
    """The bottom line of the terminal, kept free by a scroll region while text is written to the same terminal; where
    the text goes elsewhere (`alone`), the present line. Does nothing when `stream` is no terminal.
    """

    def __init__(self, stream: TextIO, *, alone: bool) -> None:
        self._stream = stream
        self._alone = alone
        self._is_terminal = stream.isatty()
        self._rows = 0
        self._next_s = 0.0

    def __enter__(self) -> "StatusLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Replace the line, at most ten times a second."""
        now = time.monotonic()
        if not self._is_terminal or now < self._next_s:
            return
        self._next_s = now + SHOWN_EVERY_S
        columns, rows = self._size()
        text = text[: columns - 1]
        if self._alone:
            self._write(f"\r{_CLEAR_LINE}{text}")
            return
        if rows != self._rows:
            self._reserve(rows)
        self._write(f"{_SAVE}\x1b[{rows};1H{_CLEAR_LINE}{text}{_RESTORE}")

    def clear(self) -> None:
        """Give the line back."""
        if self._alone and self._next_s:
            self._write(f"\r{_CLEAR_LINE}")
        elif self._rows:
            self._write(f"{_SAVE}\x1b[r\x1b[{self._rows};1H{_CLEAR_LINE}{_RESTORE}")
            self._rows = 0

    def _reserve(self, rows: int) -> None:
        """Let text scroll above the last line only. Setting the region moves the cursor home, hence the saving; the
        line feed before makes room when the cursor stands on the last line."""
        self._write(f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A")
        self._rows = rows

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except OSError:
            return 80, 24
        # A terminal that was never told its size says 0.
        return size.columns or 80, size.lines or 24

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
