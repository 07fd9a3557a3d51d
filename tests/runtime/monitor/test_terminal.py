"""The real program on a real pseudo-terminal: when it may draw, and what it does when the terminal goes away."""

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from serai.runtime.monitor.terminal import TERMINAL_GONE, watch_for_hangup, why_not
from tests.shared import ROOT

COMMAND = [sys.executable, "-m", "serai.runtime", "monitor", "--demo"]
SLOWEST_START_S = 60.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_screen_is_drawn_only_where_it_can_be() -> None:
    """B111."""
    here, nowhere = Terminal(), io.StringIO()
    good = {"TERM": "xterm"}
    assert why_not(good, stdin=here, stdout=here, stderr=here) is None
    refusals = [
        why_not(good, stdin=nowhere, stdout=here, stderr=here),
        why_not(good, stdin=here, stdout=nowhere, stderr=here),
        why_not(good, stdin=here, stdout=here, stderr=nowhere),
        why_not({"TERM": "dumb"}, stdin=here, stdout=here, stderr=here),
        why_not({}, stdin=here, stdout=here, stderr=here),
    ]
    for reason in refusals:
        assert reason is not None
        assert "--once prints" in reason


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal of 80×24."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        yield master, slave
    finally:
        for end in (master, slave):
            try:
                os.close(end)
            except OSError as error:
                assert error.errno == 9  # noqa: PT017 - closed by the test already


def read_until(master: int, wanted: bytes) -> bytes:
    """What the program writes, up to some text."""
    found, end = b"", time.monotonic() + SLOWEST_START_S
    while wanted not in found and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            found += os.read(master, 65_536)
    assert wanted in found
    return found


@pytest.mark.parametrize("ignored", [False, True], ids=["SIGHUP ends it", "SIGHUP is ignored"])
def test_the_process_ends_with_its_terminal(ignored: bool) -> None:
    """B112: gone within 2 s, whatever the parent shell did to SIGHUP, without computing until then."""

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with terminal() as (master, slave):
        environ = os.environ | {"TERM": "xterm-256color"}
        program = subprocess.Popen(
            COMMAND, stdin=slave, stdout=slave, stderr=slave, env=environ, cwd=ROOT, preexec_fn=own_terminal
        )
        os.close(slave)
        try:
            read_until(master, b"planner")
            os.close(master)
            code = program.wait(timeout=2.0)
        finally:
            program.kill()
            program.wait()
    # Where the signal counts, it and the hang-up come at the same time.
    assert code == TERMINAL_GONE or (code == -signal.SIGHUP and not ignored)


def test_a_program_that_is_told_to_end_puts_the_terminal_in_order() -> None:
    with terminal() as (master, slave):
        environ = os.environ | {"TERM": "xterm-256color"}
        program = subprocess.Popen(COMMAND, stdin=slave, stdout=slave, stderr=slave, env=environ, cwd=ROOT)
        try:
            read_until(master, b"planner")
            before = termios.tcgetattr(slave)[3]
            program.terminate()
            assert b"\x1b[?1049l" in read_until(master, b"\x1b[?25h")
            assert program.wait(timeout=10.0) == 0
            after = termios.tcgetattr(slave)[3]
        finally:
            program.kill()
            program.wait()
    assert not before & termios.ECHO
    assert after & termios.ECHO


@pytest.mark.parametrize("kind", ["dumb", "", "no keyboard"])
def test_a_refusal_is_one_line_and_leaves_the_terminal_alone(kind: str) -> None:
    """B111: exit code 2, no traceback, no escape sequence."""
    with terminal() as (master, slave):
        environ = os.environ | {"TERM": "xterm" if kind == "no keyboard" else kind}
        stdin = subprocess.DEVNULL if kind == "no keyboard" else slave
        program = subprocess.Popen(COMMAND, stdin=stdin, stdout=slave, stderr=slave, env=environ, cwd=ROOT)
        try:
            said = read_until(master, b"instead\r\n")
            assert program.wait(timeout=10.0) == 2
        finally:
            program.kill()
            program.wait()
    assert said.startswith(b"serai: the monitor")
    assert said.count(b"\n") == 1
    assert b"\x1b" not in said


def test_a_reader_that_has_enough_ends_the_lines_quietly() -> None:
    """B111: monitor | head -1."""
    program = subprocess.Popen(
        [*COMMAND, "--every", "0.1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert program.stdout is not None
    assert program.stderr is not None
    with program.stdout as out, program.stderr as err:
        assert b"sessions" in out.readline()
        out.close()
        assert program.wait(timeout=10.0) == 0
        assert err.read() == b""


def test_a_hangup_is_noticed_without_looking() -> None:
    gone = threading.Event()
    with terminal() as (master, slave):
        thread = watch_for_hangup(slave, gone.set)
        assert not gone.is_set()
        os.close(master)
        thread.join(timeout=5.0)
        assert gone.is_set()
