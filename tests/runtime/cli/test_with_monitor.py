"""`serve --monitor` and `run --monitor` on a real pseudo-terminal: keys sent, the screen read, the end told."""

import fcntl
import http.client
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runtime.cli.test_run import PROMPT, read_until
from tests.shared import ROOT

LEFT_SCREEN = b"\x1b[?1049l"
CTRL_C = b"\x03"


@contextmanager
def on_terminal(*arguments: object) -> Iterator[tuple[int, "subprocess.Popen[bytes]"]]:
    """The program on a terminal of its own, 80×24, where Ctrl-C is a signal; and the terminal's other end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    environ = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "serai.runtime", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environ, preexec_fn=own_terminal
    )
    os.close(slave)
    try:
        yield master, process
    finally:
        process.kill()
        process.wait()
        os.close(master)


def asked(path: Path, where: str) -> int:
    """The status of a request over a Unix socket."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(str(path))
    connection.request("GET", where)
    answer = connection.getresponse()
    json.loads(answer.read())
    connection.close()
    return answer.status


def test_a_server_shows_its_sessions_until_ctrl_c_ends_it(nano: Path, tmp_path: Path) -> None:
    where = tmp_path / "socket"
    with on_terminal("serve", nano, "--monitor", "--host", f"unix:{where}", "--store", tmp_path / "s") as (
        terminal,
        server,
    ):
        read_until(terminal, lambda seen: b"no session yet" in seen)
        assert asked(where, "/serai/status") == 200
        os.write(terminal, CTRL_C)
        read_until(terminal, lambda seen: LEFT_SCREEN in seen)
        assert server.wait(timeout=30) == 0


def test_leaving_the_monitor_leaves_the_server_be(nano: Path, tmp_path: Path) -> None:
    where = tmp_path / "socket"
    with on_terminal("serve", nano, "--monitor", "--host", f"unix:{where}", "--no-store") as (terminal, server):
        read_until(terminal, lambda seen: b"no session yet" in seen)
        os.write(terminal, b"q")
        seen = read_until(terminal, lambda seen: b"Ctrl-C ends it" in seen)
        assert seen.index(LEFT_SCREEN) < seen.index(b"the monitor was left")
        assert asked(where, "/health") == 200
        os.write(terminal, CTRL_C)
        assert server.wait(timeout=30) == 0


def test_a_run_is_watched_and_ctrl_c_pauses_it(nano: Path, tmp_path: Path) -> None:
    arguments = ("run", nano, PROMPT, "--monitor", "--ignore-eos", "--max-tokens", 100_000, "--store", tmp_path)
    with on_terminal(*arguments) as (terminal, process):
        read_until(terminal, lambda seen: b"lines before" in seen)  # it says more than there is room for
        os.write(terminal, CTRL_C)
        seen = read_until(terminal, lambda seen: b"go on with: serai run" in seen)
        assert seen.index(LEFT_SCREEN) < seen.index(b"paused at")
        assert process.wait(timeout=30) == 130


def test_a_run_goes_on_in_plain_text_once_the_monitor_is_left(nano: Path, tmp_path: Path) -> None:
    arguments = ("run", nano, PROMPT, "--monitor", "--ignore-eos", "--max-tokens", 100_000, "--store", tmp_path)
    with on_terminal(*arguments) as (terminal, process):
        read_until(terminal, lambda seen: b"lines before" in seen)  # it says more than there is room for
        os.write(terminal, b"q")
        read_until(terminal, lambda seen: LEFT_SCREEN in seen and b"tok/s" in seen.split(LEFT_SCREEN)[-1])
        os.write(terminal, CTRL_C)
        read_until(terminal, lambda seen: b"go on with: serai run" in seen)
        assert process.wait(timeout=30) == 130


@pytest.mark.parametrize("command", ["run", "serve"])
def test_without_a_terminal_nothing_is_begun(command: str, nano: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "serai.runtime", command, str(nano), "--monitor", "--store", str(tmp_path / "s")]
    words += [PROMPT] if command == "run" else []
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(b"serai: the monitor needs a keyboard")
    assert b"leave --monitor out" in done.stderr
    assert not (tmp_path / "s").exists()
