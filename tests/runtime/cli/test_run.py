"""`serai run`: text as it comes, a session that is put away at the end, and Ctrl-C at any time."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from serai.runtime.cli.run import default_store

runner = CliRunner()
PROMPT = "The road behind them"
LONG_S = 120.0


def run_json(model: Path, store: Path, *arguments: str, text: str | None = None) -> dict[str, Any]:
    result = runner.invoke(app, ["run", str(model), *arguments, "--store", str(store), "--json"], input=text)
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert isinstance(values, dict)
    return values


def start(model: Path, store: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "serai.runtime", "run", str(model), *arguments, "--store", str(store)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)


def read_until(file: int, found: Callable[[bytes], bool]) -> bytes:
    """What came from the file until `found` says it is enough; fails rather than wait for ever."""
    seen, end_s = b"", time.monotonic() + LONG_S
    while not found(seen):
        ready, _, _ = select.select([file], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, f"nothing more came after {seen!r}"
        more = os.read(file, 4096)
        assert more, f"it ended after {seen!r}"
        seen += more
    return seen


def test_two_halves_of_a_sampled_answer_are_the_whole_one(nano: Path, tmp_path: Path) -> None:
    """B43 through the command line: the seed, the penalties' counts and the position survive the pause."""
    sampling = ("--temperature", "0.8", "--repetition-penalty", "1.1", "--frequency-penalty", "0.1", "--ignore-eos")
    whole = run_json(nano, tmp_path / "a", PROMPT, "--max-tokens", "12", "--seed", "7", *sampling)
    first = run_json(nano, tmp_path / "b", PROMPT, "--max-tokens", "5", "--seed", "7", *sampling)
    second = run_json(nano, tmp_path / "b", "--resume", first["resume"], "--max-tokens", "7", *sampling)
    assert first["tokens"] + second["tokens"] == whole["tokens"]
    assert second["position"] == whole["position"] == whole["prompt_tokens"] + 12
    assert (second["session"], second["prompt_tokens"]) == (first["session"], 0)


def test_a_resumed_session_reads_more_text(nano: Path, tmp_path: Path) -> None:
    first = run_json(nano, tmp_path, PROMPT, "--max-tokens", "3", "--ignore-eos")
    second = run_json(
        nano, tmp_path, " is the same road.", "--resume", first["resume"], "--max-tokens", "3", "--ignore-eos"
    )
    assert second["prompt_tokens"] > 0
    assert second["position"] == first["position"] + second["prompt_tokens"] + 3


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_without_a_prompt_stdin_is_read(arguments: tuple[str, ...], nano: Path, tmp_path: Path) -> None:
    greedy = ("--max-tokens", "4", "--temperature", "0", "--ignore-eos")
    piped = run_json(nano, tmp_path / "a", *arguments, *greedy, text=PROMPT)
    given = run_json(nano, tmp_path / "b", PROMPT, *greedy)
    assert piped["tokens"] == given["tokens"]


def test_people_get_the_text_alone_on_stdout_and_the_way_back_on_stderr(nano: Path, tmp_path: Path) -> None:
    values = run_json(nano, tmp_path / "a", PROMPT, "--max-tokens", "6", "--temperature", "0", "--ignore-eos")
    arguments = ["run", str(nano), PROMPT, "--max-tokens", "6", "--temperature", "0", "--ignore-eos"]
    result = runner.invoke(app, [*arguments, "--store", str(tmp_path / "b"), "--precision", "fast"])
    assert result.exit_code == 0
    assert result.stdout == values["text"] + "\n"
    found = re.search(r"go on with: serai run (\S+) --resume (\S+) --store (\S+)\n", result.stderr)
    assert found is not None
    assert (found[1], found[3]) == (str(nano), str(tmp_path / "b"))


def test_the_way_back_names_the_latents_that_were_asked_for(nano: Path, tmp_path: Path) -> None:
    arguments = ["--store", str(tmp_path), "--max-tokens", "3", "--ignore-eos"]
    result = runner.invoke(app, ["run", str(nano), PROMPT, *arguments, "--latents", "q8"])
    assert result.exit_code == 0, result.stderr
    found = re.search(r"go on with: serai run \S+ --resume (\S+) .*--latents q8\n", result.stderr)
    assert found is not None
    refused = runner.invoke(app, ["run", str(nano), "--resume", found[1], *arguments, "--json"])
    error = json.loads(refused.stdout)["error"]
    assert error["kind"] == "ModelMismatch"
    assert "latents" in error["message"]
    again = run_json(nano, tmp_path, "--resume", found[1], "--max-tokens", "3", "--ignore-eos", "--latents", "q8")
    assert len(again["tokens"]) == 3


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("x", "--top-p", "2"), "BadParameter"),
        (("x", "--logit-bias", "5"), "BadParameter"),
        (("",), "BadParameter"),
        (("--resume", "nothing-by-that-name"), "SessionGone"),
        (("x", "--budget", "1MiB"), "BudgetTooSmall"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(arguments: tuple[str, ...], kind: str, nano: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["run", str(nano), *arguments, "--store", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["kind"] == kind
    assert result.stderr.startswith("serai: ")


def test_an_unknown_session_is_never_begun_anew(nano: Path, tmp_path: Path) -> None:
    """B45: an exit code that scripts see, and a store with nothing in it."""
    for name in ("nope", "a" * 26):
        result = runner.invoke(app, ["run", str(nano), "x", "--resume", name, "--store", str(tmp_path), "--json"])
        assert result.exit_code == 1
        assert json.loads(result.stdout)["error"]["kind"] == "SessionGone"
        listed = runner.invoke(app, ["sessions", "ls", "--store", str(tmp_path), "--json"])
        assert json.loads(listed.stdout)["sessions"] == []
        assert not any(file.is_file() for file in (tmp_path / "nodes").iterdir())


def test_ctrl_c_pauses_and_the_printed_id_goes_on_with_the_same_tokens(nano: Path, tmp_path: Path) -> None:
    greedy = ("--temperature", "0", "--ignore-eos")
    store = tmp_path / "a"
    with start(
        nano, store, PROMPT, "--max-tokens", "1000000", *greedy, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read_until(process.stdout.fileno(), bool)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        said = process.stderr.read().decode()
        assert process.wait(timeout=LONG_S) == 130
    found = re.search(r"--resume (\S+)", said)
    assert found is not None, said
    resumed = run_json(nano, store, "--resume", found[1], "--max-tokens", "5", *greedy)
    generated = resumed["position"] - 5 - len(_prompt_tokens(nano))
    assert generated > 0
    whole = run_json(nano, tmp_path / "b", PROMPT, "--max-tokens", str(generated + 5), *greedy)
    assert whole["tokens"][-5:] == resumed["tokens"]


def test_ctrl_c_while_the_model_opens_ends_at_once(nano: Path, tmp_path: Path) -> None:
    environment = os.environ | {"SERAI_CACHE": str(tmp_path / "cold")}
    with start(
        nano, tmp_path / "store", PROMPT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        read_until(process.stderr.fileno(), lambda seen: b"preparing kernels" in seen)
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        said = process.stderr.read().decode()
        assert process.wait(timeout=LONG_S) == 130
        assert time.monotonic() - began_s < 5.0, "it did not wait for the compiler"
    assert "interrupted before anything was read" in said


def test_on_a_terminal_a_live_line_shows_the_speed_and_control_characters_are_left_out(
    nano: Path, tmp_path: Path
) -> None:
    escape = _prompt_tokens(nano, "\x1b")[0]
    forced = ("--max-tokens", "3", "--temperature", "0", "--logit-bias", f"{escape}=100", "--ignore-eos")
    leader, follower = pty.openpty()
    try:
        with start(nano, tmp_path, PROMPT, *forced, stdout=follower, stderr=follower) as process:
            os.close(follower)
            screen = read_until(leader, lambda seen: b"go on with" in seen)
            assert process.wait(timeout=LONG_S) == 0
    finally:
        os.close(leader)
    assert re.search(rb"\x1b\[24;1H\x1b\[2K\d tokens, [\d.]+ tok/s", screen), screen
    shown = re.sub(rb"\x1b(\[[?\d;]*[A-Za-z]|[78])", b"", screen)
    assert b"\x1b" not in shown, "every escape on the screen is one of ours"


def test_the_default_store_follows_the_environment() -> None:
    assert default_store({"XDG_STATE_HOME": "/elsewhere"}) == Path("/elsewhere/serai/sessions")
    assert default_store({}) == Path.home() / ".local/state/serai/sessions"


def _prompt_tokens(model: Path, text: str = PROMPT) -> list[int]:
    from serai.runtime.text.tokenizer import Tokenizer

    return Tokenizer.load(model).encode(text)
