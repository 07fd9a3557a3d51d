"""Every example runs with the model it runs with by default, nano, and says what it should."""

import re
import subprocess
import sys
from pathlib import Path

from tests.shared import ROOT

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: object, cwd: Path) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hello(tmp_path: Path) -> None:
    out = run("hello.py", cwd=tmp_path)
    assert "<Session " in out
    assert "1 session (" in out


def test_fork_three_ways(tmp_path: Path) -> None:
    out = run("fork_three_ways.py", cwd=tmp_path)
    assert "and 0 bytes of state" in out
    for answer in ("The code of the red box is 4172.", "The job of Tom is baker.", "the blue key is the cellar."):
        assert answer in out
    assert re.search(r"the reader stayed at its position, \d+: True", out)


def test_resume_after_crash(tmp_path: Path) -> None:
    out = run("resume_after_crash.py", cwd=tmp_path)
    assert "ended with signal 9" in out
    assert "equal to an undisturbed run: True" in out


def test_time_travel(tmp_path: Path) -> None:
    assert "both answers equal: True" in run("time_travel.py", cwd=tmp_path)


def test_migrate_between_processes(tmp_path: Path) -> None:
    assert "equal to staying: True" in run("migrate_between_processes.py", cwd=tmp_path)


def test_the_demo(tmp_path: Path) -> None:
    out = run("demo.py", cwd=tmp_path)
    assert out.count("0 tokens computed again, every bit equal") == 2
    assert "for 0 bytes of state" in out
    assert out.count("✓") == 5
    assert "✗" not in out


def test_subagents_under_one_budget(tmp_path: Path) -> None:
    out = run("subagents_under_one_budget.py", cwd=tmp_path)
    assert "13 sessions are alive" in out
    assert "12 sub-agents answered" in out
    assert " 0 in the store" not in out


def test_best_of_n(tmp_path: Path) -> None:
    out = run("best_of_n.py", cwd=tmp_path)
    assert "tokens were read once" in out
    assert "the best: " in out


def test_wait_for_tool(tmp_path: Path) -> None:
    out = run("wait_for_tool.py", cwd=tmp_path)
    assert "while the tool works its state is cold" in out
    assert "the tool has answered; its state is hot" in out
    assert "every bit is the same: True" in out


def test_shared_document(tmp_path: Path) -> None:
    out = run("shared_document.py", cwd=tmp_path)
    first, after = out.split("after a restart")
    assert first.count("    0 known") == 1, "one session read the document"
    assert "    0 known" not in after


def test_edit_and_retry(tmp_path: Path) -> None:
    out = run("edit_and_retry.py", cwd=tmp_path)
    assert "equal to having said so at once: True" in out


def test_make_tiny_model(tmp_path: Path) -> None:
    out = run("make_tiny_model.py", tmp_path / "model", "--family", "kimi_linear", cwd=tmp_path)
    assert "a kimi_linear model" in out
    assert (tmp_path / "model" / "config.json").is_file()
