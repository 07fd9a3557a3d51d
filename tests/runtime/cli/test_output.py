"""How commands speak: one JSON object or tables on stdout, one sentence on stderr, an exit code that says which."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from serai.runtime.cli.main import app
from serai.runtime.cli.output import bytes_text, counted, reporting
from serai.runtime.errors import BadParameter

CONFIG = Path(__file__).resolve().parents[2] / "data" / "kimi-k3-config.json"
runner = CliRunner()


def serai(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "serai.runtime", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_and_plan_start_without_the_compiler() -> None:
    script = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from serai.runtime.cli.main import app\n"
        f"for arguments in (['--help'], ['plan', {str(CONFIG)!r}, '--json']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        "loaded = sorted({'numba', 'llvmlite'} & set(sys.modules))\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_version_is_the_packages() -> None:
    done = serai("--version")
    assert (done.returncode, done.stdout) == (0, f"serai {version('serai')}\n")


def test_errors_leave_no_traceback_and_exit_code_1() -> None:
    done = serai("plan", "/no/such/model")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("serai: there is no model '/no/such/model'")
    assert done.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2_and_leaves_stdout_empty() -> None:
    done = serai("plan", "--json")
    assert done.returncode == 2
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["run", "plan", "info", "eval", "selfcheck", "bench"])
def test_every_command_explains_itself(command: str) -> None:
    assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_an_error_inside_task_groups_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reporting(as_json=True):
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [BadParameter("that is wrong")])])
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"kind": "BadParameter", "message": "that is wrong"}}
    assert err == "serai: that is wrong\n"


def test_an_unforeseen_error_is_not_swallowed_even_beside_a_foreseen_one() -> None:
    with pytest.raises(ExceptionGroup), reporting(as_json=False):
        raise ExceptionGroup("both", [BadParameter("that is wrong"), RuntimeError("a bug")])


def test_an_interrupted_command_ends_as_shells_expect(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, reporting(as_json=True):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1_000, "1 kB"),
        (55_296, "55.3 kB"),
        (464_633_856, "465 MB"),
        (999_600, "1 MB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert bytes_text(size) == text


def test_one_is_no_plural() -> None:
    assert [counted(number, "fork") for number in (0, 1, 1_000)] == ["0 forks", "1 fork", "1,000 forks"]
