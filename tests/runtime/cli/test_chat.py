"""`serai chat`: line in, answer out, and conversations that fork, pause and resume."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner, Result

from serai.runtime.cli import chat_interrupts
from serai.runtime.cli.chat_interrupts import ChatInterrupts
from serai.runtime.cli.main import app
from serai.runtime.text.tokenizer import Tokenizer
from tests.runtime.cli.test_run import LONG_S, read_until

runner = CliRunner()
GREEDY = ("--temperature", "0", "--max-tokens", "6", "--min-tokens", "6", "--no-thinking")
ENDLESS = ("--temperature", "0", "--max-tokens", "1000000", "--min-tokens", "1000000")


def chat(model: Path, store: Path, *arguments: str, lines: str) -> Result:
    return runner.invoke(app, ["chat", str(model), *arguments, "--store", str(store)], input=lines)


def start(model: Path, store: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "serai.runtime", "chat", str(model), *arguments, "--store", str(store)]
    return subprocess.Popen(command, **options)


def ways_back(told: str) -> list[str]:
    """The ids in the commands to resume, in the order they were printed."""
    return re.findall(r"^go on with: serai chat \S+ --resume (\S+) --store \S+$", told, re.MULTILINE)


@pytest.fixture(scope="module")
def whole(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the model answers to two messages."""
    result = chat(nano, tmp_path_factory.mktemp("whole"), *GREEDY, lines="The first road\n\nThe second road\n")
    assert result.exit_code == 0, result.stderr
    assert len(ways_back(result.stderr)) == 1
    return result.stdout


def test_the_end_of_input_pauses_and_the_printed_command_goes_on(nano: Path, tmp_path: Path, whole: str) -> None:
    first = chat(nano, tmp_path, *GREEDY, lines="The first road\n")
    (session,) = ways_back(first.stderr)
    second = chat(nano, tmp_path, *GREEDY, "--resume", session, lines="The second road\n/quit\nnot read\n")
    assert second.exit_code == 0, second.stderr
    assert first.stdout + second.stdout == whole
    assert re.match(rf"this is {session} now, at \d+ tokens\n", second.stderr)
    assert ways_back(second.stderr) == [session]


def test_a_fork_knows_what_was_said_and_its_origin_does_not_know_the_fork(
    nano: Path, tmp_path: Path, whole: str
) -> None:
    lines = "The first road\n/fork second try\nThe second road\n/sessions\n"
    result = chat(nano, tmp_path, *GREEDY, lines=lines)
    assert result.exit_code == 0, result.stderr
    origin, fork = ways_back(result.stderr)
    answers, listed = result.stdout[: len(whole)], result.stdout[len(whole) :]
    assert answers == whole
    assert [(line[0], line[2:28], line.split("  ")[-1]) for line in listed.splitlines()] == [
        (" ", origin, "serai chat"),
        ("*", fork, "second try"),
    ]
    back = chat(nano, tmp_path, *GREEDY, lines=f"/resume {origin}\nThe second road\n/resume {fork}\n")
    assert back.exit_code == 0, back.stderr
    assert whole.endswith(back.stdout)
    assert ways_back(back.stderr) == [origin, fork]


def test_after_a_pause_a_new_conversation_begins_and_the_old_one_is_listed(
    nano: Path, tmp_path: Path, whole: str
) -> None:
    """B44: nothing of the old conversation is in the new one."""
    lines = "/pause\nThe first road\n/pause\n/sessions\nThe first road\n"
    result = chat(nano, tmp_path, *GREEDY, lines=lines)
    assert result.exit_code == 0, result.stderr
    old, new = ways_back(result.stderr)
    first = whole[: result.stdout.index(f"  {old}")]
    assert whole.startswith(first)
    assert re.fullmatch(
        rf"{re.escape(first)}  {old} +\d+ tokens  put away  serai chat\n{re.escape(first)}", result.stdout
    )
    assert old != new
    assert "nothing has been said here yet" in result.stderr


def test_thinking_is_marked(nano: Path, tmp_path: Path) -> None:
    result = chat(nano, tmp_path, *GREEDY, "--thinking", "--system", "Be brief.", lines="hello\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout
    assert all(line.startswith("| ") for line in result.stdout.splitlines())


def test_a_line_that_fails_is_one_sentence_and_the_next_one_is_read(nano: Path, tmp_path: Path, whole: str) -> None:
    result = chat(nano, tmp_path, *GREEDY, lines="/stop\n/resume nowhere\n/fork \x07\nThe first road\n")
    assert result.exit_code == 1, "a script can tell that something failed"
    told = [line for line in result.stderr.splitlines() if line.startswith("serai: ")]
    assert len(told) == 3
    assert "there is no command '/stop'" in told[0]
    assert "nowhere" in told[1]
    assert result.stdout
    assert whole.startswith(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--resume", "nothing-by-that-name"), "nothing-by-that-name"),
        (("--resume", "x", "--system", "Be brief."), "--system is for new conversations"),
        (("--top-p", "2"), "top_p"),
        (("--logit-bias", "5"), "--logit-bias takes"),
        (("--budget", "1MiB"), "budget"),
    ],
)
def test_what_cannot_begin_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, nano: Path, tmp_path: Path
) -> None:
    result = chat(nano, tmp_path, *arguments, lines="hello\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("serai: ")
    assert sentence in result.stderr


def test_ctrl_c_stops_the_answer_and_twice_pauses(nano: Path, tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with start(nano, tmp_path, *ENDLESS, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        read_until(process.stdout.fileno(), bool)
        process.send_signal(signal.SIGINT)
        told = read_until(process.stderr.fileno(), lambda seen: b"what was said stays" in seen)
        process.send_signal(signal.SIGINT)  # stdin stays open: it waits for a line
        told += process.stderr.read()
        assert process.wait(timeout=LONG_S) == 130
    (session,) = ways_back(told.decode())
    result = chat(nano, tmp_path, *GREEDY, "--resume", session, lines="go on\n")
    assert result.exit_code == 0, result.stderr
    position = re.search(r"at (\d+) tokens", result.stderr)
    assert position is not None
    assert int(position[1]) > len(Tokenizer.load(nano).encode("hello"))


def test_on_a_terminal_there_is_a_prompt_and_the_model_cannot_take_it_over(nano: Path, tmp_path: Path) -> None:
    escape = Tokenizer.load(nano).encode("\x1b")[0]
    forced = (*GREEDY, "--logit-bias", f"{escape}=100")
    leader, follower = pty.openpty()
    try:
        with start(nano, tmp_path, *forced, stdin=follower, stdout=follower, stderr=follower) as process:
            os.close(follower)
            opened = read_until(leader, lambda seen: seen.endswith(b"> "))
            assert b"/help lists the commands" in opened
            os.write(leader, b"hello\n")
            answered = read_until(leader, lambda seen: seen.endswith(b"> "))
            os.write(leader, b"\x04")
            read_until(leader, lambda seen: b"go on with: serai chat" in seen)
            assert process.wait(timeout=LONG_S) == 0
    finally:
        os.close(leader)
    assert b"cut after 6 tokens" in answered
    assert b"\x1b" not in answered


def test_which_ctrl_c_does_what(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    hints: list[None] = []
    monkeypatch.setattr(chat_interrupts, "leave_at_once", left.append)

    async def work() -> int | None:
        interrupts = ChatInterrupts(lambda: hints.append(None))
        interrupts.came(signal.SIGINT)
        assert (len(hints), interrupts.leave.cancel_called) == (1, False), "there is no answer to stop"
        interrupts.heard()
        with interrupts.answering() as answer:
            interrupts.came(signal.SIGINT)
            stopped = answer.cancel_called, interrupts.leave.cancel_called
            assert stopped == (True, False), "a line was typed, so it is a first one again"
        interrupts.came(signal.SIGINT)
        assert interrupts.leave.cancel_called
        assert left == []
        interrupts.came(signal.SIGTERM)
        return interrupts.signal

    assert anyio.run(work) == signal.SIGINT
    assert left == [signal.SIGTERM]
    assert len(hints) == 1


def test_the_help_says_when_the_model_thinks() -> None:
    told = " ".join(runner.invoke(app, ["chat", "--help"], env={"COLUMNS": "400"}).stdout.split())
    assert "not with nano, which was trained mostly without" in told
    assert "else what the model's family does" in told
