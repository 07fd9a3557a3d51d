"""Every example runs and says what it should."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from serai.runtime.bench.tiny import write_tiny_model
from tests.shared import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


def run(name: str, *arguments: object, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hello(tiny: Path, tmp_path: Path) -> None:
    out = run("hello.py", tiny, cwd=tmp_path)
    assert "<Session " in out
    assert "1 sessions" in out


def test_fork_three_ways(tiny: Path, tmp_path: Path) -> None:
    out = run("fork_three_ways.py", tiny, cwd=tmp_path)
    assert "and 0 bytes of state" in out
    assert "What is the job of Tom?" in out
    assert re.search(r"the reader stayed at its position, \d+: True", out)


def test_resume_after_crash(tiny: Path, tmp_path: Path) -> None:
    out = run("resume_after_crash.py", tiny, cwd=tmp_path)
    assert "ended with signal 9" in out
    assert "equal to an undisturbed run: True" in out


def test_time_travel(tiny: Path, tmp_path: Path) -> None:
    assert "both answers equal: True" in run("time_travel.py", tiny, cwd=tmp_path)


def test_migrate_between_processes(tiny: Path, tmp_path: Path) -> None:
    assert "equal to staying: True" in run("migrate_between_processes.py", tiny, cwd=tmp_path)


def test_the_demo(tiny: Path, tmp_path: Path) -> None:
    out = run("demo.py", tiny, cwd=tmp_path)
    assert out.count("0 tokens computed again, every bit equal") == 2
    assert "for 0 bytes of state" in out


def test_subagents_under_one_budget(tiny: Path, tmp_path: Path) -> None:
    out = run("subagents_under_one_budget.py", tiny, cwd=tmp_path)
    assert "13 sessions are alive" in out
    assert "12 sub-agents answered" in out
    assert " 0 in the store" not in out


def test_best_of_n(tiny: Path, tmp_path: Path) -> None:
    out = run("best_of_n.py", tiny, cwd=tmp_path)
    assert "tokens were read once" in out
    assert "the best: " in out


def test_wait_for_tool(tiny: Path, tmp_path: Path) -> None:
    out = run("wait_for_tool.py", tiny, cwd=tmp_path)
    assert "while the tool works its state is cold" in out
    assert "the tool has answered; its state is hot" in out
    assert "every bit is the same: True" in out


def test_shared_document(tiny: Path, tmp_path: Path) -> None:
    out = run("shared_document.py", tiny, cwd=tmp_path)
    first, after = out.split("after a restart")
    assert first.count("    0 known") == 1, "one session read the document"
    assert "    0 known" not in after


def test_edit_and_retry(tiny: Path, tmp_path: Path) -> None:
    out = run("edit_and_retry.py", tiny, cwd=tmp_path)
    assert "equal to having said so at once: True" in out


def test_make_tiny_model(tmp_path: Path) -> None:
    out = run("make_tiny_model.py", tmp_path / "model", "--family", "kimi_linear", cwd=tmp_path)
    assert "a kimi_linear model" in out
    assert (tmp_path / "model" / "config.json").is_file()
