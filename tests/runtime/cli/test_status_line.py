"""The live line: on a terminal it never mixes with the text, elsewhere it isn't there."""

import io
import os
import pty

from serai.runtime.cli.status_line import StatusLine


class Terminal(io.StringIO):
    """A stream that says it is a terminal but has no size of its own."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_written_where_nobody_looks() -> None:
    stream = io.StringIO()
    with StatusLine(stream, alone=False) as status:
        status.show("12 tok/s")
    assert stream.getvalue() == ""


def test_alone_the_line_is_rewritten_in_place_and_cleared() -> None:
    stream = Terminal()
    with StatusLine(stream, alone=True) as status:
        status.show("12 tok/s")
        status.show("not shown: too soon")
    assert stream.getvalue() == "\r\x1b[2K12 tok/s\r\x1b[2K"


def test_beside_text_the_bottom_line_is_kept_out_of_the_scrolling_and_given_back() -> None:
    stream = Terminal()
    with StatusLine(stream, alone=False) as status:
        status.show("x" * 200)
    written = stream.getvalue()
    assert "\x1b[1;23r" in written, "lines 1 to 23 of 24 scroll"
    assert "\x1b[24;1H\x1b[2K" + "x" * 79 + "\x1b8" in written, "cut to the width"
    assert written.endswith("\x1b7\x1b[r\x1b[24;1H\x1b[2K\x1b8"), "all lines scroll again"


def test_a_terminal_without_a_size_gets_the_usual_one() -> None:
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "w") as stream:
            with StatusLine(stream, alone=False) as status:
                status.show("12 tok/s")
            assert b"\x1b[1;23r" in os.read(leader, 200)
    finally:
        os.close(leader)
